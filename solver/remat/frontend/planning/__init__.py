"""Planning of a model's training step, and reuse of plans from call to call.

`planner` plans a step for each kind of call; `plan_cache` has the entries that it keeps;
`trace_cache` captures steps, once for all sizes; `schedule_reuse` reuses schedules at other sizes.
"""
