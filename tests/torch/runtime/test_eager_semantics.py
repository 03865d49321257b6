"""Plain PyTorch that a plan must run as eager mode does: replaced modules, buffers and hooks,
tied weights, random numbers of Python, arguments and outputs of any kind."""

from __future__ import annotations

import copy
import functools
import random
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.models import WithParts
from tests.helpers.training.steps import assert_same_gradients, assert_same_steps
from torch import nn
from torch.nn.utils import prune

import remat
from remat.documents.structure import Structure
from remat.errors import TraceError

COSTS = remat.Roofline("cpu")


def optimized(model: nn.Module) -> Any:
    return remat.optimize(model, "100%", costs=COSTS)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Flatten(0))


class Summed(nn.Module):
    inside: nn.Sequential

    def __init__(self, inside: nn.Sequential) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any) -> torch.Tensor:
        return self.inside(*args).square().sum()


def doubled(module: nn.Module, args: Any, out: Any) -> Any:
    return out * 2


def exchanged(model: Summed) -> None:
    model.inside[2] = nn.Linear(8, 8)


def submodules_exchanged(model: Summed) -> None:
    model.inside[0], model.inside[2] = model.inside[2], model.inside[0]


def pruned(model: Summed) -> None:
    prune.l1_unstructured(model.inside[0], "weight", 0.5)


def hooked(model: Summed) -> None:
    model.inside[0].register_forward_hook(doubled)


@pytest.mark.parametrize("change", [exchanged, submodules_exchanged, pruned, hooked])
@pytest.mark.parametrize("options", [remat.optimize, remat.enable])
def test_modules_replaced_after_planning_are_used(
    options: Any, change: Callable[[Summed], None]
) -> None:
    model, x = Summed(layers()), torch.randn(4, 8)
    other = copy.deepcopy(model)
    run = options(model, "100%", costs=COSTS)
    run(x).backward()
    for module in (model, other):
        torch.manual_seed(1)
        change(module)
    assert_same_steps(run, other, x)


def test_a_removed_hook_no_longer_runs() -> None:
    model, x = Summed(layers()), torch.randn(4, 8)
    handle = model.inside[0].register_forward_hook(doubled)
    run = optimized(model)
    run(x).backward()
    handle.remove()
    assert_same_steps(run, copy.deepcopy(model), x)


def test_weights_tied_differently_are_replanned() -> None:
    torch.manual_seed(0)
    parts = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    parts[1].weight = parts[0].weight
    model, x = Summed(parts), torch.randn(4, 8)
    run = optimized(model)
    run(x).backward()
    parts[1].weight = parts[2].weight
    assert_same_steps(run, copy.deepcopy(model), x)


def test_a_buffer_of_another_shape_triggers_a_replan() -> None:
    class Banked(nn.Module):
        bank: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.randn(8))
            self.register_buffer("bank", torch.randn(1, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.p + x.mean(0) - self.bank).pow(2).mean()

    model, x = Banked(), torch.randn(4, 8)
    run = optimized(model)
    run(x).backward()
    model.bank = torch.randn(16, 8)
    assert_same_steps(run, copy.deepcopy(model), x)


class Tied(nn.Module):
    """A tied weight with another use, so that its gradient has two parts."""

    def __init__(self, added: str) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(6, 6, bias=False) for _ in range(2))
        self.b.weight = self.a.weight
        self.added = added
        self.whole = nn.Parameter(torch.randn(6, 6))
        self.left, self.right = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        added = {
            "whole": self.whole, "product": self.left @ self.right, "itself": self.b.weight.t(),
        }[self.added]  # fmt: skip
        other = (self.b.weight * y).sum()
        return other + ((self.a.weight + added) * x).sum()


@pytest.mark.parametrize("added", ["whole", "product", "itself"])
def test_gradients_of_weights_shared_with_other_modules_are_complete(added: str) -> None:
    torch.manual_seed(0)
    model = Tied(added)
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    assert_same_steps(optimized(model), copy.deepcopy(model), x, y, tolerance=1e-6)


