"""Models of images, diffusion and sequences without attention, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.atlas.catalogue import Build, Entry, LossOnly
from benchmarks.models.networks import DenseNet, SegmentationUNet
from benchmarks.models.workloads import DenoisingLoss


def _images(rows: int, side: int = 224) -> dict[str, torch.Tensor]:
    labels = torch.zeros(rows, dtype=torch.long)
    return {"pixel_values": torch.zeros(rows, 3, side, side), "labels": labels}


def _classifier(architecture: str, rows: int, config: dict[str, Any]) -> Build:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        sizes = getattr(transformers, f"{architecture}Config")(**config)
        sizes.num_labels = 1000
        model = getattr(transformers, f"{architecture}ForImageClassification")(sizes)
        return LossOnly(model), _images(rows)

    return build


def _image_entry(
    name: str, title: str, architecture: str, rows: int, config: dict[str, Any]
) -> Entry:
    return Entry(name, f"{title}, {rows} images", _classifier(architecture, rows, config))


class _ConditionalDenoising(nn.Module):
    """The squared error of a conditional U-Net's predicted noise."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        added_cond_kwargs: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the error with respect to a target of zeros."""
        kwargs = {} if added_cond_kwargs is None else {"added_cond_kwargs": added_cond_kwargs}
        noise = self.model(sample, timestep, encoder_hidden_states, **kwargs).sample
        return noise.float().square().mean()


def _stable_diffusion() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    return _ConditionalDenoising(model), {
        "sample": torch.zeros(8, 4, 64, 64),
        "timestep": torch.zeros(8, dtype=torch.long),
        "encoder_hidden_states": torch.zeros(8, 77, 768),
    }


def _sdxl() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import UNet2DConditionModel

    config: dict[str, Any] = {
        "sample_size": 128, "cross_attention_dim": 2048, "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20),
        "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816, "use_linear_projection": True,
    }  # fmt: skip
    model = UNet2DConditionModel(**config)
    return _ConditionalDenoising(model), {
        "sample": torch.zeros(2, 4, 128, 128),
        "timestep": torch.zeros(2, dtype=torch.long),
        "encoder_hidden_states": torch.zeros(2, 77, 2048),
        "added_cond_kwargs": {
            "text_embeds": torch.zeros(2, 1280),
            "time_ids": torch.zeros(2, 6),
        },
    }


class _TransformerDenoising(nn.Module):
    """The squared error of a class-conditional diffusion transformer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, class_labels: torch.Tensor
    ) -> torch.Tensor:
        """Return the error with respect to a target of zeros."""
        prediction = self.model(hidden_states, timestep, class_labels).sample
        return prediction.float().square().mean()


def _dit() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(num_layers=28, num_attention_heads=16, attention_head_dim=72)
    return _TransformerDenoising(model), {
        "hidden_states": torch.zeros(32, 4, 32, 32),
        "timestep": torch.zeros(32, dtype=torch.long),
        "class_labels": torch.zeros(32, dtype=torch.long),
    }


def _unet2d() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=64, in_channels=3, out_channels=3, layers_per_block=2,
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    image = torch.zeros(16, 3, 64, 64)
    steps = torch.zeros(16, dtype=torch.long)
    return DenoisingLoss(model), {"noisy": image, "steps": steps, "noise": image.clone()}


def _segmentation() -> tuple[nn.Module, dict[str, Any]]:
    labels = torch.zeros(8, 512, 512, dtype=torch.long)
    return SegmentationUNet(), {"pixel_values": torch.zeros(8, 3, 512, 512), "labels": labels}


class _GruCells(nn.Module):
    """Two layers of GRU cells that run step by step, and predict a class for each step."""

    def __init__(self, width: int = 1024, classes: int = 256) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(width, width) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over all steps. `inputs` is [steps, batch, width]."""
        states = [torch.zeros_like(inputs[0]) for _ in self.cells]
        losses: list[torch.Tensor] = []
        for x, label in zip(inputs.unbind(), labels.unbind(), strict=True):
            for layer, cell in enumerate(self.cells):
                states[layer] = x = cell(x, states[layer])
            losses.append(nn.functional.cross_entropy(self.head(x), label))
        return torch.stack(losses).mean()


def _gru() -> tuple[nn.Module, dict[str, Any]]:
    labels = torch.zeros(64, 256, dtype=torch.long)
    return _GruCells(), {"inputs": torch.zeros(64, 256, 1024), "labels": labels}


_BOTTLENECK = {"layer_type": "bottleneck"}

VISION_MODELS = (
    _image_entry("vit-l", "ViT-L/16", "ViT", 64, {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 4096,
    }),
    _image_entry("vit-h", "ViT-H/14", "ViT", 32, {
        "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16,
        "intermediate_size": 5120, "patch_size": 14,
    }),
    _image_entry("swin-b", "Swin-B", "Swin", 64, {
        "embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32],
    }),
    _image_entry("convnext-b", "ConvNeXt-B", "ConvNext", 64, {
        "hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 27, 3],
    }),
    _image_entry("resnet-50", "ResNet-50", "ResNet", 128, _BOTTLENECK | {
        "depths": [3, 4, 6, 3],
    }),
    _image_entry("resnet-152", "ResNet-152", "ResNet", 64, _BOTTLENECK | {
        "depths": [3, 8, 36, 3],
    }),
    Entry("densenet-121", "DenseNet-121, 64 images", lambda: (DenseNet(), _images(64))),
    Entry("unet-sd", "U-Net of Stable Diffusion 1.5, 8 images of 512 x 512", _stable_diffusion),
    Entry("unet-sdxl", "U-Net of SDXL, 2 images of 1,024 x 1,024", _sdxl),
    Entry("unet-pixels", "U-Net of diffusers on pixels, 16 images of 64 x 64", _unet2d),
    Entry("dit-xl", "DiT-XL/2, 32 images of 256 x 256", _dit),
    Entry("unet-segmentation", "segmentation U-Net, 8 images of 512 x 512", _segmentation),
    Entry("gru", "two layers of GRU cells, 64 steps of 256 x 1,024", _gru),
)  # fmt: skip
"""The models of images, diffusion and sequences without attention."""
