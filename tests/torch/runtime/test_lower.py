"""`lower`: a program runs as written, and errors in it are reported before it runs."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.helpers.programs import keep_all, recompute_all, traced
from tests.helpers.training.models import PLAIN, Case, WithParts
from tests.helpers.training.recorded_steps import assert_same, eager_step, run_step
from torch import nn

import remat
from remat.documents.arguments import Argument, Ref
from remat.documents.program import Program
from remat.documents.records import Placeholder
from remat.documents.targets import WRITE_TARGET
from remat.documents.trace import Trace
from remat.errors import DocumentError, GuardError
from remat.frontend.runtime.lower import lower_program, program_on_model_device
from remat.passes.gradient_accumulation import with_gradient_accumulation


class FirstOf(WithParts, conv=lambda: nn.Conv2d(3, 4, 3, bias=False)):
    """A module that reads only the first result of one operation, and only the second of
    another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(nn.functional.max_pool2d(x, 2)).square().mean()


class Recurrent(WithParts, layer=lambda: nn.LSTM(6, 6, batch_first=True)):
    """A recurrent layer: oneDNN's kernel depends on whether gradients are enabled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0].square().mean()


CASES: dict[str, Callable[[], Case]] = {
    **{name: PLAIN[name] for name in ("mlp", "tied", "norms", "two-heads")},
    "elements": lambda: Case(FirstOf(), (torch.rand(2, 3, 8, 8),), loss=lambda out: out),
    "recurrent": lambda: Case(Recurrent(), (torch.rand(2, 5, 6),), loss=lambda out: out),
}


def accumulated(trace: Trace) -> Program:
    return keep_all(remat.measure(with_gradient_accumulation(trace), remat.Roofline("cpu")))


def case_and_trace(name: str) -> tuple[Case, Trace]:
    torch.manual_seed(0)
    case = CASES[name]()
    trace = remat.trace(case.model, case.args, case.kwargs)
    return case, remat.measure(trace, remat.Roofline("cpu"))


@pytest.mark.parametrize("rewritten", [keep_all, recompute_all])
@pytest.mark.parametrize("name", CASES)
def test_a_program_computes_what_the_model_does(
    name: str, rewritten: Callable[[Trace], Program]
) -> None:
    case, trace = case_and_trace(name)
    lowered = remat.lower(rewritten(trace), copy.deepcopy(case.model))
    assert_same(run_step(lowered, case), eager_step(case))


@pytest.mark.parametrize("name", ["mlp", "tied", "norms"])
def test_gradients_are_accumulated_into_existing_ones(name: str) -> None:
    case, trace = case_and_trace(name)
    program = accumulated(trace)
    # As if read from a file: equal strings are different objects.
    read = tuple(s.model_copy(update={"target": "".join([*s.target])}) for s in program.backward)
    program = program.model_copy(update={"backward": read})
    lowered = remat.lower(program, copy.deepcopy(case.model))
    reference = copy.deepcopy(case.model)
    for model in (lowered, reference):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
    actual, expected = (run_step(m, case, zero_grad=False) for m in (lowered, reference))
    assert_same(actual, expected)


def test_a_compiled_program_is_data() -> None:
    """Copies of a module share it."""
    _, trace = case_and_trace("tied")
    compiled = lower_program(keep_all(trace))
    with pytest.raises(FrozenInstanceError):
        compiled.saved = ()  # type: ignore[misc]


# -- writes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs the name of an operator"),
        ((Ref("x"),), "needs the name of an operator"),
        ((Ref("x"), 3), "needs the name of an operator"),
        ((Ref("x"), "aten.nonesuch.default"), "has no operation"),
        ((Ref("x"), "aten.add.Tensor"), "no operator that writes into one tensor"),
    ],
)
def test_a_write_has_to_name_an_operator_that_writes(
    arguments: tuple[Argument, ...], message: str
) -> None:
    program = keep_all(traced(nn.Linear(2, 2), torch.ones(2, 2)))
    (name,) = (p.name for p in program.placeholders if p.kind == "input")
    arguments = tuple(Ref(name) if item == Ref("x") else item for item in arguments)
    first = program.forward[0].model_copy(update={"target": WRITE_TARGET, "args": arguments})
    writing = program.model_copy(update={"forward": (first, *program.forward[1:])})
    with pytest.raises(DocumentError, match=message):
        lower_program(writing)


# -- devices --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program_for_gpu() -> Program:
    trace = remat.trace(nn.Linear(2, 2), torch.ones(2, 2), device="h100")
    return keep_all(remat.measure(trace, remat.Roofline("h100")))


def model_on(*devices: str) -> Any:
    """Return a model whose parameters are on these devices, the devices need not exist."""
    tensors = [SimpleNamespace(device=torch.device(device)) for device in devices]
    return SimpleNamespace(parameters=lambda: iter(tensors), buffers=lambda: iter(()))


@pytest.mark.parametrize(
    ("devices", "device"),
    [
        ((), "cuda:0"),
        (("cuda:0",), "cuda:0"),
        (("cuda:1",), "cuda:1"),
        (("cuda:1", "cuda:1"), "cuda:1"),
        (("cpu", "cuda:1"), "cuda:1"),
    ],
)
def test_a_program_runs_on_the_gpu_of_the_model(
    program_for_gpu: Program, devices: tuple[str, ...], device: str
) -> None:
    moved = program_on_model_device(program_for_gpu, model_on(*devices))
    assert {moved.device, *(p.tensor.device for p in moved.placeholders)} == {device}


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (("cpu",), r"is on cpu: move it with model\.to\('cuda'\), or trace it for cpu"),
        (("cuda:0", "cuda:1"), "is on cuda:0, cuda:1: put it on one"),
        (("cuda:2", "cpu", "cuda:0", "cuda:1"), "is on cuda:0, cuda:1, cuda:2: put it on one"),
    ],
)
def test_a_model_on_other_or_several_devices_is_refused(
    program_for_gpu: Program, devices: tuple[str, ...], message: str
) -> None:
    with pytest.raises(GuardError, match=message):
        program_on_model_device(program_for_gpu, model_on(*devices))


# -- constants ------------------------------------------------------------------------------


class Constant(WithParts, layer=(6, 3)):
    """A module with constants of three elements and of none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x) * torch.tensor([1.0, 0.5, 2.0])
        return torch.cat([h.flatten(), torch.tensor([])]).square().mean()


