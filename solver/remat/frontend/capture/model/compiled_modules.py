"""Modules and functions that torch.compile has wrapped. A capture runs their original code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._dynamo
from torch import nn


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module inside of `torch.compile(module)`; any other module unchanged."""
    return model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model


@contextmanager
def compiled_code_run_eagerly() -> Iterator[None]:
    """Within the context, run compiled functions and modules, at any depth, as they were written: a
    compiler's output is not a graph of operators."""
    with (
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
