"""Workloads: real architectures with random weights and a batch, the loss inside the model.

Sizes are such that activations dominate, and one eager step takes some seconds on two CPU cores or
fills a large part of a large GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Workload:
    """A model with its batch.

    `blocks` returns the modules that per-block checkpointing checkpoints; `autocast` is the dtype
    of the forward's autocast, if any.
    """

    size: str
    model: nn.Module
    batch: dict[str, Any]
    blocks: Callable[[nn.Module], list[nn.Module]]
    autocast: torch.dtype | None = None

    def autocast_context(
        self, *, has_cache: bool = True
    ) -> contextlib.AbstractContextManager[object]:
        """Return the autocast context of the forward, or a null context."""
        if self.autocast is None:
            return contextlib.nullcontext()
        device_type = next(self.model.parameters()).device.type
        return torch.autocast(device_type, dtype=self.autocast, cache_enabled=has_cache)


class DenoisingLoss(nn.Module):
    """The loss of a diffusion model that predicts the noise of an image."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(
        self, noisy: torch.Tensor, steps: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean squared error of the predicted noise."""
        return F.mse_loss(self.unet(noisy, steps).sample, noise)


def _to_training(model: nn.Module, device: torch.device) -> nn.Module:
    return model.to(device).train()


def modules_of_classes(*kinds: str) -> Callable[[nn.Module], list[nn.Module]]:
    """Return a function that lists the modules of a model whose class has one of these names."""
    return lambda model: [m for m in model.modules() if type(m).__name__ in kinds]


def labelled_images(rows: int, side: int, labels: int, device: torch.device) -> dict[str, Any]:
    """Return a batch of random images for an image classifier of Transformers."""
    return {
        "pixel_values": torch.randn(rows, 3, side, side, device=device),
        "labels": torch.randint(0, labels, (rows,), device=device),
    }


def noisy_images(rows: int, side: int, device: torch.device) -> dict[str, Any]:
    """Return a random batch for `DenoisingLoss`."""
    return {
        "noisy": torch.randn(rows, 3, side, side, device=device),
        "steps": torch.randint(0, 1000, (rows,), device=device),
        "noise": torch.randn(rows, 3, side, side, device=device),
    }


def gpt2(device: torch.device, quick: bool) -> Workload:
    """Return a GPT-2 workload of 12 layers; narrower on the CPU, with a small vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers = 3 if quick else 12
    if device.type == "cuda" and not quick:
        rows, tokens, width, heads, vocabulary = 16, 1024, 768, 12, 50257
    else:
        rows, tokens, width, heads, vocabulary = 4, 128 if quick else 256, 384, 6, 8192
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=tokens,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, vocabulary, (rows, tokens), device=device)
    return Workload(
        f"{layers} layers of width {width}, {heads} heads, vocabulary {vocabulary}, "
        f"batch {rows} x {tokens} tokens, dropout 0.1",
        _to_training(GPT2LMHeadModel(config), device),
        {"input_ids": ids, "labels": ids},
        lambda model: list(model.get_submodule("transformer.h").children()),
    )


def resnet50(device: torch.device, quick: bool) -> Workload:
    """Return a ResNet-50 workload (bottleneck layers 3, 4, 6, 3)."""
    from transformers import ResNetConfig, ResNetForImageClassification

    depths = [1, 1, 1, 1] if quick else [3, 4, 6, 3]
    rows, side = (128, 224) if device.type == "cuda" and not quick else (8, 64 if quick else 160)
    config = ResNetConfig(depths=depths, layer_type="bottleneck")
    config.num_labels = 1000
    return Workload(
        f"bottleneck layers {depths}, batch {rows} x 3 x {side} x {side}",
        _to_training(ResNetForImageClassification(config), device),
        labelled_images(rows, side, 1000, device),
        modules_of_classes("ResNetBottleNeckLayer"),
    )


def unet2d(device: torch.device, quick: bool) -> Workload:
    """Return the workload of diffusers' U-Net with attention."""
    from diffusers import UNet2DModel

    if device.type == "cuda" and not quick:
        rows, side, widths, layers = 32, 64, (128, 256, 512, 512), 2
    else:
        rows, side, widths, layers = 4, 32, (32, 64, 64, 128), 1 if quick else 2
        if not quick:
            rows, side, widths = 4, 64, (64, 64, 128, 128)
    model = UNet2DModel(
        sample_size=side, in_channels=3, out_channels=3, layers_per_block=layers,
        block_out_channels=widths, norm_num_groups=16,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return Workload(
        f"widths {list(widths)}, {layers} layers per block, batch {rows} x 3 x {side} x {side}",
        _to_training(DenoisingLoss(model), device),
        noisy_images(rows, side, device),
        modules_of_classes(
            "ResnetBlock2D", "Attention"
        ),  # the blocks diffusers checkpoints, and attention
    )


WORKLOADS: dict[str, Callable[[torch.device, bool], Workload]] = {
    "gpt2": gpt2,
    "resnet50": resnet50,
    "unet2d": unet2d,
}
