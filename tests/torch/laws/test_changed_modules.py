"""The law of modules that change between two steps: when modules, parameters, buffers or hooks are
replaced, removed, added, renamed, shared or wrapped, the next steps are eager mode's, and one plan
is enough for them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.training.doors import DOORS, planned
from tests.helpers.training.steps import assert_same, step
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import remat


class Scale(nn.Module):
    """Multiplies by a Python number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Shift(Scale):
    """Adds the number instead."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor


def scale_of_class(factor: float) -> nn.Module:
    """Return a module of a new class, whose forward has the number in its closure."""

    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    return Local()


class Scaled(nn.Module):
    """A module around another one."""

    def __init__(self, inner: nn.Module, factor: float = 2.0) -> None:
        super().__init__()
        self.inner = inner
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor


class Adapted(nn.Module):
    """A frozen linear layer with a trainable product of two matrices, as in LoRA."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.full((2, 8), 0.1))
        self.b = nn.Parameter(torch.full((8, 2), 0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x @ self.a.t() @ self.b.t()


class Named(nn.Module):
    """Computes with its submodules, parameters and buffers by their names, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.modules_by_name = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Tanh()})
        self.tensors = nn.ParameterDict(
            {"a": nn.Parameter(torch.ones(8)), "b": nn.Parameter(torch.full((8,), 1.1))}
        )
        self.register_buffer("c", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("d", torch.linspace(0.1, 0.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, module in self.modules_by_name.items():
            x = module(x) * ord(name) / 96
        for name, parameter in self.tensors.items():
            x = x * parameter * ord(name) / 96
        for name, buffer in self._buffers.items():
            if buffer is not None:
                x = x * buffer + ord(name) / 96
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = Scale(1.0)
        self.act = nn.Tanh()
        self.named = Named()
        self.last: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.named(self.act(self.scale(self.linear(x))))
        return x + (y if self.last is None else self.last(y))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)).square().mean()


def new_linear() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(8, 8)


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Double the output: a forward hook."""
    return output * 2


def rename(table: dict[str, Any], *names: str) -> None:
    """Give the items of a table new names, in their order."""
    items = list(zip(names, table.values(), strict=True))
    table.clear()
    table.update(items)


def swap_blocks(model: Model) -> None:
    model.blocks[0].scale.factor = 3.0
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def move_scale(model: Model) -> None:
    moved = model.blocks[1].scale
    moved.factor = 3.0
    model.blocks[1].scale = nn.Identity()
    model.blocks[2].last = moved


def adapt_all(model: Model) -> None:
    for block in model.blocks:
        block.linear = Adapted(block.linear)


def turn_into_buffer(linear: nn.Linear) -> None:
    weight = linear.weight.detach()
    del linear.weight
    linear.register_buffer("weight", weight)


def replace_tables(linear: nn.Linear) -> None:
    linear._parameters = {n: nn.Parameter(p.detach() * 2) for n, p in linear._parameters.items()}


Change = Callable[[Model], object]


def nothing(model: Model) -> None:
    """A change that is none."""


PARAMETRIZATIONS = "blocks.1.linear.parametrizations.weight"

CHANGES: dict[str, tuple[Change, Change] | Change] = {
    # Modules
    "scale": lambda m: setattr(m.blocks[1], "scale", Scale(5.0)),
    "equal scale": lambda m: setattr(m.blocks[1], "scale", Scale(1.0)),
    "activation": lambda m: setattr(m.blocks[1], "act", nn.ReLU()),
    "linear": lambda m: setattr(m.blocks[1], "linear", new_linear()),
    "identity": lambda m: setattr(m.blocks[1], "linear", nn.Identity()),
    "copied block": lambda m: m.blocks.__setitem__(1, copy.deepcopy(m.blocks[1])),
    "swapped blocks": swap_blocks,
    "removed block": lambda m: m.blocks.__delitem__(1),
    "added block": lambda m: m.blocks.append(copy.deepcopy(m.blocks[1])),
    "added module": lambda m: setattr(m.blocks[1], "last", Scale(3.0)),
    "removed module": (
        lambda m: setattr(m.blocks[1], "last", Scale(3.0)),
        lambda m: setattr(m.blocks[1], "last", None),
    ),
    "moved module": move_scale,
    "other class": lambda m: setattr(m.blocks[1].scale, "__class__", Shift),
    "other class of the same name": (
        lambda m: setattr(m.blocks[1], "scale", scale_of_class(2.0)),
        lambda m: setattr(m.blocks[1], "scale", scale_of_class(4.0)),
    ),
    "renamed module": lambda m: rename(m.blocks[1].named.modules_by_name._modules, "a", "c"),
    "swapped names": lambda m: rename(m.blocks[1].named.modules_by_name._modules, "b", "a"),
    # Wrapped modules
    "wrapped linear": lambda m: setattr(m.blocks[1], "linear", Scaled(m.blocks[1].linear)),
    "wrapped block": lambda m: m.blocks.__setitem__(1, Scaled(m.blocks[1])),
    "adapters": adapt_all,
    "merged adapter": (
        lambda m: setattr(m.blocks[1], "linear", Adapted(m.blocks[1].linear)),
        lambda m: setattr(m.blocks[1], "linear", m.blocks[1].linear.inner),
    ),
    "weight norm": lambda m: parametrizations.weight_norm(m.blocks[1].linear),
    "removed weight norm": (
        lambda m: parametrizations.weight_norm(m.blocks[1].linear),
        lambda m: parametrize.remove_parametrizations(m.blocks[1].linear, "weight"),
    ),
    "other parametrization": (
        lambda m: parametrize.register_parametrization(m.blocks[1].linear, "weight", Scale(2.0)),
        lambda m: m.get_submodule(PARAMETRIZATIONS).register_module("0", Scale(3.0)),
    ),
    "parametrized bias": lambda m: parametrize.register_parametrization(
        m.blocks[1].linear, "bias", Scale(2.0)
    ),
    "pruned": lambda m: prune.l1_unstructured(m.blocks[1].linear, "weight", 0.5),
    "pruned more": (
        lambda m: prune.l1_unstructured(m.blocks[1].linear, "weight", 0.25),
        lambda m: prune.l1_unstructured(m.blocks[1].linear, "weight", 0.5),
    ),
    "pruned for good": (
        lambda m: prune.l1_unstructured(m.blocks[1].linear, "weight", 0.5),
        lambda m: prune.remove(m.blocks[1].linear, "weight"),
    ),
    # Shared modules and parameters
    "shared block": lambda m: m.blocks.append(m.blocks[0]),
    "shared linear": lambda m: setattr(m.blocks[1], "linear", m.blocks[0].linear),
    "no longer shared linear": (
        lambda m: setattr(m.blocks[1], "linear", m.blocks[0].linear),
        lambda m: setattr(m.blocks[1], "linear", new_linear()),
    ),
    "tied": lambda m: setattr(m.blocks[1].linear, "weight", m.blocks[0].linear.weight),
    "untied": (
        lambda m: setattr(m.blocks[1].linear, "weight", m.blocks[0].linear.weight),
        lambda m: setattr(m.blocks[1].linear, "weight", new_linear().weight),
    ),
    # Parameters
    "parameter": lambda m: setattr(m.blocks[1].linear, "weight", new_linear().weight),
    "removed parameter": lambda m: setattr(m.blocks[1].linear, "bias", None),
    "frozen": lambda m: m.blocks[1].linear.requires_grad_(False),
    "parameter into buffer": lambda m: turn_into_buffer(m.blocks[1].linear),
    "renamed parameter": lambda m: rename(m.blocks[1].named.tensors._parameters, "b", "a"),
    "table of parameters": lambda m: replace_tables(m.blocks[1].linear),
    # Buffers
    "buffer": lambda m: setattr(m.blocks[1].named, "c", torch.full((8,), 0.3)),
    "removed buffer": lambda m: setattr(m.blocks[1].named, "c", None),
    "added buffer": lambda m: m.blocks[1].named.register_buffer("e", torch.full((8,), 0.3)),
    "renamed buffer": lambda m: rename(m.blocks[1].named._buffers, "c", "e"),
    "order of buffers": lambda m: m.blocks[1].named._buffers.update(
        c=m.blocks[1].named._buffers.pop("c")
    ),
    "table of buffers": lambda m: setattr(
        m.blocks[1].named, "_buffers", {"c": torch.full((8,), 0.3), "d": None}
    ),
    "shared buffer": lambda m: setattr(m.blocks[1].named, "c", m.blocks[0].named.c),
    "no longer shared buffer": (
        lambda m: setattr(m.blocks[1].named, "c", m.blocks[1].named.d),
        lambda m: setattr(m.blocks[1].named, "c", torch.full((8,), 0.3)),
    ),
    # Hooks and methods
    "hook": lambda m: m.blocks[1].act.register_forward_hook(doubled),
    "backward hook": lambda m: m.blocks[1].act.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 2,)
    ),
    "removed hook": (
        lambda m: m.blocks[1].act.register_forward_hook(doubled),
        lambda m: m.blocks[1].act._forward_hooks.clear(),
    ),
    "table of hooks": (
        lambda m: m.blocks[1].act.register_forward_hook(doubled),
        lambda m: setattr(m.blocks[1].act, "_forward_hooks", OrderedDict()),
    ),
    "method": lambda m: setattr(m.blocks[1].scale, "forward", lambda x: x * 7),
}  # fmt: skip

