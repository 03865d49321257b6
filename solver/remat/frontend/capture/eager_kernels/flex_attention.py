"""`flex_attention` as compiled code runs it on a GPU that this machine does not have.

Torch computes no gradients of it on a CPU. In a capture for an absent GPU, two operators stand for
its kernels: they have the results of Inductor's (`flex_attention` and `flex_attention_backward` in
torch/_inductor/kernel/flex), and a backward that saves what autograd saves. Block masks that the
model creates have the sizes of all masks for these lengths; no `mask_mod` runs. Nothing computes
these operators: they are for predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import flex_attention as _module

from remat.costs.workspaces.attention import FLEX_BACKWARD_TARGET, FLEX_TARGET
from remat.errors import TraceError

Tensor = torch.Tensor


@contextmanager
def flex_attention_captured() -> Iterator[None]:
    """Within the context, `flex_attention` on CPU tensors calls operators that stand for a GPU's
    kernels, compiled or not, and `create_block_mask` evaluates no mask."""
    names: dict[str, object] = {
        "flex_attention_hop": _flex_attention,
        "_validate_device": lambda *_: None,
        "create_mask": _unevaluated_mask,
        "_convert_mask_to_block_mask": _block_counts,
        # It calls the operator above without torch.compile.
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    present = {name: value for name, value in names.items() if hasattr(_module, name)}
    if len(present) < len(names):  # another version of torch
        yield
        return
    with patch.multiple(_module, **present):  # type: ignore[arg-type]
        yield


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: object,
    block_mask: tuple[Any, ...],
    *_: Any,
) -> tuple[Tensor, ...]:
    """Replace the higher-order operator: return output, log-sum-exp and maxima of the scores."""
    # Tensors from outside of the capture exist before the step.
    mask = [t for t in block_mask if isinstance(t, Tensor) and _is_captured(t)]
    out, lse = _operators()(query, key, value, mask)
    return out, lse, torch.empty(0, device=query.device)


def _is_captured(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, torch.nn.Parameter)


def _unevaluated_mask(
    mod_fn: object,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = "cpu",
    *_: Any,
) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=device).expand(B or 1, H or 1, Q_LEN, KV_LEN)


def _block_counts(
    mask: Tensor, Q_BLOCK_SIZE: int, KV_BLOCK_SIZE: int, separate_full_blocks: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Replace the reduction of a mask to its blocks, which reads each element."""
    *batch, queries, keys = mask.shape
    shape = (*batch, -(-queries // Q_BLOCK_SIZE), -(-keys // KV_BLOCK_SIZE))
    blocks = torch.zeros(shape, dtype=torch.int8, device=mask.device)
    return blocks, torch.zeros_like(blocks) if separate_full_blocks else None


@cache
def _operators() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the operator for the forward; register both at the first call."""

    def name(target: str) -> str:
        return "::".join(target.split(".")[:2])

    @torch.library.custom_op(name(FLEX_TARGET), mutates_args=())
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        raise _not_computed()

    @torch.library.custom_op(name(FLEX_BACKWARD_TARGET), mutates_args=())
    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise _not_computed()

    @forward.register_fake
    def _(
        query: Tensor, key: Tensor, value: Tensor, mask: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        out = _dense_like(query, (*query.shape[:3], value.shape[3]))
        return out, query.new_empty(query.shape[:3], dtype=torch.float32)

    @backward.register_fake
    def _(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (_dense_like(t, t.shape) for t in (query, key, value))
        return dq, dk, dv

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, mask = inputs
        ctx.save_for_backward(query, key, value, *output, *mask)
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[object, ...]:
        query, key, value, out, lse, *mask = ctx.saved_tensors
        return (*backward(grad_out, query, key, value, out, lse, mask), [None] * len(mask))

    forward.register_autograd(gradients, setup_context=setup_context)
    return forward


def _dense_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a dense tensor of a shape, with the dimensions in memory in the order of `tensor`."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    dense = tensor.new_empty([shape[dim] for dim in order])
    return dense.permute([order.index(dim) for dim in range(tensor.dim())])


def _not_computed() -> TraceError:
    return TraceError(
        "the step was captured for a GPU that was absent, with an operator in place of "
        "flex_attention that only predicts its memory; plans of such models cannot run"
    )
