"""Models whose steps write into parts of tensors, one for each kind of write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor

WIDTH = 24
ROWS = 64

Fill = Callable[[Tensor, Tensor], Tensor]
"""Takes the hidden state (rows, width) and a weight (width, width); returns a hidden state."""


def slices(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(len(h), 2 * WIDTH)
    out[:, :WIDTH] = h
    out[:, WIDTH:] = h @ weight
    return out[:, WIDTH // 2 : WIDTH // 2 + WIDTH]


def selected_rows(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(4, len(h), WIDTH)
    for index in range(4):
        out[index] = h * (index + 1)
    return out.sum(0) @ weight


def index_put(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(2 * len(h), WIDTH)
    out[torch.arange(len(h)) * 2] = h
    return (out @ weight)[: len(h)]


def index_put_accumulate(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(len(h), WIDTH)
    out.index_put_((torch.arange(len(h)) % 7,), h, accumulate=True)
    return out @ weight


def boolean_mask(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(len(h), WIDTH)
    out[:, :9] = h[:, :9]
    out[out > 0.1] = 0.5
    return h + out @ weight


def masked_fill_of_a_view(h: Tensor, weight: Tensor) -> Tensor:
    out = h @ weight
    out[:, ::2].masked_fill_(h[:, ::2] > 0, 0.25)
    return out + h


def copy_into_a_view(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(len(h), 3, WIDTH)
    out.select(1, 0).copy_(h)
    out.select(1, 1).copy_(weight[0])  # broadcast
    out.select(1, 2).copy_(h.detach())
    return out.sum(1)


def add_to_a_view(h: Tensor, weight: Tensor) -> Tensor:
    out = h @ weight
    out[:, 3:9].add_(h[:, :6], alpha=2)
    return out


def narrowed(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(len(h), 2 * WIDTH)
    out.narrow(1, 5, WIDTH).copy_(h @ weight)
    return out[:, :WIDTH] + out[:, WIDTH:]


def strided(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(len(h), WIDTH)
    out.as_strided((len(h), 8), (WIDTH, 3), 1).copy_((h @ weight)[:, :8])
    return out + h


def unbound(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(3, len(h), WIDTH)
    for number, part in enumerate(list(out.detach().unbind(0))):
        part.copy_(h.detach() * number)
    return h @ weight + out.sum(0)


def transposed(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(WIDTH, 2 * len(h))
    out.t()[: len(h)].copy_(h)
    out.t()[len(h) :].add_(h @ weight)
    return out[:, : len(h)].t() + out[:, len(h) :].t()


def diagonal(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(WIDTH, WIDTH)
    out.diagonal().copy_(weight[0])
    out[1:, :-1].diagonal().mul_(0.5)
    return h @ (out + weight)


def scattered(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(len(h), WIDTH)
    index = torch.arange(WIDTH).flip(0).expand(len(h), WIDTH)
    out.scatter_(1, index, h)
    out[:, :5].scatter_add_(1, index[:, -5:], h[:, :5])
    return out @ weight


def indexed_copies(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(len(h), WIDTH)
    rows = torch.arange(len(h)).flip(0)
    out.index_copy_(0, rows, h)
    out.index_add_(0, rows, h @ weight, alpha=0.5)
    return out


def chunks_in_a_loop(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(len(h), WIDTH)
    for start in range(0, len(h), 10):
        out[start : start + 10] = torch.tanh(h[start : start + 10] @ weight)
    return out


def read_between_writes(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(len(h), WIDTH)
    out[:, :8] = h[:, :8]
    first = out * 2
    out[:, 8:] = (first @ weight)[:, 8:]
    second = out + first
    out[:, 4:12] = 0.0
    return out + second


def written_twice(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(len(h), WIDTH)
    part = out[:, 4:20]
    for _ in range(5):
        part.add_(h[:, 4:20])
        part.mul_(0.5)
    return out @ weight


def no_grad(h: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.empty(len(h), WIDTH)
        out[:, :10] = h[:, :10]
        out[:, 10:].fill_(0.5)
        out.clamp_(-1, 1)
    return h @ weight * out


def written_value_in_backward(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(len(h), WIDTH)
    out[:, :10] = h[:, :10]
    out[:, 10:] = h[:, 10:] @ weight[10:, 10:]
    return torch.sigmoid(out) * torch.exp(out * 0.1)


def copy_of_a_parameter(h: Tensor, weight: Tensor) -> Tensor:
    scaled = weight.clone()
    scaled[3:7] *= 2
    scaled[:, 5] = 1.0
    return h @ scaled


def half_precision(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(len(h), WIDTH, dtype=torch.bfloat16)
    out[:, :11] = h[:, :11]
    out[:, 11:] = (h @ weight)[:, 11:]
    return out.float()


def integers(h: Tensor, weight: Tensor) -> Tensor:
    index = torch.zeros(len(h), dtype=torch.int64)
    index[1:].copy_(torch.arange(len(h) - 1))
    index[10:20] = 3
    return h[index] @ weight


def attention_mask(h: Tensor, weight: Tensor) -> Tensor:
    scores = h @ h.t()
    mask = torch.ones(len(h), len(h), dtype=torch.bool)
    mask[:, : len(h) // 2] = False
    scores.masked_fill_(mask, -1e4)
    return scores.softmax(-1) @ h @ weight


def views_of_views(h: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(len(h), 2, WIDTH)
    inner = out.view(-1, WIDTH)[: len(h)].t()[4:]
    inner.copy_(h.t()[4:])
    out.permute(1, 2, 0)[1, :3].add_(1.0)
    return out.sum(1) @ weight


def view_of_other_type(h: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.zeros(len(h), WIDTH)
        out[:, :4] = h[:, :4]
        bits = out.view(torch.int32)
        out[:, 4:] = 0.5
    return h @ weight + bits.remainder(7)


def in_place_in_grad_mode(h: Tensor, weight: Tensor) -> Tensor:
    out = h @ weight
    out.add_(h).relu_()
    return out + 1


class _Fused(torch.autograd.Function):
    """A product in a workspace that both phases write several times, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        tile = torch.empty(len(h), 3 * WIDTH)[:, :WIDTH]
        torch.mm(h, weight, out=tile)
        tile.mul_(0.5)
        tile.add_(1.0)
        return tile.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = ctx.saved_tensors
        tile = torch.empty(len(h), 3 * WIDTH)[:, :WIDTH]
        torch.mm(h, weight, out=tile)
        tile.mul_(0.5)
        tile.add_(1.0)
        tile.mul_(gradients[0])
        return tile @ weight.t(), h.t() @ tile


