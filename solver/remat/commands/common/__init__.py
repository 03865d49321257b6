"""Parts that several commands share.

- `exits`: exit codes, and errors as one line on stderr.
- `command_options`: command-line options, and the strategy and limits that they describe.
- `step_options`: options of the commands that load a model and its training step.
- `length_option`: the lengths of batches.
- `files`: reads documents, checks output paths, writes and prints results.
- `summaries`: plans and traces as flat JSON, CSV and tables.
- `plots`: the file formats of `remat plot`.
- `frontier_files`: the file formats of a time/memory frontier.
- `progress_line`: a live line on stderr that shows the progress.
- `interrupt`: runs work that Ctrl-C and SIGTERM end early.
- `interruptible_solve`: solves with a progress line until the end or an interrupt.
"""
