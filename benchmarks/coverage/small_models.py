"""Small models of Transformers' architectures: two layers, a width of 64, random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

MAX_PARAMETERS = 30_000_000
"""Number of parameters above which a model counts as not small."""

_SIZES: dict[str, int] = {
    **dict.fromkeys(
        (
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
            "decoder_layers", "num_decoder_layers", "num_encoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim"), 64),
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "d_kv"), 16),
    **dict.fromkeys(
        (
            "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff",
            "n_inner", "ffn_hidden_size", "moe_intermediate_size",
        ),
        128,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    "vocab_size": 2048,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "image_size": 64,
    "num_labels": 8,
}  # fmt: skip

_WIDTHS = ("hidden_sizes", "embed_dims", "neck_hidden_sizes", "hidden_dims", "encoder_hidden_size")
_DEPTHS = ("depths", "layers", "num_conv_layers")
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}

ROWS, TOKENS = 8, 24

KINDS = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "AutoModelForImageClassification"),
}
"""For each kind, Transformers' table of architectures, and the class that builds them."""


def architectures(kind: str) -> list[str]:
    """Return the model types of a kind in the installed version of Transformers."""
    import transformers

    table: Any = getattr(transformers, KINDS[kind][0])
    return sorted({config.model_type for config in table if config.model_type})


def build_small_model(kind: str, model_type: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a small model with random weights, and a batch with labels.

    Raises any error that the model's code raises.
    """
    import transformers

    auto_class: Any = getattr(transformers, KINDS[kind][1])
    torch.manual_seed(0)
    model: nn.Module = auto_class.from_config(_small_config(model_type))
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > MAX_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters: it could not be built small")
    return model.train(), batch_of(kind, model)


def _small_config(model_type: str) -> Any:
    """Return a configuration of a model type with small sizes, nested ones included."""
    import transformers

    config_class: Any = transformers.CONFIG_MAPPING[model_type]
    default = config_class()
    config = config_class(**dict(_small_sizes(default)))
    for name, value in vars(default).items():  # nested configurations, for text or images
        if isinstance(value, transformers.PreTrainedConfig):
            setattr(config, name, type(value)(**dict(_small_sizes(value))))
    config.use_cache = False
    return config


def _small_sizes(default: Any) -> Iterator[tuple[str, Any]]:
    """Yield the small sizes that fit the fields of a configuration."""
    for name, value in {**_SIZES, **_TOKENS}.items():
        if isinstance(getattr(default, name, None), int) or name in _TOKENS:
            yield name, value
    for name, value in vars(default).items():
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, int) for v in value):
            continue
        if name in _DEPTHS:
            yield name, [1] * len(value)
        elif name in _WIDTHS:
            yield name, [32 * 2**i for i in range(len(value))]


def batch_of(kind: str, model: nn.Module, size: int | None = None) -> dict[str, torch.Tensor]:
    """Return a batch with labels: `size` tokens in each row, or `size` images."""
    generator = torch.Generator().manual_seed(1)
    config: Any = model.config
    if kind == "image":
        side = getattr(config, "image_size", 64)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        channels = getattr(config, "num_channels", 3)
        rows = size or ROWS
        pixels = torch.randn(rows, channels, height, width, generator=generator)
        return {"pixel_values": pixels, "labels": torch.arange(rows) % config.num_labels}
    ids = torch.randint(5, 128, (ROWS, size or TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}
