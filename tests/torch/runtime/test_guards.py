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
from remat.frontend.runtime.guards import (
    CallSignature,
    ModelTracker,
    PlaceholderBinding,
    call_signature,
    check_call,
    signature_changes,
)

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


REBINDS: dict[str, tuple[Callable[[Net], object], bool]] = {
    "nothing": (lambda net: None, False),
    "another value": (lambda net: net.first.weight.data.zero_(), False),
    "another buffer": (lambda net: setattr(net.norm, "running_mean", torch.rand(6)), False),
    "another parameter": (
        lambda net: setattr(net.second, "bias", nn.Parameter(torch.rand(6))), False,
    ),
    "no longer tied": (
        lambda net: setattr(net.second, "weight", nn.Parameter(torch.rand(6, 6))), True,
    ),
    "an equal module": (lambda net: setattr(net, "dropout", nn.Dropout(0.1)), True),
    "one module twice": (lambda net: setattr(net, "second", net.first), True),
    "another class": (lambda net: setattr(net.dropout, "__class__", nn.Identity), True),
    "a new table": (lambda net: setattr(net.norm, "_buffers", {**net.norm._buffers}), True),
}  # fmt: skip


@pytest.mark.parametrize("change", REBINDS)
def test_plans_have_to_be_rebound_unless_only_tensors_were_replaced(change: str) -> None:
    do, is_rebound = REBINDS[change]
    net = Net()
    tracker = ModelTracker(net)
    do(net)
    assert tracker.refresh() == is_rebound
    assert not tracker.refresh()


def test_tied_buffers_have_the_number_of_the_first() -> None:
    net = Net()  # the mean, the variance, the number of batches
    tracker = ModelTracker(net)
    assert tracker.tied_buffers() == ()
    net.norm.running_var = net.norm.running_mean
    assert tracker.tied_buffers() == (0, 0, 2)
    net.norm.running_var = net.norm.num_batches_tracked
    assert tracker.tied_buffers() == (0, 1, 1)
    net.norm.running_mean = None
    assert tracker.tied_buffers() == (0, 0)
    net.norm.running_var = torch.rand(6)
    assert tracker.tied_buffers() == ()


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


# -- the signature of a call ------------------------------------------------------------------


def signature(tracker: ModelTracker, *args: object) -> CallSignature:
    leaves, structure = flatten((args, {}), "")
    return call_signature(tracker, structure, leaves)


def doubled(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output * 2


CHANGES: dict[str, tuple[Callable[[Net], object], list[str]]] = {
    "nothing": (lambda net: None, []),
    "other values": (lambda net: net.norm.reset_parameters(), []),
    "equal tensors": (
        lambda net: net.load_state_dict({n: t.clone() for n, t in net.state_dict().items()}), [],
    ),
    "a planned submodule": (lambda net: remat.enable(net.first, "100%"), []),
    "frozen": (lambda net: net.second.bias.requires_grad_(False), ["parameters"]),
    "a wider parameter": (
        lambda net: setattr(net.second, "bias", nn.Parameter(torch.rand(7))), ["parameters"],
    ),
    "a turned parameter": (
        lambda net: setattr(net.first.weight, "data", torch.rand(6, 6).t()), ["parameters"],
    ),
    "parameters of another type": (
        lambda net: (net.first.bfloat16(), net.second.bfloat16(), net.norm.weight.bfloat16()),
        ["parameters"],
    ),
    "untied": (
        lambda net: setattr(net.second, "weight", nn.Parameter(torch.rand(6, 6))),
        ["parameters", "modules"],
    ),
    "another class": (lambda net: setattr(net.dropout, "__class__", nn.Identity), ["modules"]),
    "a buffer of another type": (
        lambda net: setattr(net.norm, "running_mean", torch.rand(6).double()), ["buffers"],
    ),
    "a longer buffer": (
        lambda net: setattr(net.norm, "running_mean", torch.rand(7)), ["buffers"],
    ),
    "a strided buffer": (
        lambda net: setattr(net.norm, "running_mean", torch.rand(12)[::2]), ["buffers"],
    ),
    "a buffer elsewhere": (
        lambda net: setattr(net.norm, "running_mean", torch.rand(6, device="meta")), ["buffers"],
    ),
    "no buffer": (lambda net: setattr(net.norm, "running_mean", None), ["buffers"]),
    "tied buffers": (
        lambda net: setattr(net.norm, "running_var", net.norm.running_mean), ["buffers"],
    ),
    "in evaluation": (lambda net: net.eval(), ["training mode"]),
    "a part in evaluation": (lambda net: net.dropout.eval(), ["training mode"]),
    "a gradient": (
        lambda net: setattr(net.second.bias, "grad", torch.ones(6)), ["accumulation of gradients"],
    ),
    "a gradient of a frozen parameter": (
        lambda net: setattr(net.first.bias, "grad", torch.ones(6)), [],
    ),
    "a hook": (lambda net: net.first.register_forward_hook(doubled), ["hooks"]),
    "a hook of the whole model": (lambda net: net.register_forward_hook(doubled), []),
    "a replaced forward": (
        lambda net: setattr(net.first, "forward", net.second.forward), ["replaced methods"],
    ),
    "a replaced method": (
        lambda net: setattr(net.norm, "_check_input_dim", lambda x: None), ["replaced methods"],
    ),
    "an attribute": (lambda net: setattr(net.first, "comment", "new"), []),
    "an attribute of the class": (lambda net: setattr(net.norm, "_version", 3), []),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_signature_of_a_call_changes_with_what_a_plan_depends_on(change: str) -> None:
    """Until that is undone."""
    do, expected = CHANGES[change]
    net = Net()
    tracker = ModelTracker(net, sees_replaced_methods=True)
    before = signature(tracker, X, Y)
    assert signature(tracker, X, Y) == before
    do(net)
    tracker.refresh()
    after = signature(tracker, X, Y)
    assert signature_changes(before, after) == signature_changes(after, before) == expected
    assert after == signature(ModelTracker(net, sees_replaced_methods=True), X, Y)


def test_the_signature_of_a_call_changes_with_its_inputs_and_with_torchs_modes() -> None:
    tracker = ModelTracker(Net())
    before = signature(tracker, X, Y)
    for args in ((X,), (X, Y, 2.0), (X[:3], Y), (X.double(), Y), (X, Y.clone().requires_grad_())):
        assert signature_changes(before, signature(tracker, *args)) == ["inputs"]
    with torch.autocast("cpu", torch.bfloat16):
        assert signature_changes(before, signature(tracker, X, Y)) == ["autocast"]
    with torch.device("meta"):
        changes = signature_changes(before, signature(tracker, X, Y))
    assert changes == ["torch's default dtype or device"]
    torch.set_default_dtype(torch.float64)
    try:
        changes = signature_changes(before, signature(tracker, X, Y))
    finally:
        torch.set_default_dtype(torch.float32)
    assert changes == ["torch's default dtype or device"]
    assert signature(tracker, X, Y) == before


def test_methods_that_libraries_replace_within_a_step_are_no_change() -> None:
    net = Net()
    tracker = ModelTracker(net)
    before = signature(tracker, X, Y)
    net.first.forward = net.second.forward
    assert signature(tracker, X, Y) == before
