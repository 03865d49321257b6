"""`Captures`: the traces of a model's calls, with one capture for all sizes where that can be.

The first call is captured with its sizes as numbers. The first that differs from it in sizes only
is captured with symbols for those that differ; calls in other sizes are then read off that. What
the symbols give for the first call must be what was captured there, to the last argument, else
each size is captured by itself.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from remat.documents.trace import Trace
from remat.errors import one_line
from remat.frontend.capture.symbolic_capture import SMALLEST, Dimension, Family, family
from remat.frontend.capture.trace import trace as capture
from remat.frontend.planning.options import OptimizeOptions
from remat.frontend.runtime.guards import Call, Signature
from remat.limits.outputs import are_dropped
from remat.passes.outline import is_same_step

logger = logging.getLogger("remat")

Shapes = tuple[tuple[int, ...], ...]
Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and the bytes of the storage, of what is not dense."""


class _Kind(NamedTuple):
    """What calls have in common that differ in sizes only."""

    signature: Signature
    inputs: tuple[tuple[int, torch.dtype, torch.device, bool, Layout | None], ...]


@dataclass
class _Seen:
    shapes: Shapes
    trace: Trace
    family: Family | None = None
    tried: set[frozenset[Dimension]] = field(default_factory=set)


class Captures:
    """Of one planner. `count` is how many captures there were."""

    def __init__(self, options: OptimizeOptions) -> None:
        self.count = 0
        self._options = options
        self._seen: OrderedDict[_Kind, _Seen] = OrderedDict()

    def trace(self, model: nn.Module, call: Call, key: Signature) -> Trace:
        """The step of a call. Raises `TraceError`."""
        shapes = tuple(tuple(leaf.shape) for leaf in call.leaves)
        kind = _kind(call.leaves, key)
        if kind not in self._seen:
            self._seen[kind] = _Seen(shapes, self._captured(model, call))
            if len(self._seen) > self._options.max_plans:
                self._seen.popitem(last=False)
            return self._seen[kind].trace
        self._seen.move_to_end(kind)
        seen = self._seen[kind]
        if shapes == seen.shapes:
            return seen.trace
        varying = frozenset(_differing(seen.shapes, shapes))
        found = self._of_family(seen, varying, shapes)
        if found is None and self._may_vary(seen, varying, call):
            self._try(model, call, seen, varying)
            found = self._of_family(seen, varying, shapes)
        return self._captured(model, call) if found is None else found

    def _captured(self, model: nn.Module, call: Call) -> Trace:
        self.count += 1
        options = self._options
        return capture(
            model,
            call.args,
            call.kwargs,
            differentiate=options.differentiate,
            outputs=options.outputs,
        )

    def _of_family(
        self, seen: _Seen, varying: frozenset[Dimension], shapes: Shapes
    ) -> Trace | None:
        if seen.family is None or not varying <= seen.family.varying:
            return None
        found = seen.family.at(shapes)
        if found is not None and are_dropped(self._options.outputs):
            found = found.replace(outputs_dropped=True)
        return found

    def _may_vary(self, seen: _Seen, varying: frozenset[Dimension], call: Call) -> bool:
        """Whether symbols for these, and those that vary already, are worth a capture."""
        if self._all_varying(seen, varying) in seen.tried:
            return False
        return all(
            min(seen.shapes[n][d], call.leaves[n].shape[d]) >= SMALLEST
            and _is_dense(call.leaves[n])
            for n, d in varying
        )

    def _all_varying(self, seen: _Seen, varying: frozenset[Dimension]) -> frozenset[Dimension]:
        return varying if seen.family is None else varying | seen.family.varying

    def _try(
        self, model: nn.Module, call: Call, seen: _Seen, varying: frozenset[Dimension]
    ) -> None:
        wanted = self._all_varying(seen, varying)
        seen.tried.add(wanted)
        self.count += 1
        try:
            found = family(model, call.leaves, call.structure, self._options.differentiate, wanted)
            seen_again = found.at(seen.shapes)
        except Exception as error:  # torch's symbols: whatever it is, sizes are captured one by one
            logger.info("each size is captured by itself: %s", one_line(error))
            return
        expected = seen.trace.replace(outputs_dropped=False)
        if seen_again is None or not is_same_step(seen_again, expected):
            logger.info("each size is captured by itself: the steps differ in more than sizes")
            return
        seen.family = found


def _kind(leaves: Sequence[torch.Tensor], key: Signature) -> _Kind:
    inputs = ((t.dim(), t.dtype, t.device, t.requires_grad, _layout(t)) for t in leaves)
    # Gradients that are there already change nothing of a capture.
    return _Kind(key._replace(inputs=(), accumulating=False), tuple(inputs))


def _differing(one: Shapes, other: Shapes) -> Iterator[Dimension]:
    for number, (before, now) in enumerate(zip(one, other, strict=True)):
        for dimension, (a, b) in enumerate(zip(before, now, strict=True)):
            if a != b:
                yield number, dimension


def _layout(tensor: torch.Tensor) -> Layout | None:
    if _is_dense(tensor):
        return None
    return tuple(tensor.shape), tensor.stride(), tensor.untyped_storage().nbytes()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its storage is as large as its sizes say."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
