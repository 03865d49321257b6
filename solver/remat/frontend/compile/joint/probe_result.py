"""Report of a compiler about a forward or backward graph, before it generates code.

`inductor/probe.py` is the only implementation of `KernelProbe`; the joint graph is built from its
answers without knowing Inductor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import fx


@dataclass(frozen=True)
class InductorKernel:
    """One kernel of a scheduled graph, in terms of the names of FX nodes.

    It writes the nodes `written` and was lowered from the nodes `origins`. `is_extern` marks extern
    kernels and templates. `workspace_bytes` are allocated only while it runs; None for an extern
    kernel that could not be measured. `in_place_pairs` are (output, input) pairs that may share
    memory if the input is dead after the kernel, in the order in which Inductor tries them.
    """

    written: tuple[str, ...]
    origins: tuple[str, ...]
    is_extern: bool = False
    workspace_bytes: int | None = None
    in_place_pairs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ProbeResult:
    """A forward or backward graph as Inductor would run it.

    `kernels` are in the order of execution and `peak_bytes` is the peak of all inputs and buffers
    that are allocated or freed in the graph. `layout_copy_bytes` are the parameters and batch
    tensors that the graph saves as a copy in another layout. `output_strides` has the strides of
    each output by name, where they are constants.
    """

    kernels: tuple[InductorKernel, ...] = ()
    peak_bytes: int = 0
    layout_copy_bytes: int = 0
    output_strides: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict[str, tuple[int, ...]]
    )


@dataclass(frozen=True)
class InputLifetimes:
    """Which inputs of a forward or backward graph free their memory during the graph.

    `storages` has for each input the name of its storage base and the bytes that count for it: 0
    for parameters and the batch, which are allocated during the whole step. Inputs `overwritable`
    may be overwritten in place. `donated_bytes` are the tangents that are freed once they are read.
    Inputs `retained` stay allocated to the end: outputs of the forward that the caller references.
    """

    storages: Mapping[str, tuple[str, int]]
    overwritable: Collection[str]
    donated_bytes: Mapping[str, int]
    retained: Collection[str] = ()


class KernelProbe(Protocol):
    """A function that schedules one half of a step and returns its kernels."""

    def __call__(
        self, half: fx.GraphModule, inputs: InputLifetimes, forward: ProbeResult | None
    ) -> ProbeResult:
        """Schedule a half; `forward` is None for the forward, else the forward's own result."""
        ...
