"""Random numbers of CUDA operations: CPU generators seeded from a CUDA generator's state.

A CUDA generator is a seed and an offset, which each random operation advances. The numbers here
are a function of both and of the operation's arguments: a replay of the state gives the same
numbers, and a wrong offset gives others. They are not the numbers of a GPU's philox generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PhiloxState:
    """The state of a CUDA generator when an operation starts."""

    seed: int
    offset: int

    def cpu_seed(self) -> int:
        """Return a seed for a CPU generator: a hash, since that generator's seeds have 32 bits."""
        text = f"{self.seed % 2**64} {self.offset}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")

    def generator(self) -> torch.Generator:
        """Return a CPU generator for this state."""
        return torch.Generator("cpu").manual_seed(self.cpu_seed())


def state_of(generator: torch.Generator) -> PhiloxState:
    """Return the state of a CUDA generator."""
    return PhiloxState(generator.initial_seed(), generator.get_offset())


@contextmanager
def default_generator(state: PhiloxState) -> Iterator[None]:
    """Seed the CPU's default generator from `state`, and restore it afterwards."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(state.cpu_seed())
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def keep_mask(state: PhiloxState, shape: tuple[int, ...], dropout: float) -> torch.Tensor:
    """Return a mask of `shape` that is False with probability `dropout`."""
    return torch.rand(shape, generator=state.generator()) >= dropout
