"""Where torch is: a model becomes a `Trace`, a `Program` a module that runs.

    capture/   the joint graph of a step, with the operations of the device that it is for
    costs/     seconds and bytes of its operations, measured; and the cache that keeps them
    runtime/   a program as a module: lowered, launched, guarded

Beside these rooms: what users call (`optimize`, `estimate`, `max_batch`, `trial`), the `planner`
behind it, and what the rooms share (`operators`, `pytree`, `memory`, `target`, ...).
"""
