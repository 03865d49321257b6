"""The assumptions of a program about a model and a call: each difference is an error that names
it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.helpers.programs import keep_all, traced
from tests.helpers.training.models import WithParts
from torch import nn

import remat
from remat.documents.program import Program
from remat.errors import GuardError
from remat.frontend.common.pytree import flatten
from remat.frontend.runtime.guards import ModelTracker, PlaceholderBinding, check_call

X, Y = torch.rand(4, 6), torch.rand(4, 6)


class Net(nn.Module):
    """Parameters of which one is frozen and two are tied; buffers, a constant, two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        weights = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.5, 2.0])
        h = self.second(torch.tanh(self.first(x) * weights)) + y
        return self.dropout(self.norm(h)).square().mean() * scale


@pytest.fixture(scope="module")
def program() -> Program:
    """A program whose second input requires a gradient, and whose first does not."""
    return keep_all(traced(Net(), X, torch.rand(4, 6, requires_grad=True)))


def check(program: Program, model: nn.Module, *args: object, **kwargs: object) -> None:
    leaves, structure = flatten((args, kwargs), "")
    check_call(program, structure, leaves, ModelTracker(model))


def test_a_call_as_planned_passes_the_guards(program: Program) -> None:
    y = torch.rand(4, 6, requires_grad=True)
    check(program, Net(), X, y)
    check(program, Net(), X, y.detach())  # its gradient is computed but not used


INPUTS: dict[str, tuple[torch.Tensor, str]] = {
    "more rows": (torch.rand(5, 6), r"shape \(5, 6\) instead of \(4, 6\)"),
    "fewer rows": (torch.rand(3, 6), r"shape \(3, 6\) instead of \(4, 6\)"),
    "wider": (torch.rand(4, 6).double(), "dtype float64 instead of float32"),
    "narrower": (torch.rand(4, 6).bfloat16(), "dtype bfloat16 instead of float32"),
    "turned": (torch.rand(6, 4).t(), r"stride \(1, 4\) instead of \(6, 1\)"),
    "elsewhere": (torch.rand(4, 6, device="meta"), "device meta instead of cpu"),
}


@pytest.mark.parametrize("change", INPUTS)
def test_another_input_is_refused(program: Program, change: str) -> None:
    x, message = INPUTS[change]
    with pytest.raises(GuardError, match=r"input \[0\]\[0\] differs .*" + message):
        check(program, Net(), x, Y)


def test_inputs_are_named_in_errors(program: Program) -> None:
    with pytest.raises(GuardError, match=r"input \[0\]\[1\] differs.*\(1, 6\)"):
        check(program, Net(), X, X[:1])


STATE: dict[str, tuple[Callable[[Net], object], str]] = {
    "frozen": (
        lambda net: net.second.bias.requires_grad_(False),
        "parameter second.bias differs .*requires_grad False instead of True",
    ),
    "no longer frozen": (
        lambda net: net.first.bias.requires_grad_(True),
        "parameter first.bias differs .*requires_grad True instead of False",
    ),
    "a wider parameter": (
        lambda net: setattr(net.second, "bias", nn.Parameter(torch.rand(7))),
        r"parameter second.bias differs .*shape \(7,\) instead of \(6,\)",
    ),
    "a longer buffer": (
        lambda net: setattr(net.norm, "running_mean", torch.rand(7)),
        r"buffer norm.running_mean differs .*shape \(7,\)",
    ),
    "a buffer with a gradient": (
        lambda net: net.norm.running_mean.requires_grad_(),
        "buffer norm.running_mean differs .*requires_grad True",
    ),
    "no longer tied": (
        lambda net: setattr(net.second, "weight", nn.Parameter(net.first.weight.detach().clone())),
        r"second.weight and first.weight are tied \(one tensor\); in this model they are not",
    ),
    "a parameter is gone": (
        lambda net: setattr(net.second, "bias", None),
        "a parameter 'second.bias'; this Net has none",
    ),
    "a buffer is gone": (
        lambda net: setattr(net.norm, "running_var", None),
        "a buffer 'norm.running_var'; this Net has none",
    ),
    "a module is gone": (lambda net: delattr(net, "norm"), "this Net has none"),
    "a buffer is a parameter": (
        lambda net: (
            delattr(net.norm, "running_var"),
            setattr(net.norm, "running_var", nn.Parameter(torch.ones(6))),
        ),
        "a buffer 'norm.running_var'; this Net has none",
    ),
}


