"""Generator states: recorded when a random operation first runs, replayed when it runs again.

torch's own graph-safe scheme assumes one recomputation; a schedule may hold any number. On CUDA a
state is two numbers on the host, the Philox seed and offset, so recording one costs no tensor; on
the CPU it is a tensor of 5 KB. Inside a CUDA graph capture torch tells neither number (a replay
brings its own), so a step that is to be captured must draw everything once: `remat.passes.draws`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.errors import GuardError

State = torch.Tensor | tuple[int, int]
"""Bytes of the CPU's generator, or the seed and offset of a CUDA one."""


def generator_state(device: str) -> State:
    """The state of the default generator on `device`."""
    if not device.startswith("cuda"):
        return torch.get_rng_state()
    if torch.cuda.is_current_stream_capturing():
        raise GuardError(
            "this plan recomputes random operations, whose generator state cannot be recorded "
            "inside a CUDA graph capture; plan with optimize(..., cuda_graphs=True), which keeps "
            "what was drawn, or do not capture"
        )
    return philox(cuda_generator(device))


def set_generator_state(device: str, state: State) -> None:
    """Set the state of the default generator on `device`."""
    if isinstance(state, torch.Tensor):
        torch.set_rng_state(state)
    else:
        set_philox(cuda_generator(device), state)


def cuda_generator(device: str) -> torch.Generator:
    """The default generator of a CUDA device; "cuda" is the current one."""
    index = torch.device(device).index
    return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


def philox(generator: torch.Generator) -> tuple[int, int]:
    """Seed and offset: all that there is to the state of a CUDA generator."""
    return generator.initial_seed(), generator.get_offset()


def set_philox(generator: torch.Generator, state: tuple[int, int]) -> None:
    """The inverse of `philox`."""
    seed, offset = state
    if generator.initial_seed() != seed:  # somebody seeded it in between
        generator.manual_seed(seed)
    generator.set_offset(offset)


def replay(
    state: State,
    device: str,
    operation: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run `operation` as it ran under `state`; the generator is afterwards where it was before."""
    before = generator_state(device)
    set_generator_state(device, state)
    try:
        return operation(*args, **kwargs)
    finally:
        set_generator_state(device, before)