class _Chunked(torch.autograd.Function):
    """A log-sum-exp over chunks of columns, whose gradients are written in slices."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        total, buffer = torch.zeros(len(h)), torch.empty(len(h), 6)
        for start in range(0, WIDTH, 6):
            torch.mm(h, weight[:, start : start + 6], out=buffer)
            total += buffer.exp_().sum(1)
        ctx.save_for_backward(h, weight, total)
        return h * total.log()[:, None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        h, weight, total = ctx.saved_tensors
        of_h, of_weight = gradient * total.log()[:, None], torch.zeros_like(weight)
        scale = (gradient * h).sum(1, keepdim=True) / total[:, None]
        buffer = torch.empty(len(h), 6)
        for start in range(0, WIDTH, 6):
            torch.mm(h, weight[:, start : start + 6], out=buffer)
            buffer.exp_().mul_(scale)
            buffer.scatter_add_(1, torch.zeros(len(h), 1, dtype=torch.int64), scale * 0)
            of_h.addmm_(buffer, weight[:, start : start + 6].t())
            of_weight[:, start : start + 6].addmm_(h.t(), buffer)
        return of_h, of_weight


class _GradientsInForward(torch.autograd.Function):
    """Computes its gradients in the forward, and scales them in place in the backward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        of_h = torch.empty_like(h)
        for start in range(0, len(h), 16):
            torch.mm(torch.ones_like(h)[:16], weight.t(), out=of_h[start : start + 16])
        ctx.save_for_backward(of_h, h.sum(0, keepdim=True).t().expand(WIDTH, WIDTH).contiguous())
        return (h @ weight).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        of_h, of_weight = ctx.saved_tensors
        return of_h.mul_(gradients[0]), of_weight.mul_(gradients[0])


