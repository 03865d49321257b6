"""Fused attention of CUDA: its results, and its gradients from the saved logsumexp, in float32.

The dropout mask is a function of the philox seed and offset, which the forward returns and the
backward receives, as in torch's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from scripts.software_gpu.numbers.random_numbers import PhiloxState, keep_mask
from torch import Tensor

LOGSUMEXP_ALIGNMENT = 32
"""The memory-efficient kernel pads the queries of its logsumexp to a multiple of this."""

_UNSUPPORTED = (
    "cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k", "seqlen_k", "window_size",
    "window_size_left", "window_size_right", "seqused_k", "alibi_slopes", "block_table",
    "q_descale", "k_descale", "v_descale",
)  # fmt: skip


@dataclass(frozen=True)
class Attention:
    """Scores of one call, with heads before tokens: batch × heads × queries × features."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    scale: float
    is_causal: bool
    dropout: float
    philox: PhiloxState

    def scores(self) -> Tensor:
        """Return scaled scores with bias and causal mask, in float32."""
        scores = self.scale * self.query.float() @ self.shared(self.key).float().transpose(-1, -2)
        if self.bias is not None:
            scores = scores + self.bias.float()
        if self.is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        return scores

    def shared(self, tensor: Tensor) -> Tensor:
        """Repeat the heads of keys or values that several heads of queries share."""
        repeats = self.query.shape[1] // tensor.shape[1]
        return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)

    def summed(self, gradient: Tensor, heads: int) -> Tensor:
        """Return the gradient of `shared`."""
        if gradient.shape[1] == heads:
            return gradient
        return gradient.unflatten(1, (heads, -1)).sum(2)

    def multiplier(self, shape: torch.Size) -> Tensor | float:
        """Return what probabilities are multiplied with: the mask of dropout, scaled."""
        if self.dropout == 0:
            return 1.0
        return keep_mask(self.philox, tuple(shape), self.dropout) / (1 - self.dropout)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output and the logsumexp of each query."""
        scores = self.scores()
        logsumexp = scores.logsumexp(-1)
        probabilities = _probabilities(scores, logsumexp)
        value = self.shared(self.value).float()
        return (probabilities * self.multiplier(scores.shape)) @ value, logsumexp

    def backward(self, gradient: Tensor, output: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of query, key, value and scores."""
        scores = self.scores()
        probabilities = _probabilities(scores, logsumexp)
        multiplier = self.multiplier(scores.shape)
        gradient = gradient.float()
        of_value = (probabilities * multiplier).transpose(-1, -2) @ gradient
        of_probabilities = gradient @ self.shared(self.value).float().transpose(-1, -2)
        row = (gradient * output.float()).sum(-1, keepdim=True)
        of_scores = probabilities * (of_probabilities * multiplier - row)
        of_query = self.scale * of_scores @ self.shared(self.key).float()
        of_key = self.scale * of_scores.transpose(-1, -2) @ self.query.float()
        heads = self.key.shape[1]
        return of_query, self.summed(of_key, heads), self.summed(of_value, heads), of_scores


