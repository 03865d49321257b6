"""`remat.fit` with a checkpoint for each block: the peak of blocks that run, to some bytes."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.training.models import WithParts
from tests.torch.api.test_fit import option, trained_peak
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat

SHAPE = (64, 128)


class Scaled(WithParts, scale=lambda: nn.Parameter(torch.randn(1, *SHAPE))):
    """A scale of each token and channel, in float32. Autograd saves nothing of the argument, which
    the checkpoint does."""

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * self.scaled(x.float())).to(x.dtype)


class Shifted(Scaled):
    """Autograd saves the factor of the scale for that product only."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(SHAPE[1]))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


class Blocks(nn.Module):
    """Blocks, each with a checkpoint if `is_checkpointed`. Captures ignore the checkpoints."""

    def __init__(self, block: type[Scaled]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.is_checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x.float().sigmoid().mean()


@pytest.mark.parametrize("block", [Scaled, Shifted])
def test_the_peak_is_that_of_the_checkpoints(block: type[Scaled]) -> None:
    """Gradients of the scale are summed over the batch, while autograd retains their product's
    gradient, and no more the tensors that the checkpoint's hooks have unpacked. A block retains its
    argument until its backward has ended."""
    torch.manual_seed(0)
    model, x = Blocks(block), torch.randn(2, *SHAPE, dtype=torch.bfloat16)
    eager = remat.fit(model, (x,), device="cpu", optimizer="none", memory="1TiB")
    answer = remat.fit(
        model, (x,), device="cpu", optimizer="none", memory=eager.memory.reserved_bytes - 1,
        strategy=remat.Auto(time_limit=0.1),
    )  # fmt: skip
    promised = option(answer, "checkpoint each block")
    model.is_checkpointed = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    peak_bytes = trained_peak((model, (), {"x": x}), optimizer)
    assert promised.peak_bytes == pytest.approx(peak_bytes, abs=64)