@pytest.mark.parametrize("change", STATE)
def test_another_model_is_refused(program: Program, change: str) -> None:
    """When the program is bound to it, and at a call if the model has changed since."""
    do, message = STATE[change]
    net = Net()
    PlaceholderBinding(program, net)
    check(program, net, X, Y)
    do(net)
    with pytest.raises(GuardError, match=message):
        PlaceholderBinding(program, net)
    with pytest.raises(GuardError, match=message):
        check(program, net, X, Y)


def test_an_input_that_newly_requires_a_gradient_is_refused() -> None:
    """Such a step would silently not train what is behind the input or the parameter."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    model[0].requires_grad_(False)
    lowered = remat.lower(keep_all(traced(model, X)), model)
    lowered(X).sum().backward()
    with pytest.raises(GuardError, match=r"input \[0\]\[0\] requires a gradient, and the program"):
        lowered(X.clone().requires_grad_())
    model[0].requires_grad_(True)
    with pytest.raises(GuardError, match=r"parameter 0.weight .*requires_grad True instead of F"):
        lowered(X)
    model[0].requires_grad_(False)
    lowered(X).sum().backward()


class Reads(WithParts, layer=(6, 1)):
    """A module that has a gradient for its first input only."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * y.detach()).sum() + z.sum()


def test_an_input_without_gradient_in_the_model_has_none_in_the_program() -> None:
    model = Reads()
    x, y = torch.rand(4, 6, requires_grad=True), torch.rand(4, 6, requires_grad=True)
    program = keep_all(traced(model, x, y, X))
    assert [p.requires_grad for p in program.placeholders if p.kind == "input"] == [
        True, True, False,
    ]  # fmt: skip
    check(program, model, x, y, X)
    with pytest.raises(GuardError, match=r"input \[0\]\[2\] requires a gradient"):
        check(program, model, x, y, x.detach().clone().requires_grad_())
    # As in documents from before inputs had this field.
    untold = tuple(p.model_copy(update={"requires_grad": False}) for p in program.placeholders[2:])
    old = program.model_copy(update={"placeholders": (*program.placeholders[:2], *untold)})
    check(old, model, x, y.detach(), X)
    with pytest.raises(GuardError, match=r"input \[0\]\[1\] requires a gradient"):
        check(old, model, x, y, X)


def test_another_python_value_is_refused(program: Program) -> None:
    for wrong in (0.5, 2.0):
        with pytest.raises(GuardError, match="structure or in a Python value"):
            check(program, Net(), X, Y, wrong)
    with pytest.raises(GuardError, match="structure or in a Python value"):
        check(program, Net(), X)


def test_autocast_is_part_of_a_program(program: Program) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(GuardError, match=r"autocast is \('cpu:bfloat16',\), .*autocast off;"):
            check(program, Net(), X, Y)
        model = nn.Linear(6, 6)
        other = keep_all(traced(model, X))
        check(other, model, X)
    with pytest.raises(GuardError, match=r"autocast is off, .*with \('cpu:bfloat16',\);"):
        check(other, model, X)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(GuardError, match=r"'cpu:float16',.*'cpu:bfloat16',"),
    ):
        check(other, model, X)


FLAGS: dict[str, Callable[[Net], object]] = {
    "in training": lambda net: net.train(),
    "in evaluation": lambda net: net.eval(),
    "its dropout in evaluation": lambda net: net.dropout.eval(),
    "its norm in evaluation": lambda net: net.norm.eval(),
    "only its dropout in training": lambda net: (net.eval(), net.dropout.train()),
}


