"""Benchmarks behind the claims of speed and memory; their dated results are in `results/`.

Each runs as `python -m benchmarks.NAME`:

* `overhead`: eager mode, per-block checkpointing, torch's budget and remat at the same peaks;
* `compiled`: the ways of torch.compile to save memory; `compile_time`: how long compiling takes;
* `training`: fifty steps of the Trainer of Transformers; `lengths`: batches of many lengths;
* `dispatch`: a step that consists of kernel launches only;
* `sources`: published figures about checkpointing, and those of remat for the same step;
* `splitting`: the heads of language models in pieces; `software_gpu`: CUDA without a GPU;
* `loss_peers`: losses in chunks by hand (`chunked_losses`), and remat at the same peak;
* `solver`: quality and time of schedules; `building`: time to build the MILP;
* `coverage`: the architectures of Transformers; `service`: load, kills, overhead of HTTP;
* `gpu`: the acceptance run on a GPU; `mutants`: mutation tests.

`harness` holds what they share, `models` the models.
"""
