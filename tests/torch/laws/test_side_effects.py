"""The law of side effects: whatever a step reads or changes besides its outputs is after every step
what it is in eager mode, or a clear error says why not.

A table of effects, doors and moments. Each test runs one effect through one door, and compares
losses, gradients (None, too), buffers, arguments, generators and the effect's own state with eager
mode after each moment: the first step, the second, one with another batch size, one that
accumulates, one that fails in the middle, and one after that.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.training.compiled_steps import EAGER
from tests.helpers.training.doors import DOORS as DOORS_IN_EAGER_MODE
from tests.helpers.training.doors import planned
from tests.helpers.training.side_effects import EFFECTS, WIDTH, Effect, reset_globals
from torch import nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

import remat

MOMENTS = ("first", "second", "other size", "accumulation", "failure", "after a failure")


def by(door: str, budget: str = "100%") -> Callable[[nn.Module], Callable[..., Any]]:
    return lambda model: planned(model, door, budget, differentiate="all")


def after_a_failed_capture(model: nn.Module) -> Callable[..., Any]:
    model.branches_on_data = True  # type: ignore[assignment]
    return by("auto")(model)


def by_compile(model: nn.Module) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = {"budget": "min", "inductor": False, "time_limit": 2.0}
    return torch.compile(model, backend="remat", options=options)


DOORS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    **{door: by(door) for door in DOORS_IN_EAGER_MODE},
    "recomputed blocks": by("blocks", "min"),
    "failed capture": after_a_failed_capture,
    "compile": by_compile,
}

WHOLE_MODELS = ("optimize", "model")
"""Doors that plan a whole model or refuse it."""

QUICK = {
    ("nothing", "optimize"),
    ("counter", "model"),
    ("statistics", "blocks"),
    ("retained inside", "blocks"),
    ("hooks", "model"),
    ("changed weight", "blocks"),
    ("stored loss", "model"),
    ("own generator", "model"),
}
"""Cells that differ in kind: state of a module, of tensors, of Python and of generators; values
that change between steps; a refusal; and each door that needs no compiler."""

FAILS_IN_TORCH = {("a generator of Python in an attribute", "compile")}
"""Cells in which torch.compile fails without remat, too (backend "aot_eager", torch 2.13: after
another batch size the drawn number is traced as a float64 tensor)."""

CELLS = [
    pytest.param(effect, door, marks=[] if (effect, door) in QUICK else [pytest.mark.slow])
    for effect in EFFECTS
    for door in DOORS
    if (effect, door) not in FAILS_IN_TORCH
]


def test_the_table_has_enough_cells() -> None:
    assert {(effect, door) for effect in EFFECTS for door in DOORS} > QUICK
    assert len(EFFECTS) >= 25
    assert len(CELLS) * len(MOMENTS) >= 300


def rows_of(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(12 if number == 2 else 8, WIDTH, generator=generator)


class Loop:
    """A training loop over one model; `run` is what it calls."""

    def __init__(self, effect: Effect, wrap: Callable[[Any], Callable[..., Any]]) -> None:
        reset_globals(nn.Module())
        self.effect = effect
        self.model = effect.make()
        self.run = wrap(self.model)
        self.versions = {name: p._version for name, p in self.model.named_parameters()}

    def moments(self) -> Iterator[tuple[str, Any]]:
        """Yield the name of each moment, with all that can be observed after it."""
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        for number, moment in enumerate(MOMENTS):
            self.effect.change(self.model, number)
            if moment != "accumulation":
                self.model.zero_grad(set_to_none=True)
            observed = self._failure() if moment == "failure" else self._step(rows_of(number))
            yield moment, (observed, self._state())

    def _step(self, x: torch.Tensor) -> Any:
        x.requires_grad_()
        args = self.effect.inputs(x)
        loss = self.effect.loss(self.run(*args), self.model, args)
        loss.backward()
        return loss, x.grad, self.effect.observe(args)

    def _failure(self) -> Any:
        """Call the model with a batch that does not fit; return how that failed. An exception that
        the model's code raises has to arrive; remat may replace one of torch."""
        try:
            self._step(torch.randn(4, WIDTH + 1, generator=torch.Generator().manual_seed(0)))
        except Exception as error:
            is_of_torch = isinstance(error, (RuntimeError, remat.RematError))
            return is_of_torch or type(error).__name__
        return None

    def _state(self) -> Any:
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        versions = {name: p._version for name, p in self.model.named_parameters()}
        written = {name for name, version in versions.items() if self.versions[name] != version}
        self.versions = versions
        generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        state = self.effect.state(self.model)
        return copy.deepcopy(
            (gradients, sorted(written), dict(self.model.named_buffers()), generators, state)
        )


@pytest.mark.parametrize(("effect", "door"), CELLS)
def test_side_effects_are_those_of_eager_mode(effect: str, door: str) -> None:
    kind = EFFECTS[effect]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "Dynamo does not know how to trace", UserWarning)
        # Dynamo reads `grad` of the tensors that a graph gets.
        warnings.filterwarnings(
            "ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning
        )
        expected = [copy_of(observed) for observed in eager_moments(kind, door).moments()]
        loop = Loop(kind, DOORS[door])
        if kind.refused and door in WHOLE_MODELS:
            assert_refused(loop, kind, kind.refused)
            return
        for (moment, now), (_, before) in zip(loop.moments(), expected, strict=True):
            assert_equal(now, before, f"{effect}, {door}, {moment}")


def eager_moments(kind: Effect, door: str) -> Loop:
    """Return the loop without remat; that of a compiled model is compiled without Inductor."""

    def unchanged(model: Any) -> Callable[..., Any]:
        if door == "compile":
            torch._dynamo.reset()
            return torch.compile(model, backend=EAGER)
        model.branches_on_data = door == "failed capture"
        return model

    return Loop(kind, unchanged)


def assert_refused(loop: Loop, kind: Effect, words: str) -> None:
    """Check the error of the first step, and that it leaves nothing behind."""
    reset_globals(nn.Module())
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    state = loop._state()
    with pytest.raises(remat.RematError, match=words):
        loop._step(rows_of(0))
    assert_equal(loop._state(), state, "after the error")


def copy_of(observed: Any) -> Any:
    leaves, spec = tree_flatten(observed)
    copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return spec.unflatten(copies)


def assert_equal(now: Any, before: Any, where: str) -> None:
    leaves, spec = tree_flatten(now)
    leaves_before, spec_before = tree_flatten(before)
    assert spec == spec_before, where
    paths = [keystr(path) for path, _ in tree_flatten_with_path(now)[0]]
    for path, leaf, leaf_before in zip(paths, leaves, leaves_before, strict=True):
        if isinstance(leaf, torch.Tensor):
            assert isinstance(leaf_before, torch.Tensor), f"{where}: {path}"
            torch.testing.assert_close(
                leaf, leaf_before, rtol=1e-5, atol=1e-6, msg=f"{where}: {path}"
            )
        else:
            assert leaf == leaf_before, f"{where}: {path}"
