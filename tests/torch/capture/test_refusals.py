"""Steps that cannot be captured are refused with the reason, and the model is as before."""

from __future__ import annotations

import math
import random
import runpy
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.training.models import FAMILIES, Mlp, WithParts
from torch import nn

import remat
from remat.frontend.capture.model import forward_checks

TABLE = torch.randn(600, 4)

Function = Callable[[Any, torch.Tensor], torch.Tensor]


class Step(nn.Module):
    """A linear layer on what a function returns for the module and its input."""

    calls: torch.Tensor
    last: Any
    mean: torch.Tensor

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        count = torch.zeros(4)
        self.register_buffer("count", count)
        self.register_buffer("part", count[:2])
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(0, 4))
        self.mask = torch.ones(2, 2)
        self.is_ready = False
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.function(self, x))


class WritesInBackward(torch.autograd.Function):
    """Adds one to a tensor in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.count.add_(1)
        return gradients[0] * 2, None


def branches(module: Step, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def branches_on_constant_after(write: Callable[[torch.Tensor], object]) -> Function:
    """Return a function that branches on a constant tensor into which `write` writes."""

    def function(module: Step, x: torch.Tensor) -> torch.Tensor:
        flags = torch.zeros(4)
        write(flags)
        return x if flags.sum() > 0 else -x

    return function


def writes_into_the_tensor_of_an_array(module: Step, x: torch.Tensor) -> torch.Tensor:
    flags = torch.zeros(4)
    array = flags.numpy()
    flags.add_(1)
    return x * float(array[0]) * flags


def replaces_a_buffer(module: Step, x: torch.Tensor) -> torch.Tensor:
    module.seen = torch.cat([module.seen, x.detach()])
    return x


def registers_a_buffer(module: Step, x: torch.Tensor) -> torch.Tensor:
    if "mean" not in module._buffers:
        module.register_buffer("mean", x.detach().mean())
    return x - module.mean


def stores_a_mask(module: Step, x: torch.Tensor) -> torch.Tensor:
    if module.mask.shape[0] < x.shape[0]:
        module.mask = torch.tril(torch.ones(x.shape[0], x.shape[0]))
    return module.mask @ x


def writes_in_the_first_call(module: Step, x: torch.Tensor) -> torch.Tensor:
    if not module.is_ready:
        module.is_ready = True
        module.calls.copy_(x.mean())
    return x - module.calls


def raises(module: Step, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("compiled" if torch.compiler.is_compiling() else "eager")


def raises_in_eager_mode(module: Step, x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return x
    raise ValueError("an odd number of rows")


REFUSED: dict[str, tuple[Function, str]] = {
    "shared memory": (lambda m, x: x + m.count.add_(1), "buffer count, which shares memory with"),
    "shape": (lambda m, x: x.t_(), "changes shape or strides of input 0 in place"),
    "write in the backward": (
        lambda m, x: WritesInBackward.apply(m.linear(x), m.calls),
        "backward of the model writes in place",
    ),
    "numpy": (
        lambda m, x: torch.from_numpy(x.detach().numpy()),
        "Tensor.numpy of a tensor without data",
    ),
    "tolist": (
        lambda m, x: torch.tensor(x.tolist()),
        "a branch, index or shape depends on tensor values",
    ),
    "address": (lambda m, x: x * x.data_ptr(), "Tensor.data_ptr of a tensor without data"),
    "backward": (lambda m, x: (m.linear(x).sum().backward(), x)[1], r"calls backward\(\)"),
    "write into NumPy's array": (
        branches_on_constant_after(lambda t: t.numpy().fill(1)),
        "writes into memory that a constant tensor shares with NumPy",
    ),
    "write into the tensor of NumPy's array": (
        writes_into_the_tensor_of_an_array,
        "writes into memory that a constant tensor shares with NumPy",
    ),
    "higher-order operator": (
        lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
        "uses cond, which is not a single operator",
    ),
    "branch": (branches, r"test_refusals.py:\d+ .*if x.sum\(\) > 0.*Remedy"),
    "large constant": (lambda m, x: x * TABLE[0], "register it as a buffer"),
    "buffer of another shape": (replaces_a_buffer, "replaces its buffer 'seen'"),
    "new buffer": (registers_a_buffer, "the forward of the model registers a buffer"),
    "stored mask": (stores_a_mask, "a tensor is used that is no parameter, buffer or input of"),
    "first call": (writes_in_the_first_call, "only the first call of Step writes into buffer cal"),
    "error": (raises, "ValueError: eager"),
    "error in eager mode": (raises_in_eager_mode, "an odd number of rows"),
}


CONSTANT_WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "view": lambda t: t[:2].copy_(torch.ones(2)),
    "item": lambda t: t.__setitem__(0, 1),
    "data of a view": lambda t: t.view(2, 2).data.fill_(1),
    "data": lambda t: setattr(t, "data", torch.ones(4)),
    "real part": lambda t: setattr(t, "real", torch.ones(4)),
    "operator": lambda t: torch.ops.aten.add_.Tensor(t, 1),
    "storage": lambda t: t.set_(torch.ones(4)),
    "out": lambda t: torch.add(torch.ones(4), 1, out=t),
    "inplace": lambda t: nn.functional.threshold(t, 1, 1, True),
    "statistics": lambda t: nn.functional.batch_norm(
        torch.ones(2, 4), t, torch.ones(4), training=True
    ),
    "list": lambda t: torch._foreach_add_([t], 1.0),
}
_CHANGED = "seeds a default generator of torch, or restores its state"


def samples_in_a_fork(module: Step, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        return x * torch.rand(4)


def rewinds(module: Step, x: torch.Tensor) -> torch.Tensor:
    state = torch.default_generator.get_state()
    x = x * torch.rand(4).bernoulli_()
    torch.default_generator.set_state(state)
    return x * torch.rand(4)


def rewinds_python(module: Step, x: torch.Tensor) -> torch.Tensor:
    state = random.getstate()
    x = x * random.random()
    random.setstate(state)
    return x


def rewinds_numpy(module: Step, x: torch.Tensor) -> torch.Tensor:
    state = np.random.get_state()
    x = x * np.random.rand()
    np.random.set_state(state)
    return x


GENERATOR_CHANGES: dict[str, tuple[Function, str]] = {
    "fork": (samples_in_a_fork, _CHANGED),
    "state": (rewinds, _CHANGED),
    "seed": (lambda m, x: x * bool(torch.default_generator.seed()), _CHANGED),
    "manual seed": (lambda m, x: x * bool(torch.default_generator.manual_seed(3)), _CHANGED),
    "torch.seed": (lambda m, x: x * torch.seed(), r"calls torch\.seed"),
    "torch.initial_seed": (lambda m, x: x * torch.initial_seed(), r"calls torch\.initial_seed"),
    "Python": (rewinds_python, r"calls random\.setstate"),
    "NumPy": (rewinds_numpy, r"calls numpy\.random\.set_state"),
}
RANDOM_NUMBERS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(()),
    "poisson": lambda: torch.poisson(torch.tensor(30.0)),
    "binomial": lambda: torch.binomial(torch.tensor(30.0), torch.tensor(0.5)),
    "normal": lambda: torch.normal(torch.zeros(()), torch.ones(())),
    "Beta": lambda: torch.distributions.Beta(0.4, 0.4).sample(),
    "Gamma": lambda: torch.distributions.Gamma(0.4, 0.4).sample(),
    "Dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(2)).sample()[0],
    "Categorical": lambda: torch.distributions.Categorical(torch.ones(2)).sample(),
}  # fmt: skip
REFUSED |= {
    f"branch on a constant after a write: {name}": (
        branches_on_constant_after(write), "depends on tensor values",
    )
    for name, write in CONSTANT_WRITES.items()
} | {
    f"generator: {name}": (function, message)
    for name, (function, message) in GENERATOR_CHANGES.items()
} | {
    f"random number: {name}": (
        lambda m, x, sample=sample: x * sample().item(), "depends on tensor values",
    )
    for name, sample in RANDOM_NUMBERS.items()
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_no_plan_can_stand_for_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    model = Step(function)
    before, buffers = dict(vars(model)), dict(model.named_buffers())
    with pytest.raises(remat.TraceError, match=message):
        remat.trace(model, torch.randn(4, 4))
    assert vars(model) == before
    assert all(b is buffers[name] and not b.any() for name, b in model.named_buffers())
    assert not torch._is_functional_tensor(torch.zeros(2))


@pytest.mark.parametrize("value", [math.nan, complex(4, 1), -0.0])
def test_a_value_that_each_call_sets_is_steady(value: Any) -> None:
    def sets(module: Step, x: torch.Tensor) -> torch.Tensor:
        module.last = type(value)(repr(value))
        return x

    model = Step(sets)
    model.last = None
    gm = remat.optimize(model, "100%", torch.ones(4, 4), costs=remat.Roofline("cpu"))
    gm(torch.ones(4, 4)).sum().backward()
    assert repr(model.last) == repr(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.device("cpu"), "stores in last is a device, which cannot be traced"),
        (10**20, "stores in last is an integer of more than 64 bits"),
        ([10**20], r"stores in last: \[0\] is an integer of more than 64 bits"),
    ],
)
def test_a_value_that_no_plan_can_store_is_refused(value: Any, message: str) -> None:
    def sets(module: Step, x: torch.Tensor) -> torch.Tensor:
        module.last = value
        return x

    with pytest.raises(remat.TraceError, match=message):
        remat.trace(Step(sets), torch.ones(4, 4))


def test_a_fork_without_random_numbers_is_captured_and_restores_the_generator() -> None:
    def forks(module: Step, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            x = x * 2
        return nn.functional.dropout(x) * torch.rand(4).uniform_()

    model, before = Step(forks), torch.get_rng_state()
    assert remat.trace(model, torch.ones(4, 4)).nodes
    assert torch.equal(torch.get_rng_state(), before)


def test_a_write_of_the_first_call_is_none_of_later_calls() -> None:
    model = Step(writes_in_the_first_call)
    model(torch.randn(4, 4))
    trace = remat.trace(model, torch.ones(4, 4))
    assert not any(node.target == "aten.copy_.default" for node in trace.nodes)


@pytest.mark.parametrize(
    ("inputs", "kwargs", "message"),
    [
        ((), None, "do not fit Mlp.forward"),
        ((torch.zeros(2, 32), 1.0, 2.0), None, "too many positional"),
        ((torch.zeros(2, 32),), {"colour": 1}, "colour"),
        ("text", None, "must be a tuple"),
        ((torch.zeros(2, 33),), None, "cannot be captured"),
        ((torch.zeros(2, 32), object()), None, "is a object, which cannot be traced"),
    ],
)
def test_inputs_that_the_forward_does_not_accept_are_refused(
    inputs: object, kwargs: object, message: str
) -> None:
    with pytest.raises(remat.TraceError, match=message):
        remat.trace(Mlp(), inputs, kwargs)  # type: ignore[arg-type]


def test_a_model_without_gradients_or_no_model_is_refused() -> None:
    class Detached(WithParts, linear=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).detach()

    cases: list[tuple[Any, torch.Tensor, str]] = [
        (Mlp().requires_grad_(False), torch.randn(4, 32), "no parameter of Mlp"),
        (Detached(), torch.randn(4, 4), "no output of the model depends"),
        (lambda x: x, torch.zeros(1), "expected a torch.nn.Module"),
    ]
    for model, x, message in cases:
        with pytest.raises(remat.TraceError, match=message):
            remat.trace(model, x)


def test_a_cache_in_the_outputs_is_refused_with_a_remedy() -> None:
    case = FAMILIES["gpt2"]()
    case.model.config.use_cache = True  # type: ignore[union-attr]
    with pytest.raises(remat.TraceError, match="use_cache=False"):
        remat.trace(case.model, case.kwargs)


BRANCH = """
from statistics import median

