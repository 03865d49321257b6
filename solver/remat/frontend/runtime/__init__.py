"""Runs a `Program` as a module that trains.

- `module`: `RematModule` and `lower`, the entry points.
- `autograd_function`: one autograd node that runs the forward and the backward graph of a step.
- `lower`: turns a program into these two graphs.
- `launcher`: generates a Python function with low overhead for each graph.
- `guards`: checks that a call matches what was planned.
- `rng_state`: records RNG states, and restores them to recompute random operations.
- `gradient_accumulation`: adds gradients into `.grad` inside the backward graph.
- `offload`: copies tensors to the host and back: to pinned memory (`pinned_memory`) or to a file
  (`host_file`, through `file_io`).
- `step_monitor`: warns if held outputs are released before the backward, or the graph is retained.
"""
