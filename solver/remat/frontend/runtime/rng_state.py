"""RNG states: recorded when a random operation first runs, restored when it is recomputed.

torch's own graph-safe scheme assumes one recomputation; a schedule may have any number. On CUDA a
state is two integers on the host, the Philox seed and offset, so recording one costs no tensor; on
the CPU it is a tensor of 5 KB. Inside a CUDA graph capture torch exposes neither integer (a replay
brings its own), so a step that is to be captured must not recompute random operations: see
`remat.passes.random_operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.errors import GuardError

RngState = torch.Tensor | tuple[int, int]
"""The state tensor of the CPU's generator, or the Philox seed and offset of a CUDA generator."""


def generator_state(device: str) -> RngState:
    """Return the state of the default generator of `device`. Raises `GuardError` inside a CUDA
    graph capture."""
    if not device.startswith("cuda"):
        return torch.get_rng_state()
    if torch.cuda.is_current_stream_capturing():
        raise GuardError(
            "this plan recomputes random operations, whose generator state cannot be recorded "
            "inside a CUDA graph capture; plan with optimize(..., cuda_graphs=True), which retains "
            "their results, or do not capture"
        )
    return philox_state(cuda_generator(device))


def set_generator_state(device: str, state: RngState) -> None:
    """Set the state of the default generator of `device`."""
    if isinstance(state, torch.Tensor):
        torch.set_rng_state(state)
    else:
        set_philox_state(cuda_generator(device), state)


def cuda_generator(device: str) -> torch.Generator:
    """Return the default generator of a CUDA device; "cuda" is the current device."""
    index = torch.device(device).index
    return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


def philox_state(generator: torch.Generator) -> tuple[int, int]:
    """Return the seed and offset of a CUDA generator, which are its whole state."""
    return generator.initial_seed(), generator.get_offset()


def set_philox_state(generator: torch.Generator, state: tuple[int, int]) -> None:
    """Set the seed and offset of a CUDA generator."""
    seed, offset = state
    if generator.initial_seed() != seed:  # it was reseeded in between
        generator.manual_seed(seed)
    generator.set_offset(offset)


def run_with_generator_state(
    state: RngState,
    device: str,
    operation: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Recompute a random operation under the RNG state of its first run, and return its results.

    The generator has its present state again afterwards."""
    present_state = generator_state(device)
    set_generator_state(device, state)
    try:
        return operation(*args, **kwargs)
    finally:
        set_generator_state(device, present_state)
