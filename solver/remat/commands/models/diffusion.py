"""The training step of a diffusion model of diffusers: predict the noise in noisy images."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from remat.commands.models.batches import Sizes
from remat.errors import TraceError, nearest, one_line

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_CLASSES = ("UNet2DModel", "UNet2DConditionModel")
_CONDITIONS = (
    "class_embed_type",
    "num_class_embeds",
    "addition_embed_type",
    "encoder_hid_dim_type",
    "time_cond_proj_dim",
)
"""What a U-Net may want besides text; a step here has none of it."""


class Denoiser(nn.Module):
    """A U-Net with the loss of its training: the mean squared error of the noise it predicts."""

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
        """`noisy` and `noise` are (batch, channels, height, width), `times` (batch,), `text`
        (batch, tokens, width)."""
        condition = () if text is None else (text,)
        predicted = self.unet(noisy, times, *condition).sample
        return {"loss": F.mse_loss(predicted, noise)}


def denoising_step(
    diffusers: ModuleType, data: dict[str, Any], source: str, sizes: Sizes, changes: dict[str, Any]
) -> Call:
    """The model of a configuration with "_class_name", and one call. Raises `TraceError`."""
    name = data["_class_name"]
    if name not in _CLASSES:
        raise TraceError(
            f"{source} is a configuration of diffusers' {name}; remat makes {', '.join(_CLASSES)} "
            "from a file: for others write a function that returns (model, args)"
        )
    model_class = getattr(diffusers, name)
    try:
        unet = model_class.from_config(data | changes)
    except Exception as error:
        raise TraceError(f"{name} cannot be made from {source}: {one_line(error)}") from error
    config = unet.config
    for key in changes:
        if key not in config:
            raise no_field(key, config, source)
    for key in _CONDITIONS:
        if config.get(key) is not None:
            raise TraceError(
                f"{source} wants a condition that remat does not make ({key} is {config[key]!r}); "
                "write a function that returns (model, args)"
            )
    noisy = torch.randn(sizes.batch, config["in_channels"], *_sides(config, source, sizes))
    noise = torch.randn(sizes.batch, config["out_channels"], *noisy.shape[2:])
    args = [noisy, torch.randint(0, 1000, (sizes.batch,)), noise]
    if name == "UNet2DConditionModel":
        width = config["cross_attention_dim"]
        widths = width if isinstance(width, (list, tuple)) else [width]
        args.append(torch.randn(sizes.batch, sizes.tokens, widths[0]))
    return Denoiser(unet).train(), tuple(args), {}


def no_field(key: str, known: Iterable[str], source: str) -> TraceError:
    """The error for a change of what a configuration does not have."""
    return TraceError(f"the configuration of {source} has no {key!r}{nearest(key, known)}")


def _sides(config: Any, source: str, sizes: Sizes) -> tuple[int, int]:
    size = sizes.image or config["sample_size"]
    if size is None:
        raise TraceError(f"{source} says no sample_size; give one: --image 64")
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return height, width
