"""The PyTorch side of remat: the only part of the library that imports torch.

api/       the functions that users call: optimize, enable, estimate, max_batch, trials
planning/  plans of a model's step for each kind of call, the caches, and reuse of schedules
blocks/    plans of a model's repeated blocks, where the whole model is not planned
compile/   the backend "remat" of torch.compile, on Inductor's kernels
emit/      plans as checkpointing policies of other libraries
capture/   the joint graph of a training step as a `Trace`
costs/     measured seconds and workspaces of operations, and their cache
runtime/   a `Program` as a module: lowered, launched, guarded
memory/    free memory, measured peaks, and the size of an optimizer's state
common/    helpers that the other packages share: operators, pytrees, target GPUs
"""
