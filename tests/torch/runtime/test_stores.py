"""The places that a program, of a service say, may store values in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.documents.program import Program
from remat.documents.records import Store
from remat.documents.structure import Structure
from remat.errors import DocumentError
from remat.frontend.runtime.stores import StoreWriter

X = torch.ones(2, 3)


class Net(nn.Module):
    """A model that stores its hidden state in attributes and in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3))
        self.state: dict[str, Any] = {"hidden": None}
        self.history: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x) * self.mask
        self.state["hidden"] = hidden
        self.last = hidden
        self.history[:] = [hidden]
        return hidden.sum()


@pytest.fixture(scope="module")
def program() -> Program:
    planned = remat.optimize(Net(), "100%", X, costs=remat.Roofline("cpu"), split="off")
    assert planned.program is not None
    return planned.program


def with_store(program: Program, store: Mapping[str, Any]) -> Program:
    value = Structure(kind="leaf", leaf=0)
    return program.model_copy(update={"stores": (Store(value=value, **store),)})


def test_values_that_the_model_stores_may_be_stored(program: Program) -> None:
    assert len(program.stores) >= 3
    StoreWriter(program, Net())


@pytest.mark.parametrize("is_content", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        ("", "_parameters"), ("layer", "_parameters"), ("layer", "_parameters", "weight"),
        ("", "layer", "_parameters", "weight"), ("", "_buffers", "mask"),
        ("", "_modules", "layer"), ("", "_forward_hooks"), ("", "_forward_hooks", 0),
        ("", "layer"), ("", "layer", "weight"), ("", "mask"),
    ],
)  # fmt: skip
def test_parameters_buffers_modules_and_hooks_must_not_be_stored(
    program: Program, place: tuple[str | int, ...], is_content: bool
) -> None:
    forged = with_store(program, {"kind": "attribute", "place": place, "is_content": is_content})
    with pytest.raises(DocumentError, match="a program must not set"):
        StoreWriter(forged, Net())


@pytest.mark.parametrize("place", [("", "forward"), ("layer", "forward"), ("", "layer", "forward")])
def test_methods_must_not_be_stored(program: Program, place: tuple[str, ...]) -> None:
    forged = with_store(program, {"kind": "attribute", "place": place})
    with pytest.raises(DocumentError, match="a program must not set"):
        StoreWriter(forged, Net())


def test_modules_in_arguments_are_not_changed(program: Program) -> None:
    place = (0, 0, "model", "_parameters", "weight")
    with pytest.raises(DocumentError, match="a program must not set"):
        StoreWriter(with_store(program, {"kind": "argument", "place": place}), Net())
