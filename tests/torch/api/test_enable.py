"""`enable`: the model trains within the budget, and stays the same model for other code."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from tests.helpers.training.models import WithParts
from tests.helpers.training.tied_net import Net, assert_equal, batch, gradients, net
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.errors import InfeasibleBudget, TraceError
from remat.frontend.memory.meter import allocated_peak


def test_enable_returns_the_same_model_with_the_same_gradients() -> None:
    model, eager = net(), net()
    assert remat.enable(model, "50%", split="off") is model
    assert type(model) is Net
    assert model.state_dict().keys() == eager.state_dict().keys()
    assert inspect.signature(model.forward) == inspect.signature(eager.forward)
    assert remat.plans(model) == []
    for seed in (3, 4):
        assert_equal(gradients(model, seed=seed), gradients(eager, seed=seed))
        assert_equal(gradients(model, scale=2.0, seed=seed), gradients(eager, scale=2.0, seed=seed))
    assert model.steps == eager.steps == 4
    first, last = remat.plans(model)
    assert first.peak_bytes <= first.budget_bytes < first.baseline_peak_bytes
    assert len(last.schedule) > len(last.graph)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(batch()), eager.eval()(batch()))


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_a_model_in_evaluation_mode_is_planned_if_gradients_are_enabled(scope: str) -> None:
    """As LoRA of diffusers is trained, and networks with frozen batch norms."""
    model, eager = net().eval(), net().eval()
    remat.enable(model, "50%", scope=scope, split="off")
    with torch.no_grad():
        model(batch())
    assert remat.plans(model) == []
    for seed in (3, 4):
        assert_equal(gradients(model, seed=seed), gradients(eager, seed=seed))
    plan = remat.plans(model)[0]
    assert plan.peak_bytes < plan.baseline_peak_bytes


def test_the_measured_peak_is_that_of_the_plan() -> None:
    model = remat.enable(net(), "40%", (batch(),))
    (plan,) = remat.plans(model)
    gradients(model)
    model.zero_grad(set_to_none=True)
    ids = batch()
    peak = allocated_peak(lambda: model(ids).backward())
    peak += ids.nbytes + sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert peak <= plan.budget_bytes


@pytest.mark.slow
def test_a_disabled_model_is_as_before() -> None:
    model = net()
    before = set(model.__dict__)
    remat.enable(model, "50%", split="off")
    gradients(model)
    assert remat.disable(model) is model
    assert set(model.__dict__) == before
    assert_equal(gradients(model), gradients(net()))
    with pytest.raises(TraceError, match=r"not enabled for this Net; call remat\.enable"):
        remat.plans(model)
    remat.enable(model, "60%", split="off")  # and once more
    assert_equal(gradients(model), gradients(net()))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # ids have no gradient
def test_hooks_of_the_model_run_once_outside_of_the_plan() -> None:
    model = remat.enable(net(), "50%", split="off")
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda *_: seen.append("after"))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    for _ in range(2):
        gradients(model)
    assert seen == ["before", "after", "backward"] * 2
    assert len(remat.plans(model)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_planned", [False, True])
def test_copies_pickles_and_saved_files_stay_enabled(is_planned: bool, tmp_path: Path) -> None:
    model = remat.enable(net(), "50%", (batch(),) if is_planned else None, split="off")
    expected = gradients(net())
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
        copy.deepcopy(nn.Sequential(model))[0],
    ]
    for copied in copies:
        assert type(copied) is Net
        assert copied.embed.weight is copied.head.weight
        assert copied.embed.weight is not model.embed.weight
        assert len(remat.plans(copied)) == is_planned
        with torch.no_grad():
            copied.embed.weight[0] += 1  # its own
        assert not torch.equal(gradients(copied)[0], expected[0])
        with torch.no_grad():
            copied.embed.weight.copy_(net().embed.weight)
        assert_equal(gradients(copied), expected)
        assert len(remat.plans(copied)) == 1
        remat.disable(copied)
    assert_equal(gradients(model), expected)
    assert len(remat.plans(model)) == 1


@pytest.mark.slow
def test_averaged_models_stay_enabled() -> None:
    model = remat.enable(net(), "50%", (batch(),), split="off")
    average = torch.optim.swa_utils.AveragedModel(model)
    gradients(model)
    average.update_parameters(model)
    average.module.load_state_dict(net().state_dict())
    assert_equal(gradients(average.module), gradients(net()))
    assert len(remat.plans(average.module)) == 1


def test_an_enabled_forward_can_be_wrapped() -> None:
    """As accelerate does for mixed precision."""
    model = net()
    remat.enable(model, "50%", split="off")
    inner, calls = model.forward, []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args))
        return inner(*args, **kwargs)

    model.forward = wrapped
    assert_equal(gradients(model), gradients(net()))
    assert calls == [1]
    assert len(remat.plans(model)) == 1
    remat.disable(model)
    assert_equal(gradients(model), gradients(net()))
    assert calls == [1, 1]
    assert model.forward is wrapped


def test_a_replaced_forward_is_planned_and_restored() -> None:
    model = net()
    original_forward = model.forward
    model.forward = twice = lambda ids: 2 * original_forward(ids)
    remat.enable(model, "50%", split="off")
    assert_equal(gradients(model), gradients(net(), scale=2.0))
    remat.disable(model)
    assert model.forward is twice


def test_wrong_use_raises_an_error() -> None:
    model = remat.enable(net(), "50%", split="off")
    with pytest.raises(TraceError, match=r"enabled for this Net already; call remat\.disable"):
        remat.enable(model, "40%")
    with pytest.raises(TraceError, match=r"expected a torch\.nn\.Module, got str"):
        remat.enable("model", "40%")  # type: ignore[type-var]
    with pytest.raises(TraceError, match="optimised already"):
        remat.enable(remat.optimize(net(), "40%"), "40%")
    with pytest.raises(TraceError, match=r"compiled by torch\.compile; pass the module inside"):
        remat.enable(torch.compile(net()), "40%")  # type: ignore[type-var]
    with pytest.raises(InfeasibleBudget, match=r'for 60% of the peak .* pass "60%"'):
        remat.enable(net(), "60")
    with pytest.raises(
        InfeasibleBudget, match="less than the parameters, their gradients"
    ) as raised:
        remat.enable(net(), "1KiB")
    assert raised.value.min_feasible_bytes is not None
    refused = net()
    with pytest.raises(InfeasibleBudget):
        remat.enable(refused, raised.value.min_feasible_bytes, (batch(),), split="off")
    assert "forward" not in refused.__dict__
    assert_equal(gradients(refused), gradients(net()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_compile_breaks_the_graph_around_an_enabled_model_and_compiles_once() -> None:
    from torch._dynamo.testing import CompileCounter

    model = remat.enable(net(), "50%", (batch(),), split="off")
    torch._dynamo.reset()
    counter = CompileCounter()
    run = torch.compile(lambda ids: model(ids) * 2, backend=counter)
    eager = net()
    for seed in (3, 4, 5):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        run(batch()).backward()
        result = [p.grad for p in model.parameters() if p.grad is not None]
        assert_equal(result, gradients(eager, scale=2.0, seed=seed))
    assert counter.frame_count <= 1


def test_a_replaced_forward_with_variables_of_a_closure_is_planned_once() -> None:
    """As TRL replaces a model's forward. A change of the variable is noticed."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            return function(*args)

        return run

    class Scaled(WithParts, layer=(4, 4)):
        @decorated
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    def with_factor(model: nn.Module) -> Callable[[float], None]:
        factor = 2.0

        @functools.wraps(Scaled.forward)
        def forward(self: Scaled, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * factor).square().mean()

        def set_factor(value: float) -> None:
            nonlocal factor
            factor = value

        model.__dict__["forward"] = MethodType(forward, model)
        return set_factor

    model, x = Scaled(), torch.randn(8, 4)
    eager = copy.deepcopy(model)
    setters = with_factor(model), with_factor(eager)
    remat.enable(model, "100%", costs=remat.Roofline("cpu"), split="off")
    for factor, plan_count in ((2.0, 1), (2.0, 1), (3.0, 2)):
        for set_factor in setters:
            set_factor(factor)
        loss = model(x)
        assert torch.equal(loss, eager(x))
        loss.backward()
        model.zero_grad()
        assert len(remat.plans(model)) == plan_count


class _SelfCheckpointed(nn.Module):
    """A layer that checkpoints itself if a flag is set, as those of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gradient_checkpointing:
            return x + checkpoint(self.layers, x, use_reentrant=False)
        return x + self.layers(x)


@pytest.mark.slow_cases("blocks")
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_layers_that_checkpoint_themselves_are_planned_once(
    scope: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(_SelfCheckpointed() for _ in range(3))), torch.randn(16, 8)
    remat.enable(
        model, "min", scope=scope, costs=remat.Roofline("cpu"), split="off",
        strategy=remat.Auto(time_limit=1),
    )  # fmt: skip
    for _ in range(3):
        model(x).square().mean().backward()
        model.zero_grad()
    assert len(remat.plans(model)) == 1
    assert "called differently" not in caplog.text
