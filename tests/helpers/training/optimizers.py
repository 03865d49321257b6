"""The optimizers whose memory `remat.fit` predicts, by its names."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import optim

Make = Callable[[list[torch.Tensor]], list[optim.Optimizer]]
"""Creates an optimizer of some parameters, or two that share them."""

BITSANDBYTES = {
    "adamw-8bit": "AdamW8bit",
    "adamw-paged-8bit": "PagedAdamW8bit",
    "adamw-paged": "PagedAdamW",
    "adam-8bit": "Adam8bit",
    "adam-paged-8bit": "PagedAdam8bit",
    "adam-paged": "PagedAdam",
    "lion": "Lion",
    "lion-8bit": "Lion8bit",
    "lion-paged-8bit": "PagedLion8bit",
    "lion-paged": "PagedLion",
}
"""Names of optimizers in bitsandbytes."""


def of_bitsandbytes() -> dict[str, Make]:
    """Return the optimizers of bitsandbytes; none if it is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {}
    import bitsandbytes

    optimizers = {name: getattr(bitsandbytes.optim, code) for name, code in BITSANDBYTES.items()}
    return {name: _one(optimizer) for name, optimizer in optimizers.items()}


def of_torch(
    *, foreach: bool, embedding_shapes: Collection[tuple[int, ...]] = ()
) -> dict[str, Make]:
    """Return the optimizers of torch and transformers. Those without a variant in their name
    compute with `foreach`, as torch does by default on CUDA."""
    from transformers.optimization import Adafactor

    variants = partial(_variants, foreach=foreach)
    return {
        **variants("adamw", optim.AdamW),
        **variants("adam", optim.Adam),
        **variants("sgd", optim.SGD),
        **variants("sgd-momentum", optim.SGD, momentum=0.9),
        **variants("rmsprop", optim.RMSprop),
        **variants("adagrad", optim.Adagrad),
        "adafactor": _one(optim.Adafactor),
        "adafactor-foreach": _one(optim.Adafactor, foreach=True),
        "adafactor-transformers": _one(Adafactor),
        "adafactor-beta1": _one(Adafactor, beta1=0.9),
        "muon": partial(_muon_and_adamw, foreach=foreach, embedding_shapes=embedding_shapes),
    }


def _one(optimizer: Callable[..., optim.Optimizer], **options: Any) -> Make:
    return lambda parameters: [optimizer(parameters, **options)]


def _variants(
    name: str, optimizer: Callable[..., optim.Optimizer], *, foreach: bool, **options: Any
) -> dict[str, Make]:
    has_fused = "fused" in inspect.signature(optimizer).parameters
    return {
        name: _one(optimizer, **options, foreach=foreach),
        f"{name}-foreach": _one(optimizer, **options, foreach=True),
        f"{name}-plain": _one(optimizer, **options, foreach=False),
        **({f"{name}-fused": _one(optimizer, **options, fused=True)} if has_fused else {}),
    }


def _muon_and_adamw(
    parameters: list[torch.Tensor],
    *,
    foreach: bool,
    embedding_shapes: Collection[tuple[int, ...]],
) -> list[optim.Optimizer]:
    hidden = [p for p in parameters if p.ndim == 2 and tuple(p.shape) not in embedding_shapes]
    rest = [p for p in parameters if not any(p is other for other in hidden)]
    return [optim.Muon(hidden), optim.AdamW(rest, foreach=foreach)]
