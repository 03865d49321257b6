"""Losses of parts of the rows, of single rows, or of rows in another order."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from remat.passes.split.splits import split_largest_operations
from remat.schedule import Schedule

WORDS = 20
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss, words: int) -> None:
        super().__init__()
        self.loss = loss
        self.embedding = nn.Embedding(words, 5, dtype=torch.float64)
        self.layer = nn.Linear(5, 5, dtype=torch.float64)
        self.head = nn.Linear(5, words, dtype=torch.float64)

    def forward(self, ids: Tensor, labels: Tensor, scores: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embedding(ids)))
        return self.loss(self.head(hidden), labels, scores)


def nll(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, -2), y.flatten())


def logps(x: Tensor, y: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)


def ranks(x: Tensor, dim: int) -> Tensor:
    return x.log_softmax(-1).cumsum(1).argsort(dim=dim, stable=True) + 1


def halves(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x[:5], y[:5]) * 2 + F.cross_entropy(x[5:], y[5:])


def images(x: Tensor) -> Tensor:
    return x.view(1, 4, 4, 4).permute(0, 3, 1, 2).contiguous()


CASES: dict[str, tuple[Loss, tuple[int, int, int]]] = {
    "other order": (lambda x, y, s: nll(torch.cat([x[3:], x[:3]]).tanh(), y), (6, 3, WORDS)),
    "unequal, other order": (
        lambda x, y, s: (x.log_softmax(-1) * torch.cat([x[3:], x[:3]]).softmax(-1)).sum(),
        (7, 3, WORDS),
    ),
    "sorted along the rows": (
        lambda x, y, s: (x.softmax(-1).sort(dim=0, stable=True).values * s).sum(),
        (8, 2, WORDS),
    ),
    "ranks of rows": (lambda x, y, s: (x.log_softmax(-1) * ranks(x, 0)).sum(), (8, 3, WORDS)),
    "kept dimension": (
        lambda x, y, s: (x.softmax(-1).var(0, keepdim=True) * s[:1]).sum(),
        (3, 8, WORDS),
    ),
    "unequal parts": (
        lambda x, y, s: nll(x[:3], y[:3]) + logps(x[3:], y[3:]).sum(1).square().mean(),
        (7, 3, WORDS),
    ),
    "parts of tokens": (lambda x, y, s: halves(x.flatten(0, 1), y.flatten()), (7, 3, WORDS)),
    "one row in all": (lambda x, y, s: nll(x.tanh() - x[0].exp().mean(), y), (6, 3, WORDS)),
    "one row's weights": (
        lambda x, y, s: (x.log_softmax(-1) * x[0].logsumexp(-1)[None, :, None]).sum(),
        (6, 3, WORDS),
    ),
    "joined rows": (
        lambda x, y, s: (torch.cat([r.log_softmax(-1) for r in x]) * s.flatten(0, 1)).sum(),
        (7, 3, WORDS),
    ),
    "an empty part": (lambda x, y, s: nll(x, y) + x[4:].exp().sum(), (4, 3, WORDS)),
    "an image": (lambda x, y, s: F.cross_entropy(images(x), y.view(1, 4, 4)), (1, 16, 4)),
    "a part that nothing reads": (
        lambda x, y, s: nll(x.split([1, 1, 2])[0], y[:1]) + nll(x.split([1, 1, 2])[2], y[2:]),
        (4, 3, WORDS),
    ),
    "rows that nothing reads": (
        lambda x, y, s: nll(x.unbind(0)[1], y[1]) + logps(x.unbind(0)[3], y[3]).sum(),
        (4, 3, WORDS),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_unusual_rows_are_split_right_or_not_at_all(name: str) -> None:
    loss, (sequences, tokens, words) = CASES[name]
    torch.manual_seed(0)
    model = Model(loss, words)
    labels = torch.randint(words, (2, sequences, tokens))
    scores = torch.rand(sequences, tokens, words, dtype=torch.float64)
    batch = labels[0], labels[1], scores
    trace = remat.trace(model, batch)
    costs = remat.Roofline("cpu")
    expected = model(*batch)
    expected.backward()
    for pieces in (2, 3, 16):
        split = trace
        for _ in range(4):
            split = split_largest_operations(split, pieces)
        split = remat.measure(split, costs)
        program = remat.rewrite(split, Schedule.keep_all(split.graph()))
        copied = copy.deepcopy(model)
        copied.zero_grad()
        planned = remat.lower(program, copied)
        result = planned(*batch)
        result.backward()
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
        pairs = zip(planned.parameters(), model.parameters(), strict=True)
        for parameter, reference in pairs:
            torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-9, atol=1e-12)
