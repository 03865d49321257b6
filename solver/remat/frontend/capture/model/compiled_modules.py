"""What torch.compile has made of a model or of its parts: a capture is of the module inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._dynamo
from torch import nn


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside of what `torch.compile(module)` returned; any other as it is."""
    return model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model


@contextmanager
def looked_through() -> Iterator[None]:
    """Run compiled functions, `module.compile()` and modules in modules included, as they were
    written: what a compiler made of them is no graph of operations."""
    with (
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
