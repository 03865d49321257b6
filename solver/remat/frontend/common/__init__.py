"""Helpers that several parts of the frontend share.

- `aliases`: which fx nodes share a storage, and which arguments an operator writes to.
- `operators`: looks up torch operations by name, and converts their arguments to and from data.
- `graph_writer`: writes the calls of a trace or of a program into an fx graph.
- `pytree`: flattens and rebuilds nested arguments and outputs.
- `torch_modes`: context managers for autocast, the grad mode and dispatch modes.
- `garbage_collection`: no searches for reference cycles while many objects are created.
- `planning_line`: the line on a terminal while a step is planned.
- `target_gpu`: devices by name, local or only known by their data sheet.
- `code_origin`: source files of the user, torch, remat and installed packages; the part of a step
  that raised an error.
"""
