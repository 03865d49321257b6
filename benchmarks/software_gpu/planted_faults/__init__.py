"""Faults that are planted into remat at run time, and the checks that must notice them.

- `session`: a small model, some training steps, and their comparison with eager mode and the plan.
- `fault`: what a fault is, and tools to plant one.
- `in_programs`: faults in the program that a plan is rewritten to.
- `at_run_time`: faults while a program runs: RNG states, lifetimes, gradients.
- `in_guards`: guards that do not notice a change.
- `in_memory`: faults in the prediction of memory; most need the allocator of a GPU.
- `in_compiled_steps`: faults in the verified peak under torch.compile.
"""
