"""The commands of `remat`, one module for each command.

- `compare`, `diff`, `doctor`, `estimate`, `explain`, `measure`, `plot`, `run`, `solve`, `sweep`,
  `trace`: the commands.
- `diagnosis`: the checks of `remat doctor`.
- `requirements`: version requirements of an installed package, for `diagnosis`.
- `common`: options, files, exit codes and progress, which several commands use.
- `models`: loads the model that a SOURCE on the command line names.
"""
