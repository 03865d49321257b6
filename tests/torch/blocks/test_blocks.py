"""`remat.enable(model, budget, scope="blocks")` and "auto": blocks planned separately."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.block_models import (
    Block,
    Net,
    Output,
    Routed,
    assert_same,
    enabled,
    loss_of,
    net,
    peak_of,
    plan_of,
    step,
)
from tests.helpers.training.models import WithParts
from tests.helpers.training.steps import assert_same_gradients, assert_same_steps
from torch import nn

import remat
from remat.errors import InfeasibleBudget
from remat.frontend.memory.meter import measure_step
from remat.frontend.planning.schedule_reuse import REUSED_SCHEDULE


class ListedExperts(nn.Module):
    """Experts as a list of modules, of which some may get no rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (to == number).nonzero()[:, 0]
            if len(rows):
                output = output.index_add(0, rows, expert(x[rows]))
        return output


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 8, 16)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            images = stage(images)
        return images.square().mean()


@pytest.mark.parametrize("budget", ["75%", pytest.param("min", marks=pytest.mark.slow)])
def test_gradients_are_eager_modes_and_the_peak_is_as_planned(budget: str) -> None:
    model, ids = net()
    keys, eager = list(model.state_dict()), copy.deepcopy(model)
    enabled(model, budget)
    assert_same_steps(model, eager, ids, seeds=(1, 2))
    plan = plan_of(model)
    assert list(model.state_dict()) == keys
    assert [c.path for c in plan.calls] == [f"blocks.{n}" for n in range(4)]
    assert {c.how for c in plan.calls} == {"planned"}
    assert plan.time_s > plan.baseline_time_s
    assert 0 < plan.share <= 0.75  # the larger of the two budgets
    measured = peak_of(model, ids)
    assert 0.99 * plan.peak_bytes <= measured <= plan.peak_bytes <= plan.budget_bytes
    remat.disable(model)
    assert_same_steps(model, eager, ids)


def test_batch_norm_statistics_are_updated_once_a_step() -> None:
    torch.manual_seed(0)
    model, images = Images(), torch.randn(4, 3, 32, 32)
    other = copy.deepcopy(model)
    enabled(model, "85%")
    assert_same_steps(model, other, images, seeds=(1, 2))
    assert peak_of(model, images) <= plan_of(model).peak_bytes


class Normed(nn.Module):
    """Batch norm that no capture can trace; its output depends on its mean if it `is_mixed`."""

    def __init__(self, width: int, is_mixed: bool) -> None:
        super().__init__()
        self.is_mixed, self.scale = is_mixed, nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = F.batch_norm(x, self.mean, self.var, self.scale, training=self.training)
        if self.is_mixed:
            output = output + self.mean.clone()
        return x + (F.gelu(F.gelu(output)) if x.sum() < 1e9 else output)


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("is_mixed", [False, True])
def test_an_uncapturable_block_with_state_is_recomputed_only_if_that_is_exact(
    is_mixed: bool,
) -> None:
    torch.manual_seed(0)
    model = Net([Normed(32, is_mixed) for _ in range(4)])
    ids = torch.randint(0, 50, (256,))
    other = copy.deepcopy(model)
    enabled(model, "min", "auto")
    assert_same_steps(model, other, ids, seeds=(1, 2))
    assert ("checkpointed" in {c.how for c in plan_of(model).calls}) is not is_mixed
    assert peak_of(model, ids) <= plan_of(model).peak_bytes


