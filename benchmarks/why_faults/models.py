"""The models of the planted faults and of the healthy runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS, CLASSES = 512, 2048, 512


class Block(nn.Module):
    """A block with a residual connection."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


class Net(nn.Module):
    """Some blocks and a head. `segment` is the number of blocks of a checkpoint, 0 for none."""

    def __init__(
        self, depth: int = 4, width: int = WIDTH, classes: int = CLASSES, segment: int = 0
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)
        self.segment = segment

    def _run_blocks(self, x: torch.Tensor, start: int, end: int) -> torch.Tensor:
        for block in self.blocks[start:end]:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        depth = len(self.blocks)
        if not self.segment:
            return self.head(self._run_blocks(x, 0, depth))
        for start in range(0, depth, self.segment):
            x = checkpoint(self._run_blocks, x, start, start + self.segment, use_reentrant=False)
        return self.head(x)


class TwoTowers(nn.Module):
    """A frozen tower, of which nothing says that it is frozen, and a trained net."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(24)))
        self.net = Net(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.tower(x[: len(x) // 8]).repeat(8, 1))


class CachedAttention(nn.Module):
    """Attention whose cache of keys grows with each call. `limit` is its length in
    batches, 0 for none."""

    def __init__(self, limit: int = 0) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)
        self.keys: torch.Tensor | None = None
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = self.key(x)
        if self.keys is None:
            self.keys = key.detach()
        elif not self.limit or len(self.keys) < self.limit * len(x):
            self.keys = torch.cat([self.keys, key.detach()])  # planted: cache_that_grows
        keys = self.keys
        assert keys is not None
        return x + key * keys[:1].mean()


class CachedNet(nn.Module):
    """A net with a cache."""

    def __init__(self, limit: int = 0) -> None:
        super().__init__()
        self.attention = CachedAttention(limit)
        self.net = Net(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.attention(x))


class PairwiseNet(nn.Module):
    """A net that compares all pairs of tokens, in pieces if `pieces` is above 1."""

    def __init__(self, pieces: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 64)
        self.pieces = pieces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        points = self.embed(x[:512])
        return sum(
            (self._distances(p, points) for p in points.chunk(self.pieces)),
            start=points.new_zeros(()),
        )

    def _distances(self, some: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        if self.pieces > 1:
            return checkpoint(_distance_sum, some, points, use_reentrant=False)
        return _distance_sum(some, points)


def _distance_sum(some: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    return (some[:, None] - points[None]).square().sum()  # planted: tensor_of_all_pairs


class Recurrent(nn.Module):
    """A cell that is called once for each step of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.tanh(self.cell(torch.cat([x, state], -1)))
        return self.head(state), state


def batch(device: str, tokens: int = TOKENS, width: int = WIDTH) -> torch.Tensor:
    """Return a batch, a small one on the CPU. Its numbers do not matter: kernels of the software
    GPU compute none."""
    return torch.zeros(tokens if device == "cuda" else tokens // 8, width, device=device)


def squares(tensors: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a loss."""
    if isinstance(tensors, torch.Tensor):
        return tensors.sum()
    return sum((t.sum() for t in tensors), start=torch.zeros((), device=tensors[0].device))
