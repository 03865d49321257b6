"""The two small models that Rockmate and an earlier prototype were measured on.

Those measurements state sizes only. The other parameters were chosen so that eager mode has the
stated peak. The GPT has 207.2 MiB with 4 heads (the saved log-sum-exp of attention shows the number
of heads), and per-block checkpointing 0.256 of that. The ResNet is ResNet-18 with a stem for small
images (two blocks each of width 64, 128, 256, 512). It has 153.0 MiB of live storages: the 162.0
MiB measured by an allocator include 9 MiB that oneDNN allocates in the last convolution's backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Gpt(nn.Module):
    """A GPT of 6 blocks, width 256, 4 heads, vocabulary 1000. It returns the mean of the logits."""

    def __init__(self, blocks: int = 6, width: int = 256, vocabulary: int = 1000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(_GptBlock(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch of token ids."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).mean()


class _GptBlock(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(rows, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.mlp(self.norm2(x))


class ResNet(nn.Module):
    """A ResNet of 8 basic blocks from width 64 on. It returns the mean of the logits."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        before = width
        for stage in range(4):
            after = width << stage
            blocks += [_BasicBlock(before, after, 2 if stage else 1), _BasicBlock(after, after, 1)]
            before = after
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch of images."""
        x = F.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).mean()


class _BasicBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
