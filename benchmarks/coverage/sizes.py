"""Check of one architecture at several sizes: does one symbolic capture serve all of them?"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import remat
from benchmarks.coverage.eager_comparison import FAILED, HUNG, NOT_EAGER, REFUSED, Row, failure_row
from benchmarks.coverage.small_models import batch_of, build_small_model
from remat.frontend.planning.trace_cache import TraceCache
from remat.frontend.runtime.guards import ModelCall, ModelTracker, call_signature
from remat.passes.trace_equality import is_same_except_names
from remat.plan_options import OPTIMIZE, read_options

ONE, PER_SIZE, DIFFERENT = "one capture", "one capture per size", "different step"
OUTCOMES = {
    ONE: "two captures serve three sizes; each step equals the one of a capture at its size",
    PER_SIZE: "each size needs a capture",
    DIFFERENT: "at some size, the step differs from the one of a capture at that size",
    REFUSED: "it is not captured as a whole",
    FAILED: "another error",
    HUNG: "not finished in time, or its process died",
    NOT_EAGER: "it could not be built small, or does not run in eager mode: not counted",
}
IMAGES, TOKENS = (2, 3, 5), (24, 32, 17)
"""Sizes of the batches: the first is captured with fixed sizes, the second symbolically."""


def check_sizes(kind: str, name: str) -> Row:
    """Return the outcome for one architecture at three sizes, and the reason."""
    batches = IMAGES if kind == "image" else TOKENS
    try:
        model, batch = build_small_model(kind, name)
        model(**batch)
    except Exception as error:
        return failure_row(NOT_EAGER, error)
    trace_cache = TraceCache(read_options(OPTIMIZE, "auto", {}))
    try:
        equal = [_equals_new_capture(trace_cache, kind, model, size) for size in batches]
    except remat.RematError as error:
        return failure_row(REFUSED, error)
    except Exception as error:
        return failure_row(FAILED, error)
    outcome = DIFFERENT if not all(equal) else ONE if trace_cache.capture_count == 2 else PER_SIZE
    return {"outcome": outcome, "why": "", "captures": trace_cache.capture_count, "sizes": batches}


def _equals_new_capture(trace_cache: TraceCache, kind: str, model: nn.Module, size: int) -> bool:
    """True if the cache's trace at a size equals the trace of a new capture at that size."""
    batch: dict[str, Any] = batch_of(kind, model, size)
    call = ModelCall.of((), batch, "the batch ")
    with torch.enable_grad():
        cached = trace_cache.step(
            model, call, call_signature(ModelTracker(model), call.structure, call.leaves)
        )
    return is_same_except_names(cached.trace, remat.trace(model, (), batch))
