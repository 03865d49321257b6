"""Generator states: recorded when a random operation first runs, replayed when it runs again.

torch's own graph-safe scheme assumes one recomputation; a schedule may hold any number. A state is
16 bytes on CUDA and 5 KB on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.errors import GuardError


def generator_state(device: str) -> torch.Tensor:
    """The default generator's state on `device`, as a CPU tensor of bytes."""
    if device.startswith("cuda"):
        if torch.cuda.is_current_stream_capturing():
            raise GuardError(
                "this plan recomputes random operations, whose generator state cannot be recorded "
                "inside a CUDA graph capture; capture without dropout, or do not capture"
            )
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def set_generator_state(device: str, state: torch.Tensor) -> None:
    """Set the default generator's state on `device`."""
    if device.startswith("cuda"):
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def replay(
    state: torch.Tensor,
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
