"""The autograd node of a step: layouts of gradients, saved tensors, and when memory is freed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import pytest
import torch
from tests.helpers.programs import keep_all, recompute_all, traced
from tests.helpers.training.models import WithParts
from tests.helpers.training.offloaded_steps import FAST, offloaded
from tests.helpers.training.recorded_steps import RecordedCalls
from tests.helpers.training.steps import assert_same_gradients, assert_same_steps
from torch import nn

import remat
from remat.documents.program import Program
from remat.frontend.runtime.autograd_function import _detached_unless_output, _StepFunction
from remat.passes.gradient_accumulation import with_gradient_accumulation

X = torch.rand(4, 6)
COSTS = remat.Roofline("cpu")

GRADIENTS: dict[str, Callable[[int], torch.Tensor]] = {
    "as planned": lambda width: torch.randn(2, 2, width),
    "in other strides": lambda width: torch.randn(width, 2, 2).permute(2, 1, 0),
    "one number": lambda width: torch.randn(1).expand(2, 2, width),
    "one row of many": lambda width: torch.randn(2, 2, width)[1, 0].expand(2, 2, width),
    "part of something": lambda width: torch.randn(4, 2, width)[1:3],
}


@pytest.mark.parametrize("width", [2, 300])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_of_any_layout_are_accepted(kind: str, width: int) -> None:
    """The backward views a gradient as a matrix, which only the planned strides allow. A gradient
    as planned is not copied; of a larger one only the part is kept."""
    torch.manual_seed(0)
    model = nn.Linear(3, width)
    x, gradient = torch.randn(2, 2, 3), GRADIENTS[kind](width)
    lowered = remat.lower(keep_all(traced(model, x)), model)
    expected = torch.autograd.grad(model(x), list(model.parameters()), gradient)
    out = lowered(x)
    with RecordedCalls() as reached:
        actual = torch.autograd.grad(out, list(model.parameters()), gradient)
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a, b)
    copies = [op for op, _, _ in reached.calls if op is torch.ops.aten.copy_.default]
    assert len(copies) == (kind != "as planned")


class Sizes(WithParts, layer=(3, 4)):
    """Returns a dimension of size one, whose stride is meaningless."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).unsqueeze(1)


def test_the_stride_of_a_dimension_of_size_one_is_ignored() -> None:
    model = Sizes()
    x = torch.randn(5, 3)
    lowered = remat.lower(keep_all(traced(model, x)), model)
    gradient = torch.randn(5, 4).as_strided((5, 1, 4), (4, 17, 1))
    out = lowered(x)
    with RecordedCalls() as reached:
        out.backward(gradient)
    assert torch.ops.aten.copy_.default not in [op for op, _, _ in reached.calls]


class Late(WithParts, layers=lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))):
    """Returns the loss last, after an output without gradient."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.layers(x)
        return {"hidden": h, "best": h.argmax(dim=-1), "loss": h.square().mean()}


@pytest.mark.parametrize("is_boxed", [True, False])
def test_the_loss_may_follow_outputs_without_gradient(
    is_boxed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients in a list, as torch 2.13 passes them, and one by one, as 2.11 does."""
    monkeypatch.setattr(_StepFunction, "boxed_grads_call", is_boxed)
    model = Late()
    lowered = remat.lower(keep_all(traced(copy.deepcopy(model), X)), copy.deepcopy(model))
    assert_same_steps(lowered, model, X, loss=itemgetter("loss"))
    out = lowered(X)
    assert out["hidden"].requires_grad
    assert not out["best"].requires_grad
    with pytest.raises(remat.GuardError, match="arrived at the output"):
        out["hidden"].sum().backward()


@pytest.mark.parametrize("is_boxed", [True, False])
def test_one_of_several_gradients_may_be_missing(
    is_boxed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_StepFunction, "boxed_grads_call", is_boxed)
    model = nn.Linear(6, 2)
    lowered = remat.lower(keep_all(traced(copy.deepcopy(model), X)), copy.deepcopy(model))
    assert_same_steps(lowered, model, X, loss=lambda output: (output * 2).sum())


