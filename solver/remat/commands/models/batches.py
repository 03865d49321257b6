"""Random batches for training steps of transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from remat.errors import TraceError

SEQ_TO_SEQ = "SEQ_TO_SEQ_CAUSAL_LM"
SPEECH = "SPEECH_SEQ_2_SEQ"
_IMAGES = ("IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION")
TASKS = (
    SEQ_TO_SEQ,
    SPEECH,
    "MASKED_LM",
    "CAUSAL_LM",
    *_IMAGES,
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
)
"""Tasks of transformers' tables `MODEL_FOR_{task}_MAPPING` for which `make_batch` has a batch.

The task of a configuration is the first one whose table has it, unless its `architectures` name a
model of another task.
"""


_S2T_FRAMES = 1000
_SAMPLES = 160_000
"""Ten seconds of speech, as frames of 10 ms and as samples at 16 kHz."""

_SPEECH_INPUTS: dict[str, Callable[[Any], tuple[str, tuple[int, ...]]]] = {
    # Whisper takes 30 s always; its first convolutions halve the frames.
    "whisper": lambda c: ("input_features", (c.num_mel_bins, 2 * c.max_source_positions)),
    "speech_to_text": lambda c: ("input_features", (_S2T_FRAMES, c.input_feat_per_channel)),
    "moonshine": lambda c: ("input_values", (_SAMPLES,)),
}
"""The name and the shape of a sample's speech, by model type."""

SPEECH_TYPES = tuple(_SPEECH_INPUTS)
"""The model types that have a batch for the task `SPEECH`."""


@dataclass(frozen=True)
class BatchSizes:
    """Size of a batch: samples, tokens per sample, and height and width of an image in pixels
    (None: the model's default). `tokens_option` is where the user named the tokens."""

    batch: int = 2
    tokens: int = 128
    image: int | None = None
    tokens_option: str = "--tokens"

    def __post_init__(self) -> None:
        for name, size in (("batch", self.batch), ("tokens", self.tokens), ("image", self.image)):
            if size is not None and size < 1:
                raise TraceError(f"--{name} is {size}; it must be at least 1")


def make_batch(task: str, config: Any, sizes: BatchSizes) -> dict[str, torch.Tensor]:
    """Return keyword arguments for which the model returns a loss.

    Sets special tokens in `config` if the task needs them and they are missing.
    """
    if task in _IMAGES:
        return _image_batch(task, config, sizes)
    if task == SPEECH:
        return _speech_batch(config, sizes)
    text = config.get_text_config()
    ids = _random_token_ids(text, sizes)
    if task == SEQ_TO_SEQ and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = text.pad_token_id or 0
    if task == "SEQUENCE_CLASSIFICATION":
        if text.pad_token_id is None:
            # Decoders locate the last token of a sample by the padding token.
            text.pad_token_id = text.vocab_size - 1
        return {"input_ids": ids, "labels": _random_labels(config, (sizes.batch,))}
    if task == "TOKEN_CLASSIFICATION":
        return {"input_ids": ids, "labels": _random_labels(config, (sizes.batch, sizes.tokens))}
    if task == "QUESTION_ANSWERING":
        start = torch.randint(0, sizes.tokens, (sizes.batch,))
        return {"input_ids": ids, "start_positions": start, "end_positions": start}
    return {"input_ids": ids, "labels": ids}


def _random_token_ids(config: Any, sizes: BatchSizes) -> torch.Tensor:
    """Return random token ids. They exclude special tokens, unless all tokens are special."""
    allowed = torch.ones(config.vocab_size, dtype=torch.bool)
    for value in special_token_ids(config).values():
        for token in value if isinstance(value, list) else [value]:
            if 0 <= token < config.vocab_size:
                allowed[token] = False
    ids = allowed.nonzero().flatten()
    if not len(ids):
        ids = torch.arange(config.vocab_size)
    return ids[torch.randint(0, len(ids), (sizes.batch, sizes.tokens))]


def _speech_batch(config: Any, sizes: BatchSizes) -> dict[str, torch.Tensor]:
    """Return random speech and text tokens. Raises `TraceError` for more tokens than the model has
    positions."""
    max_tokens = getattr(config, "max_target_positions", None)
    if max_tokens is not None and sizes.tokens > max_tokens:
        raise TraceError(
            f"{config.model_type} has positions for {max_tokens:,} tokens of text, but "
            f"{sizes.tokens_option} is {sizes.tokens:,}; use at most {max_tokens} tokens"
        )
    if config.pad_token_id is None:
        config.pad_token_id = 0
    name, shape = _SPEECH_INPUTS[config.model_type](config)
    return {name: torch.randn(sizes.batch, *shape), "labels": _random_token_ids(config, sizes)}


def _image_batch(task: str, config: Any, sizes: BatchSizes) -> dict[str, torch.Tensor]:
    """Return random images, and labels of images or of pixels, as the task needs."""
    size = sizes.image or getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    pixels = torch.randn(sizes.batch, getattr(config, "num_channels", 3), height, width)
    shape = (sizes.batch, height, width) if task == "SEMANTIC_SEGMENTATION" else (sizes.batch,)
    return {"pixel_values": pixels, "labels": _random_labels(config, shape)}


def _random_labels(config: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random classes of this shape; random numbers for a regression."""
    # A single label means regression.
    return (
        torch.randint(0, config.num_labels, shape) if config.num_labels > 1 else torch.rand(shape)
    )


def special_token_ids(config: Any) -> dict[str, int | list[int]]:
    """Return the configuration's fields with ids of special tokens: padding, end of text,
    images."""
    suffixes = ("_token_id", "_token_index")
    fields = {k: v for k, v in config.to_dict().items() if k.endswith(suffixes)}
    return {
        key: value
        for key, value in fields.items()
        if isinstance(value, int)
        or (isinstance(value, list) and all(isinstance(token, int) for token in value))
    }
