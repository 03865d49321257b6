"""`optimize` and `enable` with other wrappers: signatures, torch.compile around and inside,
hooks."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.training.tied_net import Net, assert_equal, batch
from tests.helpers.training.tied_net import gradients as gradients_of
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrizations, prune, weight_norm

import remat
from remat import HookWarning, TraceError

COSTS = remat.Roofline("cpu")


def optimized(model: nn.Module, *args: Any, budget: str = "60%") -> remat.RematModule:
    return remat.optimize(model, budget, *args, costs=COSTS, split="off")


def net() -> Net:
    torch.manual_seed(0)
    return Net(width=32, depth=3)


def gradients(model: nn.Module, seed: int = 3) -> list[torch.Tensor]:
    return gradients_of(model, batch(32), seed=seed)


# -- signatures -----------------------------------------------------------------------------------


def test_the_optimised_forward_has_the_signature_of_the_model() -> None:
    fast, expected = optimized(net()), inspect.signature(Net().forward)
    saved = io.BytesIO()
    torch.save(fast, saved)
    saved.seek(0)
    for copy_of_model in (
        fast,
        copy.copy(fast),
        copy.deepcopy(fast),
        pickle.loads(pickle.dumps(fast)),
        torch.load(saved, weights_only=False),
        optimized(nn.Sequential(net())[0]),
    ):
        assert inspect.signature(copy_of_model.forward) == expected
        assert list(inspect.signature(type(copy_of_model).forward).parameters) == [
            "self",
            "ids",
            "scale",
        ]
        copy_of_model.recompile()
        assert inspect.signature(copy_of_model.forward) == expected
    assert inspect.signature(optimized(nn.Linear(2, 2)).forward) != expected  # each has its own
    assert inspect.signature(fast.forward) == expected


# -- torch.compile --------------------------------------------------------------------------------


def around(model: nn.Module, counter: CompileCounter) -> Callable[..., Any]:
    return torch.compile(model, backend=counter)


def in_place(model: nn.Module, counter: CompileCounter) -> Callable[..., Any]:
    model.compile(backend=counter)
    return model


def in_a_function(model: nn.Module, counter: CompileCounter) -> Callable[..., Any]:
    return torch.compile(lambda ids: model(ids) * 1, backend=counter)


not_a_leaf = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


ONE_DOOR = pytest.mark.parametrize(
    "plan", [pytest.param(remat.optimize, marks=pytest.mark.slow), remat.enable]
)


@pytest.mark.slow
@not_a_leaf  # dynamo asks
@pytest.mark.parametrize(
    "compile_it", [around, in_place, pytest.param(in_a_function, marks=pytest.mark.slow)]
)
@ONE_DOOR
def test_torch_compile_breaks_the_graph_once_around_the_step(plan: Any, compile_it: Any) -> None:
    """It compiles evaluation as a whole."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter, eager = CompileCounter(), net()
    model = plan(net(), "60%", costs=COSTS)  # planned at the first step, inside of what is compiled
    run = compile_it(model, counter)

    def step(seed: int) -> None:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        run(batch(32)).backward()
        result = [p.grad for p in model.parameters() if p.grad is not None]
        assert_equal(result, gradients(eager, seed=seed))

    step(3)
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert len(breaks) == 1
    assert "remat runs its plan" in next(iter(breaks))
    frames = counter.frame_count
    assert frames == (compile_it is in_a_function)  # what is not the step's
    with torch._dynamo.config.patch(error_on_recompile=True):
        step(4)
        step(5)
    assert counter.frame_count == frames
    model.eval()
    with torch.no_grad():
        assert torch.equal(run(batch(32)), eager.eval()(batch(32)))
    assert counter.frame_count == frames + 1


