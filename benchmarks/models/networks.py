"""Architectures that no installed library has, for tracing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class DenseNet(nn.Module):
    """DenseNet-BC (Huang et al. 2017), which returns the cross-entropy of labelled images.

    Each layer reads the concatenation of all earlier outputs of its block.
    """

    def __init__(
        self, blocks: Sequence[int] = (6, 12, 24, 16), growth: int = 32, classes: int = 1000
    ) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for number, layers in enumerate(blocks):
            self.blocks.append(
                nn.ModuleList(_DenseLayer(width + i * growth, growth) for i in range(layers))
            )
            width += layers * growth
            if number + 1 < len(blocks):
                self.transitions.append(
                    nn.Sequential(
                        nn.BatchNorm2d(width),
                        nn.ReLU(inplace=True),
                        nn.Conv2d(width, width // 2, 1, bias=False),
                        nn.AvgPool2d(2),
                    )
                )
                width //= 2
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.stem(pixel_values)
        for number, block in enumerate(self.blocks):
            features = [x]
            for layer in block.children():
                features.append(layer(features))
            x = torch.cat(features, 1)
            if number < len(self.transitions):
                x = self.transitions[number](x)
        x = F.adaptive_avg_pool2d(F.relu(self.norm(x)), 1).flatten(1)
        return F.cross_entropy(self.head(x), labels)


class _DenseLayer(nn.Module):
    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        x = self.conv1(F.relu(self.norm1(torch.cat(features, 1)), inplace=True))
        return self.conv2(F.relu(self.norm2(x), inplace=True))


class SegmentationUNet(nn.Module):
    """The U-Net of Ronneberger et al. 2015, with padding and batch norm.

    It returns the cross-entropy of images with a label for every pixel.
    """

    def __init__(self, width: int = 64, levels: int = 4, classes: int = 21) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(
            _double_convolution(before, after)
            for before, after in zip([3, *widths], widths, strict=False)
        )
        deep_first = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in deep_first)
        self.up = nn.ModuleList(_double_convolution(2 * b, b) for _, b in deep_first)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x, skipped = self.down[0](pixel_values), list[torch.Tensor]()
        for block in self.down[1:]:
            skipped.append(x)
            x = block(F.max_pool2d(x, 2))
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skipped.pop(), grow(x)], 1))
        return F.cross_entropy(self.head(x), labels)


def _double_convolution(before: int, after: int) -> nn.Module:
    """Return two convolutions, each followed by batch norm and ReLU."""
    layers: list[nn.Module] = []
    for width in (before, after):
        layers.append(nn.Conv2d(width, after, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)