@pytest.mark.parametrize("planned", FLAGS)
def test_training_flags_are_part_of_a_program(planned: str) -> None:
    net = Net()
    FLAGS[planned](net)
    program = keep_all(traced(net, X, Y))
    for called, do in FLAGS.items():
        net = Net()
        do(net)
        if called == planned:
            check(program, net, X, Y)
            continue
        with pytest.raises(GuardError, match="training flags"):
            check(program, net, X, Y)


def test_a_binding_reads_the_current_tensors(program: Program) -> None:
    net = Net()
    binding = PlaceholderBinding(program, net)
    net.load_state_dict({name: t.clone() for name, t in net.state_dict().items()}, assign=True)
    net.second.weight = net.first.weight
    tensors_by_target = dict(
        zip([p.target for p in program.placeholders], binding.tensors([X, Y]), strict=False)
    )
    assert tensors_by_target["first.weight"] is net.first.weight
    assert tensors_by_target["norm.running_mean"] is net.norm.running_mean
    assert tensors_by_target["0"] is X
    assert tensors_by_target["1"] is Y
    net.norm.running_mean = None
    with pytest.raises(GuardError, match="the model's running_mean is gone"):
        binding.tensors([X, Y])


# -- the tracker ----------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 300])
def test_a_model_is_traversed_only_after_a_change(more: int) -> None:
    """However many modules it has."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), *(nn.Identity() for _ in range(more)))
    tracker = ModelTracker(model)

    def walks() -> bool:
        before = tracker.parameters
        tracker.refresh()
        assert [*map(id, tracker.parameters)] == [*map(id, model.parameters())]
        return tracker.parameters is not before

    assert not walks()
    model.append(nn.Linear(2, 2))
    assert walks()
    assert not walks()
    del model[-1]
    assert walks()
    model[0].weight = nn.Parameter(torch.rand(2, 2))
    assert walks()
    model[0].register_parameter("bias", None)
    assert walks()
    model[1].register_parameter("last", nn.Parameter(torch.rand(2)))
    assert walks()
    del model[1].last
    assert walks()
    assert not walks()


def test_unchanged_state_is_the_same_object() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Tanh())
    tracker = ModelTracker(model)
    for change in (
        lambda: None,
        lambda: model.requires_grad_(False),
        lambda: model.requires_grad_(True),
        lambda: model[1].eval(),
        lambda: model[1].train(),
        lambda: model[2].eval(),
        lambda: model.double(),
    ):
        before = tracker.parameter_properties(), tracker.training_exceptions()
        assert tracker.parameter_properties() is before[0]
        assert tracker.training_exceptions() is before[1]
        change()
        after = tracker.parameter_properties(), tracker.training_exceptions()
        assert after == (
            ModelTracker(model).parameter_properties(),
            ModelTracker(model).training_exceptions(),
        )
    assert before != after


def test_modules_in_another_mode_than_their_model_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Tanh())
    tracker = ModelTracker(model)
    assert tracker.training_exceptions() == ()
    model[1].eval()
    assert tracker.training_exceptions() == ("1",)
    model[0].eval()
    model[2].eval()
    assert tracker.training_exceptions() == ("0", "1", "2")
    model.training = False
    assert tracker.training_exceptions() == ()
    model[1].train()
    assert tracker.training_exceptions() == ("1",)


def test_a_tracker_reports_whether_any_parameter_trains() -> None:
    model = nn.Linear(2, 2)
    tracker = ModelTracker(model)
    assert tracker.has_trainable_parameters is True
    assert tracker.has_gradients is False
    model.bias.requires_grad_(False)
    model.bias.grad = torch.zeros(2)
    assert tracker.has_trainable_parameters is True
    assert tracker.has_gradients is False, "frozen parameters get no gradient"
    model.weight.grad = torch.zeros(2, 2)
    assert tracker.has_gradients is True
    model.requires_grad_(False)
    assert tracker.has_trainable_parameters is False
