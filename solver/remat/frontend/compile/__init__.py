"""torch.compile within a memory budget: `torch.compile(model, backend="remat", options=...)`.

- `backend`: the backend "remat" and `remat.compile`; replans a graph that exceeds its budget
- `partitioner`: plans one joint graph and splits it into forward and backward
- `candidates`: selects among the plans of a graph's variants and Inductor's own kernels
- `solving`: solves a graph in the time that planning leaves for it; explains infeasible budgets
- `compile_options`: the options of `torch.compile`, read and checked
- `external_memory`: bytes that other modules use while a graph runs
- `registry`: the plans of this process, `remat.compiled_plans()`
- `disk_cache`: plans on disk, for code in torch's cache
- `reporting`: log lines
- `naming`: names of what Dynamo compiles
- `compat`: differences between versions of torch
- `joint/`: the joint forward and backward graph
- `kernels/`: fusion groups, their costs, and the way from graph to schedule and back
- `inductor/`: what Inductor will run, and control of it
"""
