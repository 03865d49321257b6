"""Snapshots of the Python values that a forward can change, and warnings about texts."""

from __future__ import annotations

import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.frontend.capture.model.python_state import PythonState

ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "count": itertools.count,
    "count of halves": lambda: itertools.count(2, 0.5),
    "cycle": lambda: itertools.cycle("abc"),
    "cycle of an iterator": lambda: itertools.cycle(iter(["a", "b", "c"])),
    "repeat": lambda: itertools.repeat("a", 9),
    "chain": lambda: itertools.chain("ab", iter("cdefghij")),
    "islice": lambda: itertools.islice(itertools.count(), 1, None, 2),
    "accumulate": lambda: itertools.accumulate(range(1, 20)),
    "product": lambda: itertools.product("abc", repeat=3),
    "list": lambda: iter(list(range(20))),
    "reversed list": lambda: reversed(list(range(20))),
    "dictionary": lambda: iter(dict.fromkeys(range(20))),
    "range": lambda: iter(range(20)),
    "text": lambda: iter("abcdefghijkl"),
    "zip": lambda: zip(itertools.count(), iter(range(20)), strict=False),
    "map": lambda: map(str, itertools.cycle([1, 2, 3])),
    "enumerate": lambda: enumerate(iter(range(20))),
}


class Stepper(nn.Module):
    """Reads two elements of an iterator."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__()
        self.iterator = iterator
        self.items = [iterator]

    def step(self) -> list[Any]:
        return [next(self.iterator), next(self.items[0])]


@pytest.mark.parametrize("start", [0, 2, 4])
@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_is_restored(name: str, start: int) -> None:
    model, reference = Stepper(ITERATORS[name]()), ITERATORS[name]()
    for _ in range(start):
        assert next(model.iterator) == next(reference)
    state = PythonState(model)
    assert not state.changes()
    model.step()
    assert [change.path for change in state.changes()] == [("", "iterator")]
    state.restore()
    assert model.iterator is model.items[0]
    assert model.step() == [next(reference), next(reference)]


def prints() -> None:
    print("a text")


def writes() -> None:
    sys.stderr.write("a text\n")


def logs() -> None:
    logging.getLogger("of the user").warning("a text")


def logs_nothing() -> None:
    logging.getLogger("of the user").debug("a text")


class Talking(nn.Module):
    def __init__(self, talk: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.talk = talk

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.talk()
        return self.linear(x).sum()


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        (prints, "the forward of Talking prints a text at .*in prints"),
        (writes, "the forward of Talking prints a text at .*in writes"),
        (logs, "the forward of Talking logs a text at .*in logs"),
        (logs_nothing, ""),
    ],
)
def test_texts_are_reported_once(
    talk: Callable[[], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    streams = sys.stdout, sys.stderr, logging.Logger.handle
    with caplog.at_level(logging.WARNING, "remat"):
        remat.trace(Talking(talk), torch.randn(2, 4))
        remat.trace(Talking(talk), torch.randn(2, 4))
    texts = [r.getMessage() for r in caplog.records if r.name.startswith("remat")]
    assert len(texts) == bool(words)
    assert not texts or re.search(words, texts[0])
    assert (sys.stdout, sys.stderr, logging.Logger.handle) == streams


class RegistersHooks(nn.Module):
    """Registers a hook in its first call, as models of Transformers with several outputs do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.linear.register_forward_hook(lambda module, args, output: output.mul(2))
            self.is_ready = True
        return self.linear(x).sum()


def test_a_hook_of_the_first_call_stays_registered() -> None:
    model, x = RegistersHooks(), torch.randn(2, 4)
    step = remat.optimize(model, "100%", (x,), costs=remat.Roofline("cpu"))
    with torch.no_grad():
        expected = 2 * (x @ model.linear.weight.t() + model.linear.bias).sum()
    for _ in range(2):
        torch.testing.assert_close(step(x).detach(), expected)
    assert len(model.linear._forward_hooks) == 1
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
