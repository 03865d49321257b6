"""The search behind `Auto` and `Exact`.

- `search`: runs a pipeline of steps and returns the best schedule with its bound.
- `pipeline`: the steps of each strategy, with their shares of the time; `steps`: the steps.
- `step`: one step, and running several; `state`: incumbents and bound, passed from step to step.
- `runner`: runs programs; `deadline`, `stall`: when to stop.
"""
