"""Batches of random data for the training steps of transformers' models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from remat.errors import TraceError

SEQ_TO_SEQ = "SEQ_TO_SEQ_CAUSAL_LM"
_IMAGES = ("IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION")
TASKS = (
    SEQ_TO_SEQ,
    "MASKED_LM",
    "CAUSAL_LM",
    *_IMAGES,
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
)
"""Of transformers' tables from configurations to models, those with a batch here. The first that
has a configuration is its task, unless its `architectures` say another."""


@dataclass(frozen=True)
class Sizes:
    """Of the batch: samples, tokens of each, pixels of an image's side (None: the model's own)."""

    batch: int = 2
    tokens: int = 128
    image: int | None = None

    def __post_init__(self) -> None:
        for name, size in (("batch", self.batch), ("tokens", self.tokens), ("image", self.image)):
            if size is not None and size < 1:
                raise TraceError(f"--{name} is {size}; it must be at least 1")


def batch(task: str, config: Any, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Keyword arguments that a loss comes out of. Completes the special tokens in `config` that the
    task cannot do without."""
    if task in _IMAGES:
        return _images(task, config, sizes)
    text = config.get_text_config()
    ids = _token_ids(text, sizes)
    if task == SEQ_TO_SEQ and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = text.pad_token_id or 0
    if task == "SEQUENCE_CLASSIFICATION":
        if text.pad_token_id is None:
            # Decoders find the last token of a sample by it.
            text.pad_token_id = text.vocab_size - 1
        return {"input_ids": ids, "labels": _classes(config, (sizes.batch,))}
    if task == "TOKEN_CLASSIFICATION":
        return {"input_ids": ids, "labels": _classes(config, (sizes.batch, sizes.tokens))}
    if task == "QUESTION_ANSWERING":
        start = torch.randint(0, sizes.tokens, (sizes.batch,))
        return {"input_ids": ids, "start_positions": start, "end_positions": start}
    return {"input_ids": ids, "labels": ids}


def _token_ids(config: Any, sizes: Sizes) -> torch.Tensor:
    """Random ones, none of them special where there are others."""
    allowed = torch.ones(config.vocab_size, dtype=torch.bool)
    for value in special_tokens(config).values():
        for token in value if isinstance(value, list) else [value]:
            if 0 <= token < config.vocab_size:
                allowed[token] = False
    ids = allowed.nonzero().flatten()
    if not len(ids):
        ids = torch.arange(config.vocab_size)
    return ids[torch.randint(0, len(ids), (sizes.batch, sizes.tokens))]


def _images(task: str, config: Any, sizes: Sizes) -> dict[str, torch.Tensor]:
    size = sizes.image or getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    pixels = torch.randn(sizes.batch, getattr(config, "num_channels", 3), height, width)
    shape = (sizes.batch, height, width) if task == "SEMANTIC_SEGMENTATION" else (sizes.batch,)
    return {"pixel_values": pixels, "labels": _classes(config, shape)}


def _classes(config: Any, shape: tuple[int, ...]) -> torch.Tensor:
    # One label is a regression.
    return (
        torch.randint(0, config.num_labels, shape) if config.num_labels > 1 else torch.rand(shape)
    )


def special_tokens(config: Any) -> dict[str, int | list[int]]:
    """Ids that mean something: padding, ends, images."""
    ends = ("_token_id", "_token_index")
    found = {k: v for k, v in config.to_dict().items() if k.endswith(ends)}
    return {
        key: value
        for key, value in found.items()
        if isinstance(value, int)
        or (isinstance(value, list) and all(isinstance(token, int) for token in value))
    }