class _FusedLoss(torch.autograd.Function):
    """A cross-entropy in chunks of rows that computes its gradients in the forward, as Liger's
    does: the probabilities of one chunk are in memory at a time."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, in_place: bool) -> Tensor:
        of_h, of_weight = torch.empty_like(h), torch.zeros_like(weight)
        loss = h.new_zeros(())
        ctx.in_place = in_place
        for start in range(0, len(h), 16):
            rows = h[start : start + 16]
            labels = torch.arange(start, start + len(rows))[:, None]
            p = (rows @ weight.t()).softmax(-1)
            loss = loss - p.gather(1, labels).log().sum()
            if in_place:
                p.scatter_add_(1, labels, -torch.ones(len(rows), 1))
                torch.mm(p, weight, out=of_h[start : start + 16])
                of_weight.addmm_(p.t(), rows)
            else:
                p = p.scatter_add(1, labels, -torch.ones(len(rows), 1))
                of_h[start : start + 16] = p @ weight
                of_weight = of_weight + p.t() @ rows
        ctx.save_for_backward(of_h, of_weight)
        return loss / len(h)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_h, of_weight = ctx.saved_tensors
        if ctx.in_place:
            return of_h.mul_(gradients[0]), of_weight.mul_(gradients[0]), None
        return of_h * gradients[0], of_weight * gradients[0], None


class _SlopesInForward(torch.autograd.Function):
    """An activation that saves its derivative, which it computes from intermediate tensors."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        wide = h @ weight.repeat(1, 20)
        gate = torch.sigmoid(wide)
        slope = gate * (1 + wide * (1 - gate))
        ctx.save_for_backward((slope[:, :WIDTH] * 2).clone(), weight)
        return (gate * wide)[:, :WIDTH].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        slope, weight = ctx.saved_tensors
        return (gradients[0] * slope) @ weight.t(), None


def fused(h: Tensor, weight: Tensor) -> Tensor:
    return _Fused.apply(h, weight)  # type: ignore[no-any-return]


def chunked(h: Tensor, weight: Tensor) -> Tensor:
    return _Chunked.apply(h, weight)  # type: ignore[no-any-return]


def gradients_in_forward(h: Tensor, weight: Tensor) -> Tensor:
    return h + _GradientsInForward.apply(h, weight)  # type: ignore[operator]


def fused_loss(h: Tensor, weight: Tensor) -> Tensor:
    return h + _FusedLoss.apply(h, weight.repeat(16, 1), False)  # type: ignore[operator]


def fused_loss_in_place(h: Tensor, weight: Tensor) -> Tensor:
    return h + _FusedLoss.apply(h, weight.repeat(16, 1), True)  # type: ignore[operator]


def slopes_in_forward(h: Tensor, weight: Tensor) -> Tensor:
    return _SlopesInForward.apply(h, weight)  # type: ignore[no-any-return]


FILLS: dict[str, Fill] = {
    fill.__name__: fill
    for fill in (
        slices, selected_rows, index_put, index_put_accumulate, boolean_mask,
        masked_fill_of_a_view, copy_into_a_view, add_to_a_view, narrowed, strided, unbound,
        transposed, diagonal, scattered, indexed_copies, chunks_in_a_loop, read_between_writes,
        written_twice, no_grad, written_value_in_backward, copy_of_a_parameter, half_precision,
        integers, attention_mask, views_of_views, view_of_other_type, in_place_in_grad_mode, fused,
        chunked, gradients_in_forward, fused_loss, fused_loss_in_place, slopes_in_forward,
    )
}  # fmt: skip


class WritingBlock(nn.Module):
    """A residual block with a fill between two layers."""

    def __init__(self, fill: Fill) -> None:
        super().__init__()
        self.fill = fill
        self.up = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.down = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.fill(torch.tanh(self.up(x)), self.weight))


class WritingModel(nn.Module):
    """Blocks with one kind of write."""

    def __init__(self, fill: Fill, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(WritingBlock(fill) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