QUICK = frozenset(
    {
        *(("optimize", name) for name in ("scale", "shared block", "other class", "pruned more")),
        *(("optimize", name) for name in ("order of buffers", "no longer shared buffer")),
        *(("optimize", name) for name in ("renamed module", "table of hooks")),
        ("optimize", "table of parameters"), ("optimize", "other parametrization"),
        ("model", "scale"),
    }
)  # fmt: skip


def change_of(name: str) -> tuple[Change, Change]:
    """Return what precedes the first step, and what is between the second and the third."""
    change = CHANGES[name]
    return change if isinstance(change, tuple) else (nothing, change)


def assert_planned_once(run: nn.Module) -> None:
    """Check that at most two plans exist: one for before the change, one for after it."""
    forward: Any = run.forward
    provider = run._provider if isinstance(run, remat.RematModule) else forward.planner
    assert provider._entry_count <= 2, "each step is planned once more"


@pytest.mark.parametrize(
    ("door", "name"),
    [
        pytest.param(door, name, marks=() if (door, name) in QUICK else pytest.mark.slow)
        for door in DOORS
        for name in CHANGES
    ],
)
def test_the_next_steps_are_those_of_the_changed_model(door: str, name: str) -> None:
    prepare, change = change_of(name)
    eager, model = Model(), Model()
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    prepare(eager)
    prepare(model)
    run = planned(model, door)
    for number in range(5):
        if number == 2:
            change(eager)
            change(model)
        assert_same(step(model, x, run=run), step(eager, x), 1e-5)
    assert_planned_once(run)