def constants() -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    model = Constant()
    return model, keep_all(traced(model, torch.rand(4, 6)))


def test_constants_have_the_elements_of_the_model() -> None:
    _, program = constants()
    shapes = [p.tensor.shape for p in program.placeholders if p.kind == "constant"]
    constants_by_shape = {tuple(c.shape): c for c in lower_program(program).constants}
    assert sorted(shapes) == sorted(constants_by_shape) == [(0,), (3,)]
    assert constants_by_shape[3,].tolist() == [1.0, 0.5, 2.0]
    assert constants_by_shape[0,].dtype == torch.float32


DAMAGE: dict[str, Callable[[Placeholder], dict[str, object]]] = {
    "no base64": lambda p: {"data": "*" + p.data},
    "more than base64": lambda p: {"data": p.data[:8] + "!!!!" + p.data[8:]},
    "half a number": lambda p: {"data": base64.b64encode(b"123").decode()},
    "a number too few": lambda p: {"data": base64.b64encode(bytes(8)).decode()},
    "a device that is not there": lambda p: {
        "tensor": p.tensor.model_copy(update={"device": "cuda:99"})
    },
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_constant_is_named(damage: str) -> None:
    _, program = constants()
    placeholders = tuple(
        p.model_copy(update=DAMAGE[damage](p)) if p.tensor.shape == (3,) and p.data else p
        for p in program.placeholders
    )
    damaged = program.model_copy(update={"placeholders": placeholders})
    (name,) = [p.name for p in placeholders if p.data]
    with pytest.raises(DocumentError, match=f"the constant {name} is damaged"):
        lower_program(damaged)


def test_a_stage_of_another_kind_is_refused_with_a_remedy() -> None:
    trace = traced(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(2, 2))
    plan = remat.solve(trace, "100%")
    with pytest.raises(TypeError, match=r"got a Plan: pass plan\.schedule"):
        remat.rewrite(trace, plan)
    with pytest.raises(TypeError, match=r"got a Plan: pass remat\.rewrite"):
        remat.lower(plan, nn.Linear(2, 2))
    with pytest.raises(
        TypeError, match=r"lower needs a torch\.nn\.Module; got None: pass the model"
    ):
        remat.lower(remat.rewrite(trace, plan.schedule), cast(Any, None))
    with pytest.raises(TypeError, match=r"measure needs a Trace; got a Linear: pass remat\.trace"):
        remat.measure(cast(Any, nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="simulate needs a Graph; got a Trace"):
        remat.simulate(cast(Any, trace), plan.schedule)
