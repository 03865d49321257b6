"""One architecture in several sizes: whether one capture serves all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import remat
from benchmarks.coverage.eager_comparison import FAILED, HUNG, NOT_EAGER, REFUSED, Row, failure_row
from benchmarks.coverage.small_models import batch_of, build_small_model
from remat.frontend.planning.options import OptimizeOptions
from remat.frontend.planning.trace_cache import TraceCache
from remat.frontend.runtime.guards import ModelCall, ModelTracker, call_signature
from remat.passes.trace_equality import is_same_except_names

ONE, PER_SIZE, DIFFERENT = "one capture", "each by itself", "another step"
OUTCOMES = {
    ONE: "captured twice for three sizes; each step is the one that a capture in its size gives",
    PER_SIZE: "each size is captured by itself",
    DIFFERENT: "in some size, the step is another one than a capture there gives",
    REFUSED: "it is not captured as a whole",
    FAILED: "another error",
    HUNG: "not done in time, or its process died",
    NOT_EAGER: "it could not be made small, or does not run in eager mode: not counted",
}
IMAGES, TOKENS = (2, 3, 5), (24, 32, 17)
"""The first is captured with numbers, the second with symbols."""


def check_sizes(kind: str, name: str) -> Row:
    """The outcome for one architecture, and why."""
    batches = IMAGES if kind == "image" else TOKENS
    try:
        model, batch = build_small_model(kind, name)
        model(**batch)
    except Exception as error:
        return failure_row(NOT_EAGER, error)
    trace_cache = TraceCache(OptimizeOptions(budget=None))
    try:
        equal = [_is_what_a_capture_gives(trace_cache, kind, model, size) for size in batches]
    except remat.RematError as error:
        return failure_row(REFUSED, error)
    except Exception as error:
        return failure_row(FAILED, error)
    outcome = DIFFERENT if not all(equal) else ONE if trace_cache.capture_count == 2 else PER_SIZE
    return {"outcome": outcome, "why": "", "captures": trace_cache.capture_count, "sizes": batches}


def _is_what_a_capture_gives(
    trace_cache: TraceCache, kind: str, model: nn.Module, size: int
) -> bool:
    batch: dict[str, Any] = batch_of(kind, model, size)
    call = ModelCall.of((), batch, "the batch ")
    with torch.enable_grad():
        actual = trace_cache.trace(
            model, call, call_signature(ModelTracker(model), call.structure, call.leaves)
        )
    return is_same_except_names(actual, remat.trace(model, (), batch))
