"""Training steps for U-Nets of diffusers: predict the noise in noisy images."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from remat.commands.models.batches import BatchSizes
from remat.commands.models.model_sizes import check_sizes
from remat.errors import TraceError, one_line, similar_names_hint

ModelCall = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_MODEL_CLASSES = ("UNet2DModel", "UNet2DConditionModel")
_CONDITIONS = (
    "class_embed_type",
    "num_class_embeds",
    "addition_embed_type",
    "encoder_hid_dim_type",
    "time_cond_proj_dim",
)
"""Configuration fields of conditions other than text, which this training step does not provide."""


class Denoiser(nn.Module):
    """A U-Net that returns its training loss: the mean squared error of the predicted noise."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(
        self,
        noisy: torch.Tensor,
        times: torch.Tensor,
        noise: torch.Tensor,
        text: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the loss. `noisy` and `noise` are (batch, channels, height, width), `times` is
        (batch,), and `text` is (batch, tokens, width)."""
        condition = () if text is None else (text,)
        predicted = self.unet(noisy, times, *condition).sample
        return {"loss": F.mse_loss(predicted, noise)}


def denoising_step(
    diffusers: ModuleType,
    data: dict[str, Any],
    source: str,
    sizes: BatchSizes,
    changes: dict[str, Any],
) -> ModelCall:
    """Return the model of a configuration with "_class_name", and the arguments of one call. Raises
    `TraceError`."""
    name = data["_class_name"]
    if name not in _MODEL_CLASSES:
        raise TraceError(
            f"{source} is a configuration of diffusers' {name}; remat builds only "
            f"{', '.join(_MODEL_CLASSES)} from a file: for others, write a function that returns "
            "(model, args)"
        )
    model_class = getattr(diffusers, name)
    check_sizes(data | changes, source)
    try:
        unet = model_class.from_config(data | changes)
    except Exception as error:
        raise TraceError(f"cannot build {name} from {source}: {one_line(error)}") from error
    config = unet.config
    for key in changes:
        if key not in config:
            raise unknown_field_error(key, config, source)
    for key in _CONDITIONS:
        if config.get(key) is not None:
            raise TraceError(
                f"{source} needs a condition that remat does not provide ({key} is "
                f"{config[key]!r}); write a function that returns (model, args)"
            )
    noisy = torch.randn(sizes.batch, config["in_channels"], *_image_size(config, source, sizes))
    noise = torch.randn(sizes.batch, config["out_channels"], *noisy.shape[2:])
    args = [noisy, torch.randint(0, 1000, (sizes.batch,)), noise]
    if name == "UNet2DConditionModel":
        width = config["cross_attention_dim"]
        widths = width if isinstance(width, (list, tuple)) else [width]
        args.append(torch.randn(sizes.batch, sizes.tokens, widths[0]))
    return Denoiser(unet).train(), tuple(args), {}


def unknown_field_error(key: str, fields: Iterable[str], source: str) -> TraceError:
    """Return the error for a changed field that the configuration does not have."""
    return TraceError(
        f"the configuration of {source} has no {key!r}{similar_names_hint(key, fields)}"
    )


def _image_size(config: Any, source: str, sizes: BatchSizes) -> tuple[int, int]:
    size = sizes.image or config["sample_size"]
    if size is None:
        raise TraceError(f"{source} has no sample_size; pass the image size, as in --image 64")
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return height, width