from torch import nn


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y * median([y.sum(), y.max()])
"""


@pytest.mark.parametrize("folder", ["project", "remat", "torch", "remat/torch", "site-packages"])
def test_errors_name_the_users_line_in_a_folder_of_any_name(folder: str, tmp_path: Path) -> None:
    """The line is found by where torch, remat and Python are installed, not by a word in its
    path."""
    file = tmp_path / folder / "branch.py"
    file.parent.mkdir(parents=True)
    file.write_text(BRANCH)
    module = runpy.run_path(str(file))
    with pytest.raises(remat.TraceError) as caught:
        remat.trace(module["Branch"](), torch.randn(2, 4))
    assert f"captured at {file}:14 (in forward: return y * median" in str(caught.value)


class TokenLoop(WithParts, weight=lambda: nn.Parameter(torch.ones(2))):
    steps = 49

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.steps):
            x = x * self.weight
        return x.sum()


def test_a_loop_over_too_many_steps_ends_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_checks, "MAX_CALLS", 50)
    model = TokenLoop()
    assert remat.trace(model, torch.randn(2)).nodes  # and one sum
    model.steps = 50
    with pytest.raises(remat.TraceError, match=r"than 50 operations .*refusals\.py:\d+ \(in forw"):
        remat.trace(model, torch.randn(2))


# -- tensors that a call stores for the next one --------------------------------------------


class Statistics:
    """An object that stores tensors."""

    def __init__(self) -> None:
        self.means: list[torch.Tensor] = []


class Slots(Statistics):
    """The same without a dictionary of attributes of its own."""

    __slots__ = ("means",)


@pytest.mark.parametrize("stores", [Statistics, Slots, deque, list], ids=lambda cls: cls.__name__)
def test_a_tensor_that_a_call_stores_is_not_read_by_the_next(stores: Callable[[], Any]) -> None:
    """The mean of the first batch would be computed in each step."""

    class Normalizes(WithParts, linear=(4, 4), statistics=stores):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            means = getattr(self.statistics, "means", self.statistics)
            if not means:
                means.append(x.mean())
            return self.linear(x - means[0])

    model = Normalizes()
    with pytest.raises(remat.TraceError, match="adds a tensor to statistics"):
        remat.trace(model, torch.randn(4, 4))
    model(torch.randn(4, 4)).sum().backward()  # on no tensor of the capture
    assert model.linear.weight.grad is not None


LAST: list[torch.Tensor] = []
mask: torch.Tensor | None = None


class MasksByGlobal(WithParts, linear=(4, 4)):
    """A model that computes a tensor in the first call, and keeps it in a global variable."""

    @torch.autocast("cpu", enabled=False)  # the function is in a wrapper
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global mask
        if mask is None:
            mask = torch.ones(4, 4).triu()
        return self.linear(x * mask)


class StoresInGlobal(WithParts, linear=(4, 4)):
    """A model that leaves its last hidden state in a global list, and never reads it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LAST[:] = [self.linear(x)]
        return LAST[0].tanh()


def test_a_tensor_in_a_global_variable_is_not_read_by_the_next_call() -> None:
    model, x = MasksByGlobal(), torch.randn(4, 4)
    with pytest.raises(remat.TraceError, match=r"stores a tensor in .*\.mask, which a planned"):
        remat.trace(model, x)
    assert mask is None
    model(x).sum().backward()
    assert isinstance(mask, torch.Tensor)


def test_a_tensor_of_the_capture_does_not_stay_in_a_global_variable() -> None:
    with pytest.raises(remat.TraceError, match=r"stores a tensor in .*\.LAST, which a planned"):
        remat.trace(StoresInGlobal(), torch.randn(4, 4))
    assert not LAST
