"""Published figures about activation checkpointing, and those of remat for the same GPU.

    python -m benchmarks.sources                              # all cases, to benchmarks/results
    python -m benchmarks.sources --only llama-7b --out DIR

Nothing runs on a GPU: each step is traced for an absent one without memory for its parameters, and
has the costs of a roofline. `cases` has the published figures and our assumptions, `models` the
models, `figures` computes: eager mode, a checkpoint for each block, the fastest plans at the
published peaks and at that of the checkpoints, and the largest batch or context within the memory
of the checkpoints.
"""