@pytest.mark.slow
def test_uncapturable_blocks_run_in_eager_mode_and_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Net([Routed(32) for _ in range(3)])
    ids = torch.randint(0, 50, (256,))
    expected = step(model, ids, 1)
    with caplog.at_level(logging.WARNING, "remat"):
        enabled(model, "70%", "auto")
        assert_same(step(model, ids, 1), expected)
    plan = plan_of(model)
    kinds = {c.class_name: c.how for c in plan.calls}
    assert kinds["Experts"] in ("checkpointed", "as it is")
    assert kinds["Block"] == "planned"
    assert {c.class_name for c in plan.unplanned} == {"Experts"}
    assert all("nonzero" in c.unplanned_reason for c in plan.unplanned)
    assert "block by block, because" in plan.describe()
    assert "blocks.*.experts" in caplog.text
    assert peak_of(model, ids) <= plan.peak_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_experts_with_varying_numbers_of_rows_run_in_eager_mode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Net([Routed(32, ListedExperts) for _ in range(2)])
    batches = torch.randint(0, 50, (3, 256))
    wanted = [step(model, ids, 1) for ids in batches]
    enabled(model, "85%", "auto")
    with caplog.at_level(logging.INFO, "remat"):
        for ids, expected in zip(batches, wanted, strict=True):
            assert_same(step(model, ids, 1), expected)
    plan = plan_of(model)
    assert {c.path.split(".")[2] for c in plan.unplanned} == {"experts"}
    assert "its calls depend on the data" in plan.describe()
    assert "called differently" not in caplog.text
    assert len(remat.plans(model)) == 1


class _Product(torch.autograd.Function):
    """A product that saves its input where no capture sees it, as kernels of quantized weights
    do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight, ctx.kept = weight, x * 2
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad @ ctx.weight.t(), ctx.kept.t() @ grad / 2


class Opaque(nn.Module):
    """A linear layer that reads the value of an element, which no capture can trace."""

    def __init__(self, width: int, hides: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.hides = hides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.detach().sum().item() < 1e9
        return _Product.apply(x, self.weight) if self.hides else x @ self.weight


class Sealed(nn.Module):
    """A block of opaque layers, with capturable operations between them."""

    def __init__(self, width: int, hides: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Opaque(width, hides) for _ in range(3))
        self.gradient_checkpointing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.gradient_checkpointing
        output = x
        for layer in self.layers:
            output = F.dropout(F.gelu(layer(output)), 0.1, self.training)
        return x + output


@pytest.mark.slow
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("budget", ["min", pytest.param("75%", marks=pytest.mark.slow)])
def test_blocks_with_uncapturable_parts_are_checkpointed_as_a_whole(
    budget: str, hides: bool
) -> None:
    torch.manual_seed(0)
    model, ids = Net([Sealed(32, hides) for _ in range(4)]), torch.randint(0, 50, (256,))
    expected, eager_bytes = step(model, ids, 1), peak_of(model, ids)
    for block in model.blocks:
        block.gradient_checkpointing = True  # off during the recomputation, too
    enabled(model, budget)
    assert_same(step(model, ids, 1), expected)
    plan = plan_of(model)
    assert {call.path.count(".") for call in plan.calls} == {1}, "blocks, not layers"
    assert "checkpointed" in {call.how for call in plan.calls}
    assert 0.9 * plan.peak_bytes <= peak_of(model, ids) <= plan.peak_bytes
    share = 0.8 if budget == "75%" else 0.85 if hides else 0.6
    assert plan.peak_bytes < share * eager_bytes
    checkpointed_options = [call.option for call in plan.calls if call.how == "checkpointed"]
    hidden_bytes = 3 * 256 * 32 * 4 if hides else 0
    assert all(option.saved_bytes >= hidden_bytes for option in checkpointed_options), (
        "what is hidden stays"
    )
    assert all(
        option.saved_bytes <= hidden_bytes + 2 * 256 * 32 * 4 for option in checkpointed_options
    )


class Cache:
    """A cache of what it gets, like a cache of keys."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(x)
        return torch.stack(self.kept).mean(0)


