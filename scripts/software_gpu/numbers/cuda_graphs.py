"""Recorded operations, recomputed when a CUDA graph is replayed.

While a graph is captured, nothing is computed, as on a GPU. The operations are recorded with CPU
tensors over their memory, which belongs to the graph. A replay computes them in their order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from scripts.software_gpu.numbers.host_memory import host_tensor
from scripts.software_gpu.numbers.random_numbers import PhiloxState
from torch import Tensor
from torch.utils import _pytree as pytree

OFFSET_STEP = 4
"""Offsets between two random operations of a graph; torch does not tell how far each advances."""


@dataclass
class Recording:
    """The operations of one graph."""

    computations: list[Callable[[], None]] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    generators: dict[torch.Generator, int] = field(default_factory=dict)
    """How many operations sample from each generator."""
    states: dict[torch.Generator, PhiloxState] = field(default_factory=dict)
    """The states of the generators when the replay starts."""

    def append(self, computation: Callable[[], None], written: Any) -> None:
        """Record a computation that writes these tensors."""
        self.computations.append(computation)
        tensors = pytree.tree_leaves(written)
        self.written += [host_tensor(t) for t in tensors if isinstance(t, Tensor) and t.is_cuda]

    def sample(self, generator: torch.Generator) -> Callable[[], PhiloxState]:
        """Return a function for the state of the next random operation during a replay."""
        count = self.generators.get(generator, 0)
        self.generators[generator] = count + 1

        def state() -> PhiloxState:
            start = self.states[generator]
            return PhiloxState(start.seed, start.offset + OFFSET_STEP * count)

        return state

    def replay(self, launch: Callable[[], None]) -> None:
        """Launch the graph and compute its operations.

        The launch advances the generators. Its copies come too early, before the operations that
        the recording computes, so the memory is restored after it.
        """
        self.states = {
            generator: PhiloxState(generator.initial_seed(), generator.get_offset())
            for generator in self.generators
        }
        before = [tensor.clone() for tensor in self.written]
        launch()
        for tensor, values in zip(self.written, before, strict=True):
            tensor.copy_(values)
        for computation in self.computations:
            computation()


_active: list[Recording] = []
_recordings: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, Recording] = (
    weakref.WeakKeyDictionary()
)


def active_recording() -> Recording | None:
    """Return the recording of the capture that is under way."""
    return _active[-1] if _active else None


_METHODS = ("capture_begin", "capture_end", "replay", "reset")
_originals: dict[str, Any] = {}


def patch() -> None:
    """Record the operations of graphs from now on."""
    graph = torch.cuda.CUDAGraph
    _originals.update({name: getattr(graph, name) for name in _METHODS})
    graph.capture_begin = _capture_begin  # type: ignore[method-assign]
    graph.capture_end = _capture_end  # type: ignore[method-assign]
    graph.replay = _replay  # type: ignore[method-assign]
    graph.reset = _reset  # type: ignore[method-assign]


def restore() -> None:
    """Undo `patch`."""
    for name, method in _originals.items():
        setattr(torch.cuda.CUDAGraph, name, method)
    _originals.clear()


def _capture_begin(graph: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:
    _originals["capture_begin"](graph, *args, **kwargs)
    _recordings[graph] = Recording()
    _active.append(_recordings[graph])


def _capture_end(graph: torch.cuda.CUDAGraph) -> None:
    _active.remove(_recordings[graph])
    _originals["capture_end"](graph)


def _replay(graph: torch.cuda.CUDAGraph) -> None:
    recording = _recordings.get(graph)
    if recording is None:  # captured before right results were turned on
        _originals["replay"](graph)
        return
    with torch._C.DisableTorchFunction(), torch.no_grad():
        recording.replay(lambda: _originals["replay"](graph))


def _reset(graph: torch.cuda.CUDAGraph) -> None:
    _recordings.pop(graph, None)
    _originals["reset"](graph)
