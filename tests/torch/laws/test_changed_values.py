"""The law of changed values: where a training loop changes a value between two steps that the
model's forward or backward reads, the next step computes with the new value, as in eager mode."""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.training import changed_values
from tests.helpers.training.doors import DOORS, planned
from tests.helpers.training.steps import Step, assert_same, step
from torch import nn


@dataclass
class Config:
    scale: float = 1.0
    nested: dict[str, list[float]] = field(default_factory=lambda: {"scales": [1.0, 1.0]})


class Schedule:
    """An object with slots, whose method reads them."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0.0

    def scale(self) -> float:
        return 1.0 + self.step


class Settings:
    """An object that finds its attributes by code of its own."""

    def __init__(self) -> None:
        self._content: dict[str, float] = {"scale": 1.0}

    def __getattr__(self, name: str) -> float:
        try:
            return vars(self)["_content"][name]
        except KeyError:
            raise AttributeError(name) from None


class ScaledGradient(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ScaledGradient.factor


CONFIG, SCHEDULE, SETTINGS = Config(), Schedule(), Settings()
SCALES: dict[str, Any] = {"loss": {"scale": 1.0}}
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
VARIABLE = "REMAT_TEST_SCALE"


class Model(nn.Module):
    """Three layers; `scale` is applied to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.array = np.ones(2)
        self.act: Callable[[torch.Tensor], torch.Tensor] = functools.partial(torch.mul, other=1.0)
        self.long = [1.0] * 5000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.layers(x)).square().mean()

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OfConfig(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * CONFIG.scale


class OfNestedConfig(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * CONFIG.nested["scales"][1]


class OfNestedDict(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCALES["loss"]["scale"]


class OfMethod(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCHEDULE.scale()


class OfSettings(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * SETTINGS.scale


class OfOtherModule(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * changed_values.SCALE


class OfOtherFunction(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return changed_values.scaled(x)


class OfOtherClass(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return changed_values.Scale()(x)


class OfOptimizer(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * OPTIMIZER.param_groups[0]["lr"]


class OfEnvironment(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(os.environ.get(VARIABLE, "1"))


class OfContext(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * CONTEXT.get()


class OfArray(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self.array[1])


class OfPartial(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


class OfLongList(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.long[4000]


class OfDefault(Model):
    def scale(self, x: torch.Tensor, scales: list[float] = [1.0]) -> torch.Tensor:  # noqa: B006
        return x * scales[0]


class OfPatchedMethod(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OfPatchedInstance(Model):
    pass


class OfPatchedLayer(Model):
    pass


class OfBackward(Model):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return ScaledGradient.apply(x)


def patch(scale: float) -> None:
    OfPatchedMethod.scale = lambda self, x: x * scale


def patch_layer(layer: nn.Module, scale: float) -> None:
    """Replace the layer's forward, as quantizers and adapters do."""
    forward = type(layer).forward
    layer.forward = lambda x: forward(layer, x) * scale


Change = Callable[[Any, float], object]
CASES: dict[type[Model], Change] = {
    OfConfig: lambda model, scale: setattr(CONFIG, "scale", scale),
    OfNestedConfig: lambda model, scale: CONFIG.nested["scales"].__setitem__(1, scale),
    OfNestedDict: lambda model, scale: SCALES["loss"].update(scale=scale),
    OfMethod: lambda model, scale: setattr(SCHEDULE, "step", scale - 1.0),
    OfSettings: lambda model, scale: SETTINGS._content.update(scale=scale),
    OfOtherModule: lambda model, scale: setattr(changed_values, "SCALE", scale),
    OfOtherFunction: lambda model, scale: setattr(changed_values, "SCALE", scale),
    OfOtherClass: lambda model, scale: setattr(changed_values.Scale, "factor", scale),
    OfOptimizer: lambda model, scale: OPTIMIZER.param_groups[0].update(lr=scale),
    OfEnvironment: lambda model, scale: os.environ.update({VARIABLE: str(scale)}),
    OfContext: lambda model, scale: CONTEXT.set(scale),
    OfArray: lambda model, scale: model.array.__setitem__(1, scale),
    OfPartial: lambda model, scale: setattr(
        model, "act", functools.partial(torch.mul, other=scale)
    ),
    OfLongList: lambda model, scale: model.long.__setitem__(4000, scale),
    OfDefault: lambda model, scale: OfDefault.scale.__defaults__[0].__setitem__(0, scale),  # type: ignore[index]
    OfPatchedMethod: lambda model, scale: patch(scale),
    OfPatchedInstance: lambda model, scale: setattr(model, "scale", lambda x: x * scale),
    OfPatchedLayer: lambda model, scale: patch_layer(model.layers[0], scale),
    OfBackward: lambda model, scale: setattr(ScaledGradient, "factor", scale),
}
QUICK = ("optimize", OfConfig), ("optimize", OfOtherFunction), ("model", OfBackward)


def steps_of(kind: type[Model], door: str = "") -> list[Step]:
    """Return steps with the scales 1, 3, 1 and 2, of a planned model, or else in eager mode."""
    torch.manual_seed(0)
    model = kind()
    run = planned(model, door) if door else model
    steps: list[Step] = []
    for scale in (1.0, 3.0, 1.0, 2.0):
        CASES[kind](model, scale)
        steps.append(step(model, torch.ones(4, 8), run=run))
    CASES[kind](model, 1.0)
    return steps


@pytest.mark.filterwarnings("ignore:.*captured again")
@pytest.mark.parametrize(
    ("door", "kind"),
    [
        pytest.param(door, kind, marks=() if (door, kind) in QUICK else pytest.mark.slow)
        for door in DOORS
        for kind in CASES
    ],
)
def test_the_next_step_computes_with_the_new_value(door: str, kind: type[Model]) -> None:
    expected = steps_of(kind)
    for actual, eager in zip(steps_of(kind, door), expected, strict=True):
        assert_same(actual, eager, 1e-5)
    gradients = [eager.gradients["layers.0.weight"] for eager in expected]
    assert not torch.equal(*gradients[:2])  # the value matters
