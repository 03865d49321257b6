"""The package flash-attn in models of transformers, for a GPU that this machine does not have.

Its functions call torch's copies of its kernels, which save and allocate the same. Packed sequences
need `cu_seq_lens_q` and the three other arguments: positions are values, which no capture has.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

Tensor = torch.Tensor

_MODULE = "transformers.modeling_flash_attention_utils"
_VERSION = 2
_LOADED = (
    *("_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn"),
    *("_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"),
)
"""Variables of transformers with the functions that it imported."""


@contextmanager
def flash_attention_assumed() -> Iterator[None]:
    """Within the context, models of transformers may be created with the implementation
    "flash_attention_2" on a machine without the package and without a GPU, for predictions."""
    module = _transformers_module()
    if module is None:
        yield
        return
    requirements = module.FLASH_ATTENTION_COMPATIBILITY_MATRIX[_VERSION]
    with (
        patch.dict(requirements, general_availability_check=lambda: True),
        flash_attention_captured(),
    ):
        yield


@contextmanager
def flash_attention_captured() -> Iterator[None]:
    """Within the context, models of transformers call torch's kernels in place of the package's."""
    module = _transformers_module() if _MODULE in sys.modules else None
    if module is None:
        yield
        return
    functions = (_flash_attention, _packed_flash_attention, None)
    unchanged = {name: getattr(module, name) for name in _LOADED}
    with patch.multiple(
        module,
        **unchanged,
        _loaded_implementation=None,
        _lazy_imports=lambda *_, **__: (*functions, module._pad_input, module._unpad_input),
        _is_packed_sequence=lambda *_: False,
    ):
        yield


def _transformers_module() -> Any:
    """Return transformers' module for the package; None without transformers, in a version without
    the names above, with a GPU, or if the package is installed."""
    is_real = torch.cuda.is_available() or importlib.util.find_spec("flash_attn") is not None
    if is_real or importlib.util.find_spec("transformers") is None:
        return None
    module = importlib.import_module(_MODULE)
    names = (*_LOADED, "_loaded_implementation", "_lazy_imports", "_is_packed_sequence")
    names = (*names, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", "_pad_input", "_unpad_input")
    return module if all(hasattr(module, name) for name in names) else None


def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Replace `flash_attn.flash_attn_func`, for tensors (batch, tokens, heads, size)."""
    size = q.shape[-1]
    padded = (functional.pad(t, (0, -size % 8)) if size % 8 else t for t in (q, k, v))
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention.default(
        *(t.transpose(1, 2) for t in padded), dropout_p, causal, False, scale=scale
    )[0].transpose(1, 2)
    return out[..., :size] if size % 8 else out


def _packed_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Replace `flash_attn.flash_attn_varlen_func`, for tensors (tokens, heads, size)."""
    from torch.nn.attention import varlen

    longest = [
        t.shape[0] if isinstance(length, Tensor) else int(length)
        for t, length in ((q, max_seqlen_q), (k, max_seqlen_k))
    ]
    attention: Callable[..., Any] = varlen.varlen_attn
    return attention(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest),
        scale=softmax_scale,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=True,
    )