class Caching(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block, self.scale = Block(width), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        return self.block(cache.add(x) * self.scale)


class Cached(Net):
    """Blocks that share a cache, which is returned."""

    def forward(self, ids: torch.Tensor) -> Any:
        x, cache = self.embed(ids) * self.scale, Cache()
        for block in self.blocks:
            x = block(x, cache)
        return F.cross_entropy(self.head(x), ids), cache


def test_auto_plans_a_capturable_model_as_a_whole() -> None:
    model, ids = net()
    expected = step(model, ids, 1)
    enabled(model, "75%", "auto", split="off")
    assert_same(step(model, ids, 1), expected)
    assert type(remat.plans(model)[-1]) is remat.Plan


@pytest.mark.slow
def test_an_infeasible_budget_names_the_smallest_feasible_one() -> None:
    model, ids = net()
    enabled(model, "min")
    step(model, ids, 1)
    least_bytes = plan_of(model).peak_bytes
    remat.disable(model)
    enabled(model, least_bytes * 9 // 10)
    with pytest.raises(InfeasibleBudget) as raised:
        step(model, ids, 1)
    smallest_bytes = raised.value.min_feasible_bytes
    assert smallest_bytes is not None
    assert f'pass at least {smallest_bytes:,} bytes, or "min"' in str(raised.value)
    assert least_bytes * 9 // 10 < smallest_bytes <= 1.05 * least_bytes
    remat.disable(model)
    enabled(model, int(1.05 * smallest_bytes))
    step(model, ids, 1)


@pytest.mark.slow
def test_auto_is_the_free_memory_of_the_device() -> None:
    model, ids = net()
    enabled(model, "auto")
    step(model, ids, 1)
    plan = plan_of(model)
    assert plan.budget_bytes > 10 * plan.peak_bytes
    assert plan.peak_bytes == plan.baseline_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_batches_in_flight_are_part_of_the_plan(in_flight: int) -> None:
    """As in a pipeline stage: several forwards first, then backward and forward alternate."""
    model, ids = net()
    other = copy.deepcopy(model)

    def stage(module: nn.Module) -> None:
        torch.manual_seed(3)
        flying: list[torch.Tensor] = []
        for _ in range(in_flight + 2):
            flying.append(loss_of(module(ids)))
            if len(flying) == in_flight:
                flying.pop(0).backward()
        while flying:
            flying.pop(0).backward()

    stage(other)
    enabled(model, "60%", in_flight=in_flight)
    stage(model)
    assert_same_gradients(model, other)
    constants = [*model.parameters(), *model.buffers(), ids]
    plan = plan_of(model)
    assert plan.time_s > plan.baseline_time_s
    assert 0 < plan.share <= 0.75  # the larger of the two budgets
    model.zero_grad(set_to_none=True)
    measured = measure_step(lambda: stage(model), constants).peak_bytes
    assert 0.98 * plan.peak_bytes <= measured <= plan.peak_bytes


def test_calls_in_flight_are_a_number() -> None:
    model, _ = net()
    for number in (0, 1.5, True):
        with pytest.raises(ValueError, match="; pass the number of calls, 1 or more"):
            enabled(model, "60%", in_flight=number)


@pytest.mark.slow
def test_existing_gradients_are_accumulated_into() -> None:
    model, ids = net()
    other = copy.deepcopy(model)
    enabled(model, "90%")
    for module in (other, model):
        for seed in (1, 2):
            torch.manual_seed(seed)
            loss_of(module(ids)).backward()
    assert_same_gradients(model, other)
    assert len(remat.plans(model)) == 2


@pytest.mark.slow
def test_other_lengths_are_planned_and_evaluation_runs_eagerly() -> None:
    model, ids = net()
    wanted = [step(model, batch, 1) for batch in (ids, ids[:100])]
    enabled(model, "80%")
    for batch, expected in zip((ids, ids[:100], ids), (*wanted, wanted[0]), strict=True):
        assert_same(step(model, batch, 1), expected)
    assert len(remat.plans(model)) == 2
    with torch.no_grad():
        assert model.eval()(ids[:7]).logits.shape == (7, 50)
    assert len(remat.plans(model)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["70%", "min"])
def test_other_lengths_reuse_the_schedules_of_earlier_ones(budget: str) -> None:
    model, _ = net()
    other = copy.deepcopy(model)
    enabled(model, budget)
    most_bytes = 0
    for number, length in enumerate((128, 256, 96, 40, 200, 300)):
        ids = torch.randint(0, 50, (length,))
        assert_same_steps(model, other, ids, seeds=(number,))
        plan = plan_of(model)
        are_reused = {
            c.plan.stats["strategy"] == REUSED_SCHEDULE for c in plan.calls if c.plan is not None
        }
        assert are_reused == {number > 0}
        assert plan.budget_bytes >= most_bytes  # the budget of a longer one
        most_bytes = plan.budget_bytes
        assert (plan.time_s > plan.baseline_time_s) is (length in (128, 256, 200, 300))
        assert 0.98 * plan.peak_bytes <= peak_of(model, ids) <= plan.peak_bytes
    assert len(remat.plans(model)) == 6
    ids = torch.randint(0, 50, (256 * 40,))  # too far away
    step(model, ids, 1)
    strategies = {c.plan.stats["strategy"] for c in plan_of(model).calls if c.plan is not None}
    assert REUSED_SCHEDULE not in strategies


@pytest.mark.slow
def test_copies_and_pickles_stay_enabled_with_their_plans() -> None:
    model, ids = net()
    expected = step(model, ids, 1)
    enabled(model, "75%")
    step(model, ids, 2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    for other in others:
        assert len(remat.plans(other)) == 1
        assert_same(step(other, ids, 1), expected)
        assert len(remat.plans(other)) == 1
        assert other.blocks[0].forward.__func__ is Block.forward
    assert_same(step(model, ids, 1), expected)


def test_hooks_of_blocks_run_once_a_step() -> None:
    model, ids = net()
    seen: list[str] = []
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, number=number: seen.append(f"forward {number}"))
        block.register_full_backward_hook(
            lambda *_, number=number: seen.append(f"backward {number}")
        )
    enabled(model, "75%")
    step(model, ids, 1)
    seen.clear()
    step(model, ids, 2)
    assert seen == [f"forward {n}" for n in range(4)] + [f"backward {n}" for n in (3, 2, 1, 0)]


class _Changing(Net):
    """A model that calls a block differently from some step on, with the same inputs."""

    scaled = False

    def forward(self, ids: torch.Tensor) -> Output:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x, self.scale) if self.scaled else block(x)
        logits = self.head(x)
        return Output(F.cross_entropy(logits, ids), logits)


def test_calls_that_are_not_as_planned_are_checkpointed(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, ids = _Changing([Block(32) for _ in range(3)]), torch.randint(0, 50, (64,))
    model.scaled = True
    expected = step(model, ids, 1)
    model.scaled = False
    enabled(model, "90%")
    step(model, ids, 1)
    model.scaled = True
    with caplog.at_level(logging.INFO, "remat"):
        assert_same(step(model, ids, 1), expected)
    assert not [r for r in caplog.records if r.levelno > logging.INFO]
    assert caplog.text.count("called differently than when the step was planned") == 3


@pytest.mark.slow
def test_batch_norm_statistics_of_unplanned_calls_are_updated_once() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(3)]
    model, batch = nn.Sequential(*blocks), torch.randn(64, 32)
    other = copy.deepcopy(model)
    remat.enable(model, "min", (batch,), scope="blocks", costs=remat.Roofline("cpu"))
    for child in (*model.children(), *other.children()):
        setattr(child, "2", nn.SiLU())  # no longer what was captured
    assert_same_steps(model, other, batch, loss=lambda output: output.square().mean())


@pytest.mark.slow
def test_identical_blocks_share_one_program() -> None:
    model, ids = net()
    enabled(model, "75%")
    step(model, ids, 1)
    _, entry = model.forward.planner.state().entries[0]  # type: ignore[attr-defined]
    programs = {id(c.lowered) for c in entry.calls}
    assert len(programs) == len({c.plan.schedule for c in entry.calls}) < len(entry.calls)
    graphs = {id(c.plan.graph) for c in entry.calls}
    assert len(graphs) == 1


class Branching(nn.Module):
    """A block that branches on its elements. Without submodules no part of it can be planned."""

    def __init__(self, has_modules: bool) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32) if has_modules else nn.Parameter(torch.eye(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) if isinstance(self.first, nn.Linear) else x @ self.first
        return (x * 2 if x.sum() > 0 else x).sum()


@pytest.mark.parametrize("has_modules", [True, False])
def test_where_blocks_do_not_help_the_error_suggests_another_scope(has_modules: bool) -> None:
    model = remat.enable(Branching(has_modules), "10%", costs=remat.Roofline("cpu"))
    error_type = InfeasibleBudget if has_modules else remat.TraceError
    why = r"planned by blocks because it cannot be planned as a whole: .* Remedy: .*torch\.where"
    with pytest.raises(error_type, match=why):
        model(torch.ones(8, 32))


class _Cache:
    """A cache that no capture can trace."""


class _Caching(Block):
    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        scale.last = x.detach()
        return super().forward(x)


class _Cached(WithParts, blocks=lambda: nn.ModuleList(_Caching(16) for _ in range(3))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = _Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x.square().mean()


def test_an_infeasible_budget_names_the_uncapturable_blocks() -> None:
    model = remat.enable(_Cached(), "10%", scope="blocks", costs=remat.Roofline("cpu"))
    with pytest.raises(InfeasibleBudget, match=r"its argument \[0\]\[1\] is a _Cache"):
        model(torch.randn(64, 16)).backward()


class _Stateful(Sealed):
    """A block with state that its output depends on, of several kinds."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__(width)
        self.kind = kind
        self.number, self.plain = 1.0, torch.ones(width)
        self.draws = torch.Generator().manual_seed(0)
        self.register_buffer("mean", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.kind == "number":
                self.number += float(x.mean())
                scale: Any = self.number
            elif self.kind == "plain":
                self.plain *= 1 + x.mean(0)
                scale = self.plain.clone()
            elif self.kind == "draws":
                scale = torch.rand(x.shape, generator=self.draws)
            elif self.kind == "python":
                scale = random.random()
            else:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
                scale = self.mean
        return super().forward(x) * scale


@pytest.mark.quick_cases("number")
@pytest.mark.parametrize("kind", ["number", "plain", "draws", "python", "mean"])
def test_blocks_that_depend_on_their_state_are_not_recomputed_and_planning_restores_it(
    kind: str,
) -> None:
    torch.manual_seed(0)
    model = Net([_Stateful(32, kind) for _ in range(2)] + [Sealed(32) for _ in range(2)])
    other, ids = copy.deepcopy(model), torch.randint(0, 50, (256,))
    random.seed(3)
    expected = [step(other, ids, seed) for seed in (1, 2)]
    enabled(model, "85%")
    random.seed(3)
    for seed, item in zip((1, 2), expected, strict=True):
        assert_same(step(model, ids, seed), item)
    hows = {c.path: c.how for c in plan_of(model).calls if c.path.count(".") == 1}
    assert [hows[f"blocks.{number}"] for number in range(2)] == ["as it is"] * 2
    assert "checkpointed" in hows.values()


class _Noting(Block):
    """A block that appends its output to a list shared by all blocks."""

    def forward(self, x: torch.Tensor, notes: Any = None) -> torch.Tensor:  # type: ignore[override]
        notes.append(x)
        return super().forward(torch.stack(notes).mean(0))


class _Noted(Net):
    def forward(self, ids: torch.Tensor) -> Any:
        x, notes = self.embed(ids), []
        for block in self.blocks:
            x = block(x, notes)
        return F.cross_entropy(self.head(x), ids)


def _frozen() -> nn.Module:
    model, _ = net()
    model.embed.requires_grad_(False)
    model.scale.requires_grad_(False)
    return model


def _called_twice() -> nn.Module:
    block = Block(32)
    return Net([block, Block(32), block, block])


_PATHS = ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
_CASES: dict[str, tuple[Callable[[], nn.Module], str, str, list[str]]] = {
    "frozen first blocks": (_frozen, "75%", "blocks", _PATHS),
    "called twice": (_called_twice, "75%", "blocks", ["blocks.0", "blocks.1", *["blocks.0"] * 2]),
    "with a cache": (
        lambda: Cached([Caching(32) for _ in range(3)]), "95%", "auto",
        [f"blocks.{number}.block" for number in range(3)],
    ),
    "writing a list argument": (
        lambda: _Noted([_Noting(32) for _ in range(3)]), "min", "blocks", [],
    ),
}  # fmt: skip
"""Models with a budget, a scope and the paths of the blocks that are planned."""


@pytest.mark.quick_cases("writing a list argument")
@pytest.mark.parametrize("name", _CASES)
def test_steps_are_eager_modes(name: str) -> None:
    make, budget, scope, paths = _CASES[name]
    torch.manual_seed(0)
    model, ids = make(), torch.randint(0, 50, (256,))
    eager = copy.deepcopy(model)
    enabled(model, budget, scope)
    assert_same_steps(model, eager, ids)
    plan = plan_of(model)
    planned = [call.path for call in plan.calls if call.how == "planned"]
    assert planned == paths
    assert peak_of(model, ids) <= plan.peak_bytes
    for block in model.modules():
        if hasattr(block, "gradient_checkpointing"):
            block.gradient_checkpointing = True  # its forward refuses: a step switches it off
    assert_same_steps(model, eager, ids)


def test_the_backward_of_checkpointed_blocks_can_run_twice() -> None:
    torch.manual_seed(0)
    model, ids = Net([Sealed(32) for _ in range(4)]), torch.randint(0, 50, (256,))
    enabled(model, "min")
    step(model, ids, 1)
    assert "checkpointed" in {call.how for call in plan_of(model).calls}
    loss = loss_of(model(ids))
    weight = model.get_parameter("embed.weight")
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (second,) = torch.autograd.grad(loss, weight)
    assert torch.equal(first, second)


class ThreeProducts(nn.Module):
    """Uses its input three times, as attention does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.query(x).float().mul(self.key(x).float()).tanh()
        return self.norm(x + weight * self.value(x))


@pytest.mark.slow
def test_under_autocast_gradients_are_eager_modes_bit_for_bit() -> None:
    """Autocast casts the input of a block at each use: it caches only the casts of leaves. So the
    gradients of the uses are summed in float32."""
    torch.manual_seed(0)
    model = Net([ThreeProducts(32) for _ in range(4)])
    ids = torch.randint(0, 50, (256,))

    other = copy.deepcopy(model)
    enabled(model, "min")
    assert_same_steps(model, other, ids, autocast=torch.bfloat16)
    assert "planned" in {call.how for call in plan_of(model).calls}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "least"), [(Block, 0.99), (Sealed, 0.85)], ids=["planned", "checkpointed"]
)
def test_under_autocast_with_cached_casts_the_peak_is_as_planned(
    block: type[nn.Module], least: float
) -> None:
    """A planned block casts its weights itself; those that a checkpointed one has cast are cached
    until autocast ends, which is before the backward, and count to its end."""
    torch.manual_seed(0)
    model, ids = Net([block(32) for _ in range(4)]), torch.randint(0, 50, (256,))

    def one() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(ids))
        loss.backward()
        model.zero_grad(set_to_none=True)

    enabled(model, "min")
    one()
    measured = measure_step(one, [*model.parameters(), ids]).peak_bytes
    planned = plan_of(model).peak_bytes
    assert least * planned <= measured <= planned
