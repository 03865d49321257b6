"""Acceptance run of remat on a GPU: `python -m benchmarks.gpu`.

`__main__` is the command, `steps` the table of its steps, `runner` and `child` run each part in a
process, `verdicts` holds their checks. `setting` chooses between a GPU and a dry run, `device`
measures on both, `models` builds the models. `marked_tests` is step 0; `correctness`, `memory` and
`speed` are the other steps.
"""
