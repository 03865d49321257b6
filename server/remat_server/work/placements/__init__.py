"""Where solving processes run.

- `interface`: the protocols `Placement` and `RunningSolve`.
- `local`: processes on this machine.
- `on_ray`: processes on the nodes of a Ray cluster.
"""
