"""Reports as text and tables.

`describe` summarizes a plan, compares two plans and describes a peak; `explain` says why a plan
retains or recomputes an operation. `estimate` predicts the memory of a step before it runs,
`comparison` compares strategies, `solve_progress` reports on a solve, and `tables` aligns text.
Pictures are in `remat.view`.
"""