def _probabilities(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Return exp(scores - logsumexp); a query without any allowed key has zeros."""
    logsumexp = logsumexp.unsqueeze(-1)
    return torch.where(logsumexp.isneginf(), 0.0, (scores - logsumexp).exp())


def _attention(
    arguments: Mapping[str, Any], philox: PhiloxState | None, *, are_tokens_first: bool = False
) -> Attention:
    for name in _UNSUPPORTED:
        value = arguments.get(name)
        is_window = name.startswith("window") and value == -1
        if value is not None and not is_window:
            raise NotImplementedError(f"attention on the software GPU: the argument {name}")
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if are_tokens_first:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    bias = arguments.get("attn_bias")
    if bias is None:
        bias = arguments.get("bias")
    scale = arguments.get("scale")
    if philox is None:
        philox = _saved_state(arguments)
    return Attention(
        query,
        key,
        value,
        bias if bias is not None and bias.numel() else None,
        query.shape[-1] ** -0.5 if scale is None else scale,
        bool(arguments.get("is_causal", arguments.get("custom_mask_type"))),
        arguments["dropout_p"],
        philox,
    )


def _saved_state(arguments: Mapping[str, Any]) -> PhiloxState:
    if arguments["dropout_p"] == 0:
        return PhiloxState(0, 0)
    state = arguments.get("rng_state", arguments.get("philox_seed"))
    if state.numel() == 2:  # flash attention keeps both in one tensor
        seed, offset = state.tolist()
    else:
        seed, offset = state.item(), arguments["philox_offset"].item()
    return PhiloxState(int(seed), int(offset))


def _state_tensor(state: PhiloxState) -> Tensor:
    return torch.tensor([state.seed, state.offset], dtype=torch.uint64)


def _state_scalars(state: PhiloxState) -> tuple[Tensor, Tensor]:
    seed = torch.tensor(state.seed, dtype=torch.uint64).view(torch.int64)
    return seed, torch.tensor(state.offset)


def scaled_dot_product_flash(arguments: Mapping[str, Any], state: PhiloxState) -> Any:
    """`_scaled_dot_product_flash_attention`."""
    output, logsumexp = _attention(arguments, state).forward()
    return output, logsumexp, None, None, None, None, _state_tensor(state), None, None


def scaled_dot_product_flash_backward(arguments: Mapping[str, Any], _: object) -> Any:
    """`_scaled_dot_product_flash_attention_backward`."""
    saved = (arguments[name] for name in ("grad_out", "out", "logsumexp"))
    return _attention(_without_empty_sequences(arguments), None).backward(*saved)[:3]


def flash_forward(arguments: Mapping[str, Any], state: PhiloxState) -> Any:
    """`_flash_attention_forward`, whose tokens are before the heads."""
    output, logsumexp = _attention(arguments, state, are_tokens_first=True).forward()
    return output.transpose(1, 2), logsumexp, _state_tensor(state), None, None


def flash_backward(arguments: Mapping[str, Any], _: object) -> Any:
    """`_flash_attention_backward`."""
    attention = _attention(_without_empty_sequences(arguments), None, are_tokens_first=True)
    gradient, output = (arguments[name].transpose(1, 2) for name in ("grad_out", "out"))
    gradients = attention.backward(gradient, output, arguments["logsumexp"])[:3]
    return tuple(one.transpose(1, 2) for one in gradients)


def _without_empty_sequences(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without the undefined tensors that say "all sequences are as long"."""
    empty = {n for n in _UNSUPPORTED if isinstance(v := arguments.get(n), Tensor) and not v.numel()}
    return {name: value for name, value in arguments.items() if name not in empty}


def scaled_dot_product_efficient(arguments: Mapping[str, Any], state: PhiloxState) -> Any:
    """`_scaled_dot_product_efficient_attention`."""
    output, logsumexp = _attention(arguments, state).forward()
    saved = _padded(logsumexp, arguments["compute_log_sumexp"])
    return output, saved, *_state_scalars(state)


def scaled_dot_product_efficient_backward(arguments: Mapping[str, Any], _: object) -> Any:
    """`_scaled_dot_product_efficient_attention_backward`."""
    attention = _attention(arguments, None)
    logsumexp = arguments["logsumexp"][..., : attention.query.shape[-2]]
    gradients = attention.backward(arguments["grad_out_"], arguments["out"], logsumexp)
    of_bias = None if attention.bias is None else gradients[3].sum_to_size(attention.bias.size())
    mask = arguments["grad_input_mask"]
    results = (*gradients[:3], of_bias)
    return tuple(r if wanted else None for r, wanted in zip(results, mask, strict=True))


def efficient_forward(arguments: Mapping[str, Any], state: PhiloxState) -> Any:
    """`_efficient_attention_forward`, whose tokens are before the heads."""
    output, logsumexp = _attention(arguments, state, are_tokens_first=True).forward()
    saved = _padded(logsumexp, arguments["compute_log_sumexp"])
    return output.transpose(1, 2), saved, *_state_scalars(state), None, None


def efficient_backward(arguments: Mapping[str, Any], _: object) -> Any:
    """`_efficient_attention_backward`."""
    attention = _attention(arguments, None, are_tokens_first=True)
    gradient, output = (arguments[name].transpose(1, 2) for name in ("grad_out_", "out"))
    logsumexp = arguments["logsumexp"][..., : attention.query.shape[-2]]
    *gradients, of_scores = attention.backward(gradient, output, logsumexp)
    of_bias = None
    if attention.bias is not None and arguments["bias_requires_grad"]:
        of_bias = of_scores.sum_to_size(attention.bias.size())
    return (*(one.transpose(1, 2) for one in gradients), of_bias)


def _padded(logsumexp: Tensor, is_computed: bool) -> Tensor:
    if not is_computed:
        return logsumexp[..., :0]
    missing = -logsumexp.shape[-1] % LOGSUMEXP_ALIGNMENT
    return torch.nn.functional.pad(logsumexp, (0, missing), value=math.inf)


COUNTERPARTS = {
    "_scaled_dot_product_flash_attention": scaled_dot_product_flash,
    "_scaled_dot_product_flash_attention_backward": scaled_dot_product_flash_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": scaled_dot_product_efficient,
    "_scaled_dot_product_efficient_attention_backward": scaled_dot_product_efficient_backward,
    "_efficient_attention_forward": efficient_forward,
    "_efficient_attention_backward": efficient_backward,
}
