"""The law of Python values that change: a warning once for one that changes in each step, and a
change is reported by its name, with the size of a container or an array in place of its items."""

from __future__ import annotations

import copy
import logging
import math
import weakref
from array import array
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.helpers.training.models import WithParts
from torch import nn

import remat

OPTIONS: dict[str, Any] = {
    "costs": remat.Roofline("cpu"),
    "split": "off",
    "strategy": remat.Auto(time_limit=1),
}


class Scaled(nn.Module):
    """A model that reads one attribute, and one argument outside of its blocks."""

    def __init__(self, value: Any = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.value = value
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3))
        )

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        value = self.value if isinstance(self.value, float) else self.value[0]
        return (self.blocks(x) * scale * value).square().mean()


@pytest.mark.slow_cases("blocks")
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_a_value_that_changes_in_each_step_is_reported_once(
    scope: Literal["model", "blocks"], caplog: pytest.LogCaptureFixture
) -> None:
    model = Scaled()
    run = remat.enable(model, "80%", scope=scope, **OPTIONS)
    with caplog.at_level(logging.WARNING, logger="remat"):
        for step in range(6):
            model.zero_grad()
            run(torch.ones(64, 8), 1.0 + step).backward()
    (warning,) = [
        r.message for r in caplog.records if "each new value needs a capture" in r.message
    ]
    assert warning.startswith("the argument args[1] is 4.0 instead of 3.0:")
    assert "pass it as a tensor" in warning