def test_buffers_may_be_assigned_to_each_other() -> None:
    class Delayed(nn.Module):
        now: torch.Tensor
        before: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("now", torch.zeros(4))
            self.register_buffer("before", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            loss = (h - self.before).square().mean()
            self.before = self.now
            self.now = h.detach().mean(0)
            return loss

    model = Delayed()
    other, run = copy.deepcopy(model), optimized(model)
    for _ in range(3):
        assert_same_steps(run, other, torch.ones(3, 4))


@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_that_are_written_to_are_no_constants(inplace: bool) -> None:
    class Branching(WithParts, layer=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = torch.zeros(4, dtype=torch.bool)
            if inplace:
                number = torch.full((4,), -1.0)
                F.relu(number.add_(x[0]), inplace=True)
                seen = number > 0
            else:
                seen |= x[0] > 0
            h = self.layer(x)
            return (h if seen.any() else -h).sum()

    with pytest.raises(TraceError):
        optimized(Branching())(torch.full((2, 4), 3.0))


@pytest.mark.parametrize("random_number", [random.random, np.random.rand])
def test_random_numbers_of_python_are_no_constants_of_a_plan(
    random_number: Callable[[], float],
) -> None:
    class Skipping(WithParts, a=(4, 4), b=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            return (self.b(h) if random_number() < 0.5 else h).square().sum()

    random.seed(0)
    np.random.seed(0)
    before = random.getstate()
    x = torch.randn(2, 4)
    with pytest.raises(TraceError, match=r"draws .* random numbers"):
        optimized(Skipping())(x)
    assert random.getstate() == before
    run = remat.enable(Skipping(), "100%", costs=COSTS)  # its layers, one by one
    assert len({round(run(x).item(), 4) for _ in range(20)}) == 2


def test_seeding_inside_of_a_forward_is_followed() -> None:
    class Seeding(WithParts, layer=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(3)
            return (self.layer(x) * torch.rand(4)).sum()

    original_functions = torch.manual_seed, torch.random.manual_seed
    with pytest.raises(TraceError, match=r"calls torch\.manual_seed"):
        optimized(Seeding())(torch.randn(2, 4))
    assert (torch.manual_seed, torch.random.manual_seed) == original_functions


class Indexing(WithParts, layer=(8, 8)):
    def forward(self, x: torch.Tensor, index: Any) -> torch.Tensor:
        output = self.layer(x)
        return output[index].sum() if not isinstance(index, float) else output.sum() * index


def test_equal_python_values_of_different_types_are_distinguished() -> None:
    model, x = Indexing(), torch.randn(4, 8)
    run = optimized(model)
    for index in (1, True, 1.0, 0, False, 1):
        assert_same_steps(run, copy.deepcopy(model), x, index)
    assert_same_steps(run, copy.deepcopy(model), x, np.float64(0.5))


def test_different_structures_of_inputs_are_distinguished() -> None:
    for value in (None, 1):
        assert Structure(kind="value", value=value) != value
    assert Structure(kind="value", value=1) != Structure(kind="value", value=True)
    assert Structure(kind="value", value=1) == Structure(kind="value", value=1)


def test_inputs_of_another_layout_are_replanned() -> None:
    class Reshaping(WithParts, layer=(8, 8)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.reshape(-1, 8)).square().sum()

    model = Reshaping()
    other, run = copy.deepcopy(model), optimized(model)
    assert_same_steps(run, other, torch.randn(4, 3, 16)[..., :8])
    assert_same_steps(run, other, torch.randn(3, 4, 8).transpose(0, 1))


def test_outputs_may_be_modified_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))  # of 3-D: a view
    other, run, x = copy.deepcopy(model), optimized(model), torch.randn(2, 4, 8)

    assert_same_steps(run, other, x, loss=lambda h: h.add_(1.0).square().sum())


class Attention(WithParts, layer=(8, 24)):
    """Returns what the kernel of attention does: on the CPU a transposed view, which its backward
    reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.layer(x).view(2, 4, 2, 12).transpose(1, 2)
        return F.scaled_dot_product_attention(*heads.chunk(3, dim=-1))


def test_a_view_that_a_kernel_returns_may_be_modified_in_place() -> None:
    """As in eager mode, the backward is an error then."""
    model = Attention()
    other, run, x = copy.deepcopy(model), optimized(model), torch.randn(2, 4, 8)
    output = run(x).add_(1.0)
    assert output.equal(other(x).add_(1.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@dataclass
class Returned:
    loss: torch.Tensor
    extra: torch.Tensor | None


@dataclass
class Scale:
    by: float | None = 2.0


class Returning(WithParts, layer=(4, 4)):
    def forward(self, x: torch.Tensor, kind: str, scale: Scale) -> Any:
        loss = self.layer(x).sum() * (1.0 if scale.by is None else scale.by)
        if kind == "dataclass":
            return Returned(loss, None)
        collected: dict[str, torch.Tensor] = defaultdict(list)  # type: ignore[arg-type]
        collected["loss"] = loss
        return collected


def test_dataclasses_and_default_dictionaries_are_passed_through() -> None:
    model, x = Returning(), torch.randn(2, 4)
    run = optimized(model)
    for scale in (Scale(None), Scale()):
        assert run(x, "dataclass", scale).loss.equal(model(x, "dataclass", scale).loss)
    assert run(x, "dict", Scale())["loss"].equal(model(x, "dict", Scale())["loss"])


def test_many_inputs_and_the_smallest_integer_are_supported() -> None:
    class Unbinding(WithParts, rows=lambda: nn.Embedding(9, 4)):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            lowest = torch.iinfo(ids.dtype).min
            top = ids.masked_fill(ids < 3, lowest).unbind(1)[-1].clamp(0)
            return self.rows(top).sum()

    model = Unbinding()
    ids = torch.randint(0, 9, (2, 1100))
    assert_same_steps(optimized(model), copy.deepcopy(model), ids)


def test_a_module_with_its_own_plan_is_not_replanned() -> None:
    inner = remat.optimize(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), "min", costs=COSTS)
    for wrap in (remat.enable, remat.optimize):
        with pytest.raises(TraceError, match="0 inside of this Sequential is optimised by remat"):
            wrap(nn.Sequential(inner, nn.Linear(4, 1)), "100%", costs=COSTS)


def test_evaluation_takes_any_argument() -> None:
    class Caching(WithParts, layer=(4, 4)):
        def forward(self, x: torch.Tensor, cache: object = None) -> torch.Tensor:
            return self.layer(x)

    model = remat.enable(Caching(), "100%", costs=COSTS).eval()
    assert model(torch.randn(2, 4), cache=object()).shape == (2, 4)


def target_without_gradient(model: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model.inside(h.detach()), h.detach().flatten())


def unused_argument(model: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return model.inside(torch.ones_like(h)).square().mean()


def refilled_dict(model: nn.Module, h: torch.Tensor, values: dict[str, Any]) -> torch.Tensor:
    values["hidden"] = model.inside(h.detach())
    return values["hidden"].square().mean()


@pytest.mark.parametrize("scope", ["model", "blocks"])
@pytest.mark.parametrize("forward", [target_without_gradient, unused_argument, refilled_dict])
def test_a_step_depends_on_no_graph_whose_gradients_it_does_not_compute(
    forward: Any, scope: str
) -> None:
    """An input that the forward only reads detached: its graph may be freed already."""

    class Probe(WithParts, inside=layers):
        def forward(self, *args: Any) -> torch.Tensor:
            return forward(self, *args)

    class Repeated(WithParts, probes=lambda: nn.ModuleList([Probe(), Probe()])):
        def forward(self, *args: Any) -> torch.Tensor:
            return torch.stack([probe(*args) for probe in self.probes]).sum()

    torch.manual_seed(1)
    encoder, eager = nn.Linear(8, 8), Repeated()
    planned = remat.enable(copy.deepcopy(eager), "100%", scope=scope, split="off", costs=COSTS)
    arguments: tuple[Any, ...] = ({},) if forward is refilled_dict else ()
    for _ in range(3):
        results = []
        for model in (eager, planned):
            encoder.zero_grad()
            model.zero_grad()
            h = encoder(torch.ones(4, 8)).tanh()
            h.square().mean().backward()
            model(h, *arguments).backward()
            results.append([p.grad for m in (encoder, model) for p in m.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_steps_follow_torchs_default_dtype() -> None:
    class OfDefaultDtype(Summed):
        def forward(self, *args: Any) -> torch.Tensor:
            return super().forward(*args) * torch.linspace(0, 1, 3).sum()

    eager = OfDefaultDtype(layers())
    planned = remat.enable(copy.deepcopy(eager), "100%", scope="model", costs=COSTS)
    x = torch.ones(4, 8)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            assert_same_steps(planned, eager, x)
        finally:
            torch.set_default_dtype(torch.float32)
    assert len(remat.plans(planned)) == 2


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_a_step_with_anomaly_detection_is_planned(scope: str) -> None:
    eager = Summed(layers())
    planned = remat.enable(copy.deepcopy(eager), "100%", scope=scope, costs=COSTS)
    with torch.autograd.set_detect_anomaly(True):
        assert_same_steps(planned, eager, torch.ones(4, 8))
    assert len(remat.plans(planned)) == 1


class SameMask(WithParts, linear=(8, 8)):
    """Draws the same mask twice, as reversible layers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        y = F.dropout(self.linear(x), 0.5)
        torch.set_rng_state(state)
        return y + F.dropout(x, 0.5)


def test_a_forward_that_sets_the_rng_state_is_refused_and_works_by_blocks() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 8), SameMask(), SameMask(), nn.Flatten(0))
    model = Summed(copy.deepcopy(eager))
    with pytest.raises(TraceError, match=r"calls torch\.get_rng_state.*scope=\"blocks\""):
        remat.optimize(model, "100%", (torch.ones(4, 8),), costs=COSTS)
    planned = remat.enable(model, "100%", scope="blocks", costs=COSTS)
    for seed in range(2):
        losses = []
        for module in (planned, Summed(eager)):
            torch.manual_seed(seed)
            losses.append(module(torch.ones(4, 8)))
        assert torch.equal(*losses)