class Around(nn.Module):
    """Layers before and after an inner module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(32, 32), inner, nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x).relu()).relu()).square().mean()


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(block() for _ in range(3)))


def rows() -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def of_rows(model: nn.Module, seed: int = 3) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    model(rows()).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@not_a_leaf
def test_a_compiled_model_may_contain_an_optimised_block() -> None:
    torch._dynamo.reset()
    eager, counter = Around(layers()), CompileCounter()
    model = copy.deepcopy(eager)
    model.inner = optimized(model.inner, budget="90%")
    run = torch.compile(model, backend=counter)
    assert_equal(of_rows(run), of_rows(eager))
    assert counter.frame_count == 2  # before it and after it
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (4, 5):
            assert_equal(of_rows(run, seed), of_rows(eager, seed))
    assert counter.frame_count == 2


@pytest.mark.slow
def test_the_module_inside_of_a_compiled_one_is_planned() -> None:
    counter = CompileCounter()
    expected = optimized(net(), (batch(32),))
    returned, in_its_place, parts = net(), net(), net()
    in_its_place.compile(backend=counter)
    parts.blocks[0].compile(backend=counter)
    parts.blocks[1] = torch.compile(parts.blocks[1], backend=counter)  # type: ignore[assignment]
    for model in (torch.compile(returned, backend=counter), in_its_place, parts):
        fast = optimized(model, (batch(32),))  # type: ignore[arg-type]
        assert type(fast) is not type(expected)  # fx makes a class for each
        assert isinstance(fast, remat.RematModule)
        assert fast.plan is not None
        assert expected.plan is not None
        assert fast.plan.schedule == expected.plan.schedule
        assert len(fast.state_dict()) == len(expected.state_dict())
        assert_equal(gradients(fast), gradients(net()))
    assert list(optimized(torch.compile(net())).state_dict()) == list(expected.state_dict())  # type: ignore[arg-type]
    assert expected.program is not None
    lowered = remat.lower(expected.program, torch.compile(net(), backend=counter))  # type: ignore[arg-type]
    assert_equal(gradients(lowered), gradients(net()))
    assert counter.frame_count == 0  # the compiled code did not run
    with pytest.raises(TraceError, match="optimised already"):
        optimized(torch.compile(expected))  # type: ignore[arg-type]


def test_a_module_compiled_in_place_can_be_enabled() -> None:
    counter, model = CompileCounter(), net()
    torch._dynamo.reset()
    model.compile(backend=counter)
    remat.enable(model, "60%", costs=COSTS, split="off")
    assert_equal(gradients(model), gradients(net()))
    (plan,) = remat.plans(model)
    assert len(plan.schedule) > len(plan.graph)
    assert counter.frame_count == 0


# -- hooks ----------------------------------------------------------------------------------------


def looks(*_: Any) -> None: ...


def passes_on(module: nn.Module, args: Any, output: Any) -> Any:
    return output


def computes(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def writes(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.mul_(2)


def counts(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    module.seen.add_(output.detach().mean())  # type: ignore[operator, union-attr]


def shifts(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (args[0] + 1,), kwargs


def scales_the_gradient(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return (inputs[0] * 3,)


def make_inputs_require_grads(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.requires_grad_(True)  # as transformers does; here it was so before


def with_hooks_that_compute() -> nn.Sequential:
    model = layers()
    model.get_submodule("0.0").register_forward_hook(computes)
    model.get_submodule("0.1").register_forward_hook(writes)
    model.get_submodule("0.2").register_buffer("seen", torch.zeros(()))
    model.get_submodule("0.2").register_forward_hook(counts)
    model.get_submodule("1").register_forward_pre_hook(shifts, with_kwargs=True)
    model.get_submodule("1.0").register_full_backward_hook(scales_the_gradient)
    model.get_submodule("1.2").register_full_backward_pre_hook(
        lambda module, outputs: (outputs[0] * 5,)
    )
    model.get_submodule("1.2").register_forward_hook(make_inputs_require_grads)
    prune.l1_unstructured(model.get_submodule("2.0"), "weight", 0.3)
    parametrizations.weight_norm(model.get_submodule("2.2"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        weight_norm(model.get_submodule("1.0"))
    return model


@pytest.mark.slow
@ONE_DOOR
def test_computations_in_hooks_are_planned_without_a_warning(plan: Any) -> None:
    eager, model = with_hooks_that_compute(), with_hooks_that_compute()
    fast = plan(model, "80%", (rows(),), costs=COSTS)
    for seed in (3, 4):
        assert_equal(of_rows(fast, seed), of_rows(eager, seed))
    assert model.get_submodule("0.2").seen == eager.get_submodule("0.2").seen != 0
    plain = layers()
    assert not torch.equal(of_rows(fast)[0], of_rows(plain)[0])


@pytest.mark.slow
@ONE_DOOR
def test_hooks_without_effect_on_the_graph_are_warned_of_once(plan: Any) -> None:
    model = layers()
    for item in model.children():
        item.register_forward_hook(looks)
    model.get_submodule("0.0").register_forward_hook(passes_on)
    model.get_submodule("0.1").register_forward_pre_hook(looks)
    handle = model.get_submodule("1.0").register_full_backward_hook(looks)
    model.get_submodule("1.1").register_full_backward_pre_hook(looks)
    with pytest.warns(HookWarning) as recorded_warnings:
        fast = plan(model, "80%", (rows(),), costs=COSTS)
    (message,) = [str(item.message) for item in recorded_warnings]
    assert "hooks inside of Sequential compute nothing, so a planned step does not call" in message
    for item in (
        "the forward hook looks of 0, 1, 2",
        "the forward hook passes_on of 0.0",
        "the forward pre-hook looks of 0.1",
        "the backward hook looks of 1.0",
        "the backward pre-hook looks of 1.1",
    ):
        assert item in message
    assert_equal(of_rows(fast), of_rows(layers()))
    fast.zero_grad()
    fast(torch.randn(128, 32)).sum().backward()  # planned for another shape: no warning
    handle.remove()
    assert not model.get_submodule("1.0")._backward_hooks
    assert [*model.get_submodule("0")._forward_hooks.values()] == [looks]


def test_hooks_without_effect_on_the_graph_run_only_in_evaluation() -> None:
    seen: list[str] = []
    model = layers()
    model.get_submodule("0").register_forward_hook(lambda *_: seen.append("forward"))
    model.get_submodule("1").register_full_backward_hook(lambda *_: seen.append("backward"))
    with pytest.warns(HookWarning, match="of 0; the backward hook .* of 1"):
        fast = optimized(model, (rows(),), budget="80%")
    seen.clear()
    of_rows(fast)
    assert not seen
    with torch.no_grad():
        fast(rows())
    assert seen == ["forward"]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # inputs have no gradient
def test_hooks_of_the_outermost_model_run_around_the_plan() -> None:
    """Wherever they were registered, and also around copies."""
    seen: list[str] = []
    model, eager = layers(), layers()
    for module in (model, eager):
        module.register_forward_hook(computes)
        module.register_full_backward_hook(lambda *_: seen.append("model"))
    fast = optimized(model, (rows(),), budget="80%")
    assert not seen
    for module in (fast, eager):
        module.register_forward_pre_hook(shifts, with_kwargs=True)
        module.register_full_backward_hook(lambda *_: seen.append("fast"))
    expected = of_rows(eager)
    seen.clear()
    for module in (fast, copy.deepcopy(fast), copy.copy(fast)):
        assert_equal(of_rows(module), expected)
        assert seen == ["model", "fast"]
        seen.clear()
    with torch.no_grad():
        assert torch.equal(fast.eval()(rows()), eager.eval()(rows()))


def test_weights_computed_by_a_hook_of_the_outermost_model_are_refused() -> None:
    model = prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.3)
    with pytest.raises(TraceError, match=r"L1Unstructured.*put it into another module"):
        optimized(model, (rows(),), budget="100%")
    fast = optimized(nn.Sequential(model), (rows(),), budget="100%")
    assert_equal(of_rows(fast), of_rows(model))