@pytest.mark.parametrize("door", ["optimize"])
def test_a_hook_of_all_modules_is_planned(door: str) -> None:
    eager, model = Model(), Model()
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    run = planned(model, door)
    assert_same(step(model, x, run=run), step(eager, x))
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 2 if isinstance(module, nn.Tanh) else None
    )
    try:
        assert_same(step(model, x, run=run), step(eager, x), 1e-5)
    finally:
        handle.remove()
    assert_same(step(model, x, run=run), step(eager, x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["scale", "other class", "renamed module", "shared block", "adapters", "pruned"]
)
def test_compiled_steps_are_those_of_the_changed_model(name: str) -> None:
    prepare, change = change_of(name)
    eager, model = Model(), Model()
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    torch.compiler.reset()
    options = {"budget": "100%", "inductor": False, "time_limit": 2.0}
    run = torch.compile(model, backend="remat", options=options)
    for changed in (prepare, change):
        changed(eager)
        changed(model)
        assert_same(step(model, x, run=run), step(eager, x), 1e-4)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.factor).square().sum()


def lowered(model: nn.Module, x: torch.Tensor) -> nn.Module:
    trace = remat.measure(remat.trace(model, (x,)), remat.Roofline("cpu"))
    return remat.lower(remat.rewrite(trace, remat.solve(trace, "100%").schedule), model)


COSTS = remat.Roofline("cpu")
PLANNED_AT_ONCE: dict[str, Callable[[nn.Module, torch.Tensor], nn.Module]] = {
    "optimize": lambda m, x: remat.optimize(m, "100%", (x,), costs=COSTS),
    "enable": lambda m, x: remat.enable(m, "100%", (x,), costs=COSTS),
    "blocks": lambda m, x: remat.enable(m, "100%", (x,), costs=COSTS, scope="blocks"),
    "lower": lowered,
}


@pytest.mark.parametrize("door", PLANNED_AT_ONCE)
def test_a_change_before_the_first_call_is_seen(door: str) -> None:
    model, x = Small(), torch.randn(2, 4)
    step_of_model = PLANNED_AT_ONCE[door](model, x)
    model.linear = nn.Linear(4, 4)
    model.factor = torch.full((4,), 2.0)
    eager = Small()
    eager.load_state_dict(model.state_dict())
    torch.testing.assert_close(step_of_model(x), eager(x))