def test_hooks_of_parameters_run_once_in_the_step_that_plans_blocks() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(
        nn.Linear(8, 8),
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)),
        nn.Flatten(0),
    )
    model = remat.enable(Summed(eager), "100%", scope="blocks", costs=COSTS)
    calls: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(functools.partial(lambda name, gradient: calls.append(name), name))
    model(torch.ones(4, 8)).backward()
    assert sorted(calls) == sorted(name for name, _ in model.named_parameters())


def test_threads_may_call_an_enabled_model() -> None:
    torch.manual_seed(0)
    eager = Summed(layers())
    planned = remat.enable(copy.deepcopy(eager), "100%", scope="blocks", costs=COSTS)
    inputs = [torch.randn(4, 8) for _ in range(4)]
    planned(inputs[0]).backward()
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            for one, two in zip(threads.map(planned, inputs), map(eager, inputs), strict=True):
                assert torch.equal(one, two)
    assert "forward" not in planned.inside[0].__dict__


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_threads_wait_for_the_plan(scope: str) -> None:
    """Planning replaces the forwards of modules: calls of other threads must not see that."""
    torch.manual_seed(0)
    eager = Summed(layers())
    planned = remat.enable(copy.deepcopy(eager), "100%", scope=scope, split="off", costs=COSTS)
    inputs = [torch.randn(4, 8) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        sum(threads.map(planned, inputs)).backward()
    sum(map(eager, inputs)).backward()
    assert_same_gradients(planned, eager, 1e-5)
