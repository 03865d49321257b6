"""`TraceCache`: the traces of a model's calls, from one symbolic capture for all sizes if possible.

The first call is captured with its sizes as constants. The first call that differs from it in sizes
only is captured symbolically, with symbols for the sizes that differ; the traces of calls with
other sizes are then read from that capture. At the sizes of the first call, the symbolic capture
must give exactly the first trace; otherwise each size is captured separately.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from remat.documents.trace import Trace
from remat.errors import one_line
from remat.frontend.capture.model.attribute_guards import BoundGuards
from remat.frontend.capture.symbolic_capture import (
    MIN_SYMBOLIC_SIZE,
    InputDimension,
    SymbolicCapture,
    capture_symbolically,
)
from remat.frontend.capture.trace import CapturedStep, capture
from remat.frontend.runtime.guards import CallSignature, ModelCall
from remat.limits.options import differentiated_with
from remat.passes.outputs import with_outputs
from remat.passes.trace_equality import is_same_except_names
from remat.plan_options import CheckedOptions

logger = logging.getLogger("remat")

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of a call's input tensors."""

Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""The sizes, strides and storage bytes of a tensor that is not dense."""

Dimensions = frozenset[InputDimension]


class _CallKind(NamedTuple):
    """The properties of a call without its sizes: all calls of one kind differ in sizes only."""

    signature: CallSignature
    inputs: tuple[tuple[int, torch.dtype, torch.device, bool, Layout | None], ...]


@dataclass
class _CachedTraces:
    """The first captured step of a kind of call, and the symbolic capture for its other sizes.
    `attempts` are the sets of dimensions for which a symbolic capture was tried."""

    kind: _CallKind
    shapes: Shapes
    step: CapturedStep
    guards: BoundGuards
    symbolic: SymbolicCapture | None = None
    attempts: set[Dimensions] = field(default_factory=set)

    def symbolic_dimensions_with(self, varying: Dimensions) -> Dimensions:
        """Return the dimensions that vary, together with those that have symbols already."""
        return varying if self.symbolic is None else varying | self.symbolic.symbolic_dimensions


class TraceCache:
    """The captured steps of one planner's calls. `capture_count` is the number of captures."""

    def __init__(self, options: CheckedOptions) -> None:
        self.capture_count = 0
        self._options = options
        self._cached: list[_CachedTraces] = []
        """In order of use, the latest last."""

    def step(self, model: nn.Module, call: ModelCall, key: CallSignature) -> CapturedStep:
        """Return the training step of a call: from the cache, read from the symbolic capture, or
        captured. Raises `TraceError`."""
        shapes = tuple(tuple(leaf.shape) for leaf in call.leaves)
        kind = _call_kind(call.leaves, key)
        cached = self._find_traces(kind)
        if cached is None:
            step = self._capture_call(model, call)
            self._cached.append(_CachedTraces(kind, shapes, step, step.guards.bind(model)))
            del self._cached[: -self._options.max_plans]
            return step
        if shapes == cached.shapes:
            return cached.step
        varying = frozenset(_differing_dimensions(cached.shapes, shapes))
        trace = self._symbolic_trace(cached, varying, shapes)
        if trace is None and self._may_capture_symbolically(cached, varying, call):
            self._capture_symbolically(model, call, cached, varying)
            trace = self._symbolic_trace(cached, varying, shapes)
        if trace is None:
            return self._capture_call(model, call)
        assert cached.symbolic is not None
        return CapturedStep(trace, cached.symbolic.guards)

    def _find_traces(self, kind: _CallKind) -> _CachedTraces | None:
        """Return the traces of a kind of call whose guards hold, and move them to the end; None
        without such traces."""
        for number, cached in enumerate(reversed(self._cached), start=1):
            if cached.kind == kind and cached.guards.hold():
                self._cached.append(self._cached.pop(-number))
                return cached
        return None

    def _capture_call(self, model: nn.Module, call: ModelCall) -> CapturedStep:
        """Return a new capture of a call, with its sizes as constants."""
        self.capture_count += 1
        options = self._options
        return capture(
            model,
            call.args,
            call.kwargs,
            differentiate=options.differentiate,
            outputs=options.outputs,
        )

    def _symbolic_trace(
        self, cached: _CachedTraces, varying: Dimensions, shapes: Shapes
    ) -> Trace | None:
        """Return the trace at the sizes `shapes` from the symbolic capture; None where there is
        none, one of the `varying` dimensions has no symbol, or its guards do not hold."""
        if cached.symbolic is None or not varying <= cached.symbolic.symbolic_dimensions:
            return None
        return self._trace_at(cached.symbolic, shapes)

    def _trace_at(self, symbolic: SymbolicCapture, shapes: Shapes) -> Trace | None:
        """Return the trace at these sizes, with the outputs that the options ask for; None if the
        guards of the symbolic capture do not hold."""
        trace = symbolic.trace_at(shapes)
        return None if trace is None else with_outputs(trace, self._options.outputs)

    def _may_capture_symbolically(
        self, cached: _CachedTraces, varying: Dimensions, call: ModelCall
    ) -> bool:
        """True if a symbolic capture with symbols for the `varying` dimensions may succeed, and was
        not tried before. It needs dense tensors, and sizes that are not too small."""
        if cached.symbolic_dimensions_with(varying) in cached.attempts:
            return False
        return all(
            min(cached.shapes[n][d], call.leaves[n].shape[d]) >= MIN_SYMBOLIC_SIZE
            and _is_dense_tensor(call.leaves[n])
            for n, d in varying
        )

    def _capture_symbolically(
        self, model: nn.Module, call: ModelCall, cached: _CachedTraces, varying: Dimensions
    ) -> None:
        """Capture a call with symbols for the varying dimensions, and cache the capture if it gives
        the first trace at the sizes of the first call. Errors of the capture are logged."""
        dimensions = cached.symbolic_dimensions_with(varying)
        cached.attempts.add(dimensions)
        self.capture_count += 1
        differentiate = differentiated_with(self._options.outputs, self._options.differentiate)
        try:
            symbolic = capture_symbolically(
                model, call.leaves, call.structure, differentiate, dimensions
            )
            trace = self._trace_at(symbolic, cached.shapes)
        except Exception as error:  # any error of torch's symbolic shapes: capture each size
            logger.info("each size needs a capture of its own: %s", one_line(error))
            return
        if trace is None or not is_same_except_names(trace, cached.step.trace):
            logger.info("each size needs a capture of its own: the steps differ in more than sizes")
            return
        cached.symbolic = symbolic


def _call_kind(leaves: Sequence[torch.Tensor], key: CallSignature) -> _CallKind:
    """Return the kind of a call with these input tensors and this signature."""
    inputs = ((t.dim(), t.dtype, t.device, t.requires_grad, _non_dense_layout(t)) for t in leaves)
    # Gradients that exist before the step do not change a capture.
    return _CallKind(key._replace(inputs=(), accumulates_gradients=False), tuple(inputs))


def _differing_dimensions(first: Shapes, second: Shapes) -> Iterator[InputDimension]:
    """Yield the dimensions in which two calls of one kind have different sizes."""
    for number, (first_shape, second_shape) in enumerate(zip(first, second, strict=True)):
        for dimension, (a, b) in enumerate(zip(first_shape, second_shape, strict=True)):
            if a != b:
                yield number, dimension


def _non_dense_layout(tensor: torch.Tensor) -> Layout | None:
    """Return the sizes, strides and storage bytes of a tensor; None if it is dense."""
    if _is_dense_tensor(tensor):
        return None
    return tuple(tensor.shape), tensor.stride(), tensor.untyped_storage().nbytes()


def _is_dense_tensor(tensor: torch.Tensor) -> bool:
    """True if the tensor is contiguous, and its storage has no other elements."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
