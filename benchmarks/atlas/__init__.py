"""The atlas: checkpointing policies and the optimum, on models that people train and current GPUs.

`python -m benchmarks.atlas --help` lists the commands; docs/atlas/index.md has the results.
"""
