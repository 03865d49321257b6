"""Checks of the sizes in a model's configuration, before a model is built from it."""

from __future__ import annotations

from collections.abc import Mapping, Set

from remat.errors import TraceError

LAYERS = frozenset(
    {
        "decoder_layers",
        "encoder_layers",
        "layers_per_block",
        "num_decoder_layers",
        "num_hidden_layers",
    }
)
"""Fields with a number of layers."""

SIZES = LAYERS | {
    "cross_attention_dim",
    "hidden_size",
    "image_size",
    "in_channels",
    "num_attention_heads",
    "num_channels",
    "num_key_value_heads",
    "out_channels",
    "patch_size",
    "sample_size",
    "vocab_size",
}
"""Fields of transformers and diffusers that no model has with 0."""

_MAX_LAYERS = 10_000
_MAX_SIZE = 100_000_000


def check_sizes(
    fields: Mapping[str, object], source: str, layers: Set[str] = LAYERS, sizes: Set[str] = SIZES
) -> None:
    """Raise `TraceError` if a size is below 1, or so large that building the model takes hours.
    `layers` and `sizes` are the names of such fields."""
    for name, value in fields.items():
        if name not in sizes or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        limit = _MAX_LAYERS if name in layers else _MAX_SIZE
        if not 1 <= value <= limit:
            raise TraceError(
                f"the configuration of {source} has {name}={value}, and no model of that size can "
                f"be built; set it to a number from 1 to {limit:,}"
            )
