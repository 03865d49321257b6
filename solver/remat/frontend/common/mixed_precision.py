"""A model as `MixedPrecisionPolicy` of FSDP2 computes with it, for a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


@contextmanager
def parameters_cast(model: nn.Module, dtype_name: str) -> Iterator[None]:
    """Within the context, floating-point parameters have this dtype, without values, and the model
    casts its floating-point inputs to it, as `cast_forward_inputs` does; buffers are not cast.
    No-op for ""."""
    if not dtype_name:
        yield
        return
    dtype = getattr(torch, dtype_name)

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def cast(value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if is_float else value

        return tree_map(cast, (args, kwargs))

    changed = [p for p in model.parameters() if p.is_floating_point() and p.dtype != dtype]
    tensors = [(parameter, parameter.data) for parameter in changed]
    hook = model.register_forward_pre_hook(cast_inputs, with_kwargs=True, prepend=True)
    try:
        for parameter, tensor in tensors:
            parameter.data = torch.empty_like(tensor, dtype=dtype)
        yield
    finally:
        hook.remove()
        for parameter, tensor in tensors:
            parameter.data = tensor