def test_several_arguments_that_change_in_each_step_are_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class ScaledTwice(Scaled):
        def forward(self, x: torch.Tensor, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
            return super().forward(x, scale) + shift

    run = remat.enable(ScaledTwice(), "100%", **OPTIONS)
    with caplog.at_level(logging.WARNING, logger="remat"):
        for step in range(6):
            run(torch.ones(4, 8), 1.0 + step, 2.0 + step).backward()
    (warning,) = [r.message for r in caplog.records if "each new value needs" in r.message]
    assert "the argument args[1] is 5.0 instead of 4.0 and the argument args[2] is 6.0" in warning


@pytest.mark.slow_cases("value3-changed3-value is a numpy.ndarray of shape (3,) with other content")
@pytest.mark.parametrize(
    ("value", "changed", "text"),
    [
        (dict.fromkeys(range(200), 1.0), dict.fromkeys(range(200), 2.0),
         "value is a dict of 200 items with other content"),
        ([1.0], [2.0, 3.0], "value is a list of 2 items instead of a list of 1 item"),
        ((1.0, {1}), (2.0, {1}), "value is a tuple of 2 items with other content"),
        (np.ones(3), np.zeros(3), "value is a numpy.ndarray of shape (3,) with other content"),
        (1.0, 2.0, "value is 2.0 instead of 1.0"),
    ],
)  # fmt: skip
def test_a_changed_value_is_described_briefly(
    value: Any, changed: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Scaled(value)
    run = remat.enable(model, "80%", scope="model", **OPTIONS)
    with caplog.at_level(logging.INFO, logger="remat"):
        for item in (value, changed):
            model.value = item
            model.zero_grad()
            run(torch.ones(64, 8)).backward()
    (report,) = [r.message for r in caplog.records if r.message.startswith("value is ")]
    assert report.startswith(f"{text}:")
    assert len(report) < 300


class Other:
    def __init__(self) -> None:
        self.scale = 1.0


class Meta(type):
    scale = 1.0


class WithMeta(metaclass=Meta):
    pass


def scale_of_function() -> float:
    return scale_of_function.scale  # type: ignore[attr-defined, no-any-return]


scale_of_function.scale = 1.0  # type: ignore[attr-defined]
BOX = {"scale": 1.0}
VIEW = MappingProxyType(BOX)


class Reads(WithParts, linear=(4, 4)):
    """A model that scales its output by what `read` returns for it; `value` is its attribute."""

    def __init__(self, read: Callable[[Any], float], value: Any = None) -> None:
        super().__init__()
        self.read, self.value = read, value
        self.box = {"scale": 1.0}
        self.view = MappingProxyType(self.box)
        self.other = Other()
        self.reference = weakref.ref(self.other)
        self.others = weakref.WeakValueDictionary(a=self.other)
        self.by_tuple = {("a", 1): Other()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().sum() * self.read(self)


def outputs_before_and_after(
    model: Reads, change: Callable[[Any], object]
) -> tuple[list[float], list[float]]:
    """Return the losses of planned steps before and after a change, and eager mode's."""
    eager = copy.deepcopy(model.linear)
    run = remat.enable(model, "100%", scope="model", **OPTIONS)
    x = torch.ones(2, 4)
    planned, expected = [], []
    for action in (None, None, change):
        if action is not None:
            action(model)
        loss = run(x)
        loss.backward()
        planned.append(loss.item())
        expected.append((eager(x).square().sum() * model.read(model)).item())
    return planned, expected


VALUES: dict[str, tuple[Any, Any, Callable[[Any], float]]] = {
    "int and float": (2, 2.0, lambda v: 1.0 + isinstance(v, float)),
    "bool and int": (True, 1, lambda v: 1.0 + (type(v) is int)),
    "zeros": (0.0, -0.0, lambda v: math.copysign(1.0, v)),
    "Decimal": (Decimal(1), Decimal(2), float),
    "Fraction": (Fraction(1), Fraction(2), float),
    "timedelta": (timedelta(seconds=1), timedelta(seconds=2), lambda v: v.total_seconds()),
    "range": (range(1), range(2), len),
    "slice": (slice(1), slice(2), lambda v: float(v.stop)),
    "float32": (np.float32(1), np.float32(2), float),
    "int64": (np.int64(1), np.int64(2), float),
    "bytearray": (bytearray(b"a"), bytearray(b"b"), lambda v: float(v[0])),
    "array": (array("d", [1.0]), array("d", [2.0]), lambda v: v[0]),
    "array of objects": (np.array([1.0, None]), np.array([2.0, None]), lambda v: v[0]),
    "memory format": (
        torch.contiguous_format, torch.channels_last, lambda v: 1.0 + (v is torch.channels_last),
    ),
    "set of tuples": ({(1, 2)}, {(3, 4)}, lambda v: 1.0 + ((3, 4) in v)),
}  # fmt: skip


@pytest.mark.parametrize("place", ["attribute", "list", "dict"])
@pytest.mark.parametrize("name", VALUES)
def test_a_step_computes_with_a_value_of_another_type_or_class(name: str, place: str) -> None:
    """Also if it equals the old one."""
    before, after, scale = VALUES[name]
    if place == "attribute":
        model = Reads(lambda m: scale(m.value), before)
        planned, expected = outputs_before_and_after(model, lambda m: setattr(m, "value", after))
    else:
        key = 0 if place == "list" else "key"
        model = Reads(lambda m: scale(m.value[key]), [before] if place == "list" else {key: before})
        planned, expected = outputs_before_and_after(
            model, lambda m: m.value.__setitem__(key, after)
        )
    assert planned == pytest.approx(expected)
    assert planned[2] != pytest.approx(planned[1])


HIDDEN: dict[str, tuple[Callable[[Any], float], Callable[[Any], object]]] = {
    "vars": (lambda m: vars(m.other)["scale"], lambda m: setattr(m.other, "scale", 2.0)),
    "vars of the model": (lambda m: vars(m)["value"] or 1.0, lambda m: setattr(m, "value", 2.0)),
    "copy": (lambda m: copy.copy(m.other).scale, lambda m: setattr(m.other, "scale", 2.0)),
    "deepcopy": (lambda m: copy.deepcopy(m.other).scale, lambda m: setattr(m.other, "scale", 2.0)),
    "function": (
        lambda m: scale_of_function(), lambda m: setattr(scale_of_function, "scale", 2.0),
    ),
    "global view": (lambda m: VIEW["scale"], lambda m: BOX.update(scale=2.0)),
    "view": (lambda m: m.view["scale"], lambda m: m.box.update(scale=2.0)),
    "metaclass": (lambda m: WithMeta.scale, lambda m: setattr(Meta, "scale", 2.0)),
    "reference": (lambda m: m.reference().scale, lambda m: setattr(m.other, "scale", 2.0)),
    "weak dictionary": (lambda m: m.others["a"].scale, lambda m: setattr(m.other, "scale", 2.0)),
    "key of a tuple": (
        lambda m: m.by_tuple["a", 1].scale, lambda m: setattr(m.by_tuple["a", 1], "scale", 2.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_a_step_computes_with_a_changed_value_at_any_place(name: str) -> None:
    read, change = HIDDEN[name]
    planned, expected = outputs_before_and_after(Reads(read), change)
    assert planned == pytest.approx(expected)
    assert planned[2] == pytest.approx(2 * planned[1])


@pytest.mark.parametrize("value", [math.nan, [math.nan], {1: math.nan}, {(1, 2), ("a", 3)}])
def test_a_value_that_is_set_to_an_equal_one_needs_no_capture(value: Any) -> None:
    model = Reads(lambda m: float(m.value is not None), value)
    run = remat.enable(model, "100%", scope="model", **OPTIONS)
    for _ in range(3):
        model.value = copy.copy(value) if isinstance(value, (list, dict, set)) else float("nan")
        model.zero_grad()
        run(torch.ones(2, 4)).backward()
    assert len(remat.plans(model)) == 1


@pytest.mark.parametrize(("scope", "budget"), [("model", "70%"), ("blocks", "80%")])
def test_a_smaller_step_may_use_the_budget_of_a_larger_one(
    scope: Literal["model", "blocks"], budget: str
) -> None:
    """With frozen blocks, this percentage of the memory without recomputation is infeasible."""
    model = Scaled()
    run = remat.enable(model, budget, scope=scope, **OPTIONS)
    for frozen in (False, True, False):
        model.blocks[:2].requires_grad_(not frozen)
        model.zero_grad()
        run(torch.ones(64, 8)).backward()
    first, second = remat.plans(model)
    assert max(first.peak_bytes, second.peak_bytes) <= first.budget_bytes == second.budget_bytes


class LayerSizes:
    """Returns `size` only while a layer reads it, as Transformers' configurations of models whose
    layers differ."""

    def __init__(self) -> None:
        self.size = 2
        self.is_layer = False

    def __getattribute__(self, name: str) -> Any:
        if name == "size" and not vars(self)["is_layer"]:
            raise RuntimeError("layers have different sizes")
        return super().__getattribute__(name)


class OfLayerSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.sizes = LayerSizes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.is_layer = True
        scaled = self.linear(x) * self.sizes.size
        self.sizes.is_layer = False
        return scaled.sum()


def test_an_attribute_that_refuses_to_be_read_is_guarded() -> None:
    model, x = OfLayerSizes(), torch.randn(2, 3)
    step = remat.optimize(model, "100%", (x,), costs=remat.Roofline("cpu"))
    for size in (2, 3, 2):
        vars(model.sizes)["size"] = size
        torch.testing.assert_close(step(x), model(x))