class Heads(WithParts, body=(6, 64), first=(64, 3), second=(64, 3)):
    """Returns two outputs, each of which is a loss."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.body(x))
        return {name: getattr(self, name)(h).square().mean() for name in ("first", "second")}


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize(("used", "unused"), [("first", "second"), ("second", "first")])
@pytest.mark.usefixtures("offload_file_in_tmp_path")
def test_parameters_of_an_unused_output_have_no_gradient(
    used: str, unused: str, is_offloaded: bool, accumulates: bool
) -> None:
    """Also where zeros stand in for the gradient of that output, as with offloaded tensors."""
    model = Heads()
    eager, x = copy.deepcopy(model), torch.rand(16, 6)
    trace = remat.trace(model, x, differentiate="all")
    trace = remat.measure(with_gradient_accumulation(trace) if accumulates else trace, COSTS)
    lowered = remat.lower(keep_all(offloaded(trace, FAST) if is_offloaded else trace), model)
    for m in (lowered, eager):
        for name, parameter in m.named_parameters():
            if accumulates and not name.startswith(unused):
                parameter.grad = torch.ones_like(parameter)
        m(x)[used].backward()
    for (name, actual), expected in zip(
        lowered.named_parameters(), eager.parameters(), strict=True
    ):
        assert (actual.grad is None) == (expected.grad is None) == name.startswith(unused)
        assert actual.grad is None or actual.grad.equal(expected.grad)


class Alive(RecordedCalls):
    """A mode that records, for each operation, whether an object still existed when it began."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: weakref.ref[torch.UntypedStorage] | None = None
        self.alive: list[tuple[str, bool]] = []

    def watch(self, gradient: torch.Tensor) -> None:
        self.watched = weakref.ref(gradient.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.watched is not None:
            self.alive.append((str(func), self.watched() is not None))
        return func(*args, **kwargs or {})


@pytest.mark.skipif(
    not hasattr(torch.autograd.Function, "boxed_grads_call"), reason="torch 2.11 keeps it"
)
def test_a_gradient_is_freed_after_its_last_use() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    lowered = remat.lower(keep_all(traced(model, X)), model)
    with Alive() as alive:
        out = lowered(X)
        out.register_hook(alive.watch)
        out.square().sum().backward()
    assert ("aten.tanh_backward.default", True) in alive.alive
    product = [name for name, _ in alive.alive].index("aten.mm.default")
    assert alive.alive[product] == ("aten.mm.default", False)


def test_saved_tensors_have_no_autograd_history() -> None:
    """Nor are they views of another tensor, which some kernels return; an output has its
    history."""
    tensor = torch.rand(2, 3)
    view, unused_workspace = tensor.t(), None
    assert _detached_unless_output(tensor, ()) is tensor
    saved = _detached_unless_output(view, ())
    assert not saved._is_view()
    assert saved.data_ptr() == tensor.data_ptr()
    assert saved.stride() == (1, 3)
    assert _detached_unless_output(view, {id(view)}) is view
    assert _detached_unless_output(unused_workspace, ()) is None  # type: ignore[arg-type]


class Dropouts(nn.Module):
    """A model with as many RNG states as dropouts."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.5)
        return x.square().mean()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_rng_state_is_saved_for_each_replay(count: int) -> None:
    model = Dropouts(count)
    program = recompute_all(traced(copy.deepcopy(model), X))
    assert len(program.rng_states) == count
    lowered = remat.lower(program, copy.deepcopy(model))
    for m in (model, lowered):
        torch.manual_seed(3)
        loss = m(X)
        loss.backward()
    assert len(loss.grad_fn.rng_states) == count, (
        "stored separately, as CUDA's states are no tensors"
    )
    assert_same_gradients(lowered, model)


class Logits(WithParts, body=(6, 64), head=(64, 300)):
    """Returns its loss and what it is computed from; may store that as well."""

    logits: torch.Tensor | None = None

    def __init__(self, *, is_stored: bool = False) -> None:
        super().__init__()
        self.is_stored = is_stored

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        if self.is_stored:
            self.logits = 2 * logits
            return {"loss": logits.square().mean()}
        return {"loss": logits.square().mean(), "logits": 2 * logits}


def warnings_of_steps(
    program: Program, model: nn.Module, releases: Iterable[bool], caplog: pytest.LogCaptureFixture
) -> list[int]:
    """Lower a program for a model, and run a step for each of `releases`: True if its outputs are
    freed before the backward. Return the numbers of the steps that log a warning."""
    lowered, warned = remat.lower(program, model), list[int]()
    for number, is_released in enumerate(releases):
        caplog.clear()
        outputs = lowered(X)
        loss = outputs["loss"]
        if is_released:
            outputs.clear()
            model.logits = None
        loss.backward()
        if any('pass outputs="dropped"' in message for message in caplog.messages):
            warned.append(number)
    return warned


def test_outputs_that_are_released_before_each_backward_are_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After three such steps in a row, once for a model."""
    model = Logits()
    program = recompute_all(traced(model, X))
    releases = [True, True, False, *([True] * 8)]
    assert warnings_of_steps(program, model, releases, caplog) == [5]
    assert warnings_of_steps(program, model, releases, caplog) == []
    assert warnings_of_steps(program, Logits(), [True] * 8, caplog) == [2]


@pytest.mark.parametrize("kind", ["nothing is recomputed", "planned so", "stored", "small"])
def test_released_outputs_that_cost_nothing_are_not_reported(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Logits(is_stored=kind == "stored")
    outputs = "dropped" if kind == "planned so" else "held"
    trace = remat.measure(remat.trace(model, X, outputs=outputs), COSTS)
    program = (keep_all if kind == "nothing is recomputed" else recompute_all)(trace)
    if kind == "small":
        program = program.model_copy(update={"predicted_peak_bytes": 1 << 30})
    assert warnings_of_steps(program, model, [True] * 5, caplog) == []


# These warnings are about the compiler's tracing, and its speed on Python 3.13.0.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:Guards may run slower")
def test_a_compiled_caller_does_not_trace_into_the_step() -> None:
    """The code around the module is compiled; a warning of the compiler would fail this test."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    gm = remat.optimize(copy.deepcopy(model), "100%", (X,), costs=COSTS)

    def loss(module: nn.Module) -> torch.Tensor:
        return module(X * 2).sum()

    loss(model).backward()
    torch.compile(loss, backend="eager")(gm).backward()
    assert_same_gradients(gm, model)
