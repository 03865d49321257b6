"""Models whose steps read or change something besides their outputs, one for each kind."""

from __future__ import annotations

import array
import itertools
import random
from collections import Counter, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tests.helpers.training import side_effect_module
from tests.helpers.training.models import WithParts
from tests.helpers.training.side_effect_module import Meter, Registry, count_in_default
from torch import nn

WIDTH = 16

Batch = dict[str, Any]


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def three(make: Callable[[], nn.Module]) -> Callable[[], nn.ModuleList]:
    """Return a function that creates three blocks."""
    return lambda: nn.ModuleList(make() for _ in range(3))


class Chain(WithParts, stem=(WIDTH, WIDTH), blocks=three(block)):
    """Residual blocks; subclasses add an effect. `branches_on_data` prevents a capture."""

    branches_on_data = False

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.branches_on_data and float(x.detach().abs().max()) > 1e6:
            x = x * 2
        for layer in self.blocks:
            x = x + layer(x)
        return x

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.hidden(*args, **kwargs).square().mean()


# -- tensors --------------------------------------------------------------------------------


class MomentumEncoder(Chain, target=lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False)):
    """Writes into frozen parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        with torch.no_grad():
            for weight, target in zip(
                self.stem.parameters(), self.target.parameters(), strict=True
            ):
                target.mul_(0.5).add_(weight, alpha=0.5)
            wanted = self.target(x)
        return (h - wanted).square().mean()


class Normed(Chain, norm=lambda: nn.BatchNorm1d(WIDTH)):
    """Updates running statistics in a buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.hidden(x)).square().mean() + self.norm.running_mean.sum()


class ReplacedBuffer(Chain):
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        self.total = self.total + h.detach().mean(0)
        return (h - self.total).square().mean()


class WrittenInput(Chain):
    """Writes into one of its inputs."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        counts.add_(1)
        return self.hidden(x).square().mean() * counts.sum()


class Dropped(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.hidden(x), 0.3).square().mean()


class OwnGenerator(Chain, generator=lambda: torch.Generator().manual_seed(3)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=self.generator)
        return (self.hidden(x) + noise).square().mean()


class RetainedGradient(Chain):
    """Keeps the gradient of a hidden state, for a caller that reads it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.hidden(x)
        return self.last.square().mean()


class RetainedInside(RetainedGradient):
    """Retains the gradient of a hidden state that it stores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        self.last.retain_grad()
        return loss


class ReversedGradient(Chain, strength=1.0):
    """A hook in the forward scales gradients by an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: -self.strength * gradient)
        return h.square().mean()


class ObservedGradient(Chain, norms=list):
    """A hook in the forward collects gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: self.norms.append(gradient.norm()))
        return h.square().mean()


# -- Python values --------------------------------------------------------------------------


class PythonRandom(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x).square().mean() * random.random()


class NumpyRandom(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x).square().mean() * float(np.random.rand())


class OwnPythonGenerators(
    Chain, python=lambda: random.Random(3), numpy=lambda: np.random.default_rng(3)
):
    """Draws from a generator of Python in an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x).square().mean() * self.python.random()


class OwnNumpyGenerator(OwnPythonGenerators):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x).square().mean() * self.numpy.random()


class SparseEmbedding(Chain, embedding=lambda: nn.Embedding(8, WIDTH, sparse=True)):
    """An embedding with a sparse gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(x)) % 8
        return self.hidden(x + self.embedding(rows)).square().mean()


class Tangents(Chain):
    """Calls its blocks inside of transforms of torch.func, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def sum_of_block(row: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](row).square().sum()

        tangent = torch.func.jvp(self.blocks[1], (x,), (torch.ones_like(x),))[1]
        gradients = torch.func.vmap(torch.func.grad(sum_of_block))(x)
        return self.hidden(x).square().mean() + tangent.mean() + gradients.square().mean()


class Checks(Chain):
    """Raises an exception for a batch that does not fit, after it has changed a buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.errors: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if x.shape[1] != WIDTH:
            self.errors.append("width")
            raise ValueError("the batch does not fit")
        return super().forward(x)


class WarmUp(Chain, steps=0):
    """A counter that scales the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.hidden(x).square().mean() * min(1.0, self.steps / 10)


class Counting(Chain, calls=0):
    """A counter that nothing reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class CountingBlock(WithParts, inside=block, calls=0):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inside(x)


class CountingBlocks(Chain, blocks=three(CountingBlock)):
    """A chain of such blocks."""


class Logging(Chain, log=list, recent=lambda: deque(maxlen=2), counts=Counter, seen=set):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        self.log.append(rows)
        self.recent.append(rows)
        self.counts[rows] += 1
        self.seen.add(rows)
        return super().forward(x)


class ParameterAttribute(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.stem.weight
        weight.uses = getattr(weight, "uses", 0) + 1  # type: ignore[attr-defined]
        return super().forward(x)


class ClassAttribute(Chain):
    calls: ClassVar[int] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return super().forward(x)


GLOBAL_CALLS = 0


class GlobalCounter(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global GLOBAL_CALLS
        GLOBAL_CALLS += 1
        return super().forward(x)


def reset_globals(model: nn.Module) -> None:
    global GLOBAL_CALLS, GLOBAL_SCALE
    GLOBAL_CALLS, GLOBAL_SCALE = 0, 1.0
    ClassAttribute.calls, ClassScale.scale = 0, 1.0
    FEATURES.clear()
    side_effect_module.reset()


class ObjectState(Chain, state=lambda: SimpleNamespace(calls=0, inner=SimpleNamespace(rows=[]))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.calls += 1
        self.state.inner.rows.append(len(x))
        return super().forward(x)


class ArrayState(Chain, histogram=lambda: np.zeros(4, dtype=np.int64)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.histogram[len(x) % 4] += 1
        return super().forward(x)


def closure_counter() -> Chain:
    calls = 0

    class ClosureCounter(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x)

        def count(self) -> int:
            return calls

    return ClosureCounter()


class Scaled(Chain):
    """Scales its loss by a number that differs in each call."""

    def number(self) -> float:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x).square().mean() * (1 + 0.1 * self.number())


class OtherClass(Scaled):
    def number(self) -> float:
        return Registry.count()


class HelperModule(Scaled):
    def number(self) -> float:
        return side_effect_module.count_below()


class ModuleInFunction(Scaled):
    def number(self) -> float:
        from tests.helpers.training import side_effect_module as helper

        helper.CALLS += 1
        return helper.CALLS


class HelperObject(Scaled):
    def number(self) -> float:
        return side_effect_module.METER.tick()


class ThreadLocal(Scaled):
    def number(self) -> float:
        local = side_effect_module.LOCAL
        local.calls = getattr(local, "calls", 0) + 1
        return local.calls


class DefaultArgument(Scaled):
    def number(self) -> float:
        return count_in_default()


class FunctionAttribute(Scaled):
    def number(self) -> float:
        return side_effect_module.count_in_attribute()


class GlobalIterator(Scaled):
    def number(self) -> float:
        return next(side_effect_module.NUMBERS)


class Iterators(Scaled):
    """Has iterators in attributes, in a list, in another iterator, and under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = itertools.cycle([1.0, 2.0, 3.0])
        self.steps = [iter(range(100)), enumerate([5.0] * 100)]
        self.pairs = zip(itertools.count(2, 0.5), iter([1.0] * 100), strict=False)
        self.same_factors = self.factors

    def number(self) -> float:
        return (
            next(self.factors)
            + next(self.same_factors)
            + next(self.steps[0])  # type: ignore[arg-type]
            + next(self.steps[1])[0]  # type: ignore[index]
            + next(self.pairs)[0]
        )


class Stream(Scaled):
    def number(self) -> float:
        print("step", file=side_effect_module.STREAM)
        return side_effect_module.STREAM.tell()


class Bytes(Scaled, bytes=lambda: bytearray(2), array=lambda: array.array("d", [0.0])):
    def number(self) -> float:
        self.bytes[0] += 1
        self.array[0] += 1
        return self.bytes[0] + self.array[0]


class BigArray(Scaled):
    """Counts in an array of 2.4 MB, with an element that is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(300_000)
        self.counts[0] = np.nan
        self.objects = np.array([[], "x"], dtype=object)

    def number(self) -> float:
        self.counts[5] += 1
        self.objects[0] = [*self.objects[0], 1]
        return self.counts[5] + len(self.objects[0])


class DeepObject(Scaled):
    """Counts far below an attribute, and in a module that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Meter()
        self.hidden_modules = [CountingBlock()]
        self.root: Any = self.last
        for _ in range(6):
            self.root = SimpleNamespace(below=[self.root])
        del self.last

    def meter(self) -> Meter:
        item = self.root
        while not isinstance(item, Meter):
            item = item.below[0]
        return item

    def number(self) -> float:
        self.hidden_modules[0].calls += 1
        return self.meter().tick() + self.hidden_modules[0].calls


class Initialises(Chain, is_ready=False):
    """Sets a flag in the first call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.is_ready = True
        return super().forward(x)


class StoredTensor(Chain):
    """Leaves tensors in attributes; nothing else reads them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        self.last = h.detach()
        self.statistics = {"mean": h.detach().mean(), "rows": len(x)}
        return h.square().mean()


class AuxiliaryLoss(Chain):
    """Leaves a loss in an attribute, which the training loop adds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        self.auxiliary = h.abs().mean()
        return h.square().mean()


# -- arguments ------------------------------------------------------------------------------


class Normalising(Chain):
    """Replaces an entry of its batch."""

    def forward(self, batch: Batch) -> torch.Tensor:
        batch["weights"] = batch["weights"] / batch["weights"].sum()
        batch["rows"] = len(batch["x"])
        return (self.hidden(batch["x"]).square().mean(1) * batch["weights"]).sum()


class Collecting(Chain):
    """Appends to a list among its arguments, also a nested one."""

    def forward(self, x: torch.Tensor, features: list[Any]) -> torch.Tensor:
        h = self.hidden(x)
        features.append(h)
        features[0].append(h.detach().mean())
        return h.square().mean()


@dataclass
class Example:
    x: torch.Tensor
    weights: torch.Tensor
    rows: int = 0


@dataclass
class CheckedExample(Example):
    def __post_init__(self) -> None:
        self.width = self.x.shape[1]


class WritesFields(Chain):
    """Sets fields of a dataclass, and an attribute that is no field."""

    def forward(self, batch: Any) -> torch.Tensor:
        batch.weights = batch.weights / batch.weights.sum()
        batch.rows += 1
        batch.hidden = self.hidden(batch.x)
        return (batch.hidden.square().mean(1) * batch.weights).sum()


class WritesItems(Chain):
    """Sets items of its batch."""

    def forward(self, batch: Any) -> torch.Tensor:
        batch["hidden"] = self.hidden(batch["x"])
        batch["rows"] = batch.get("rows", 0) + 1
        return batch["hidden"].square().mean()


def _contents(args: tuple[Any, ...]) -> Any:
    values = vars(args[0]) if isinstance(args[0], Example) else args[0]
    return {name: values[name] for name in values}


# -- values that the training loop changes ---------------------------------------------------


class LossWeight(Chain, weight=0.5):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        return h.square().mean() + self.weight * h.mean()


class DropoutSchedule(Chain, dropout=lambda: nn.Dropout(0.1)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.hidden(x)).square().mean()


class Adapters(Chain):
    """Two adapters with scales, of which one is active."""

    def __init__(self) -> None:
        super().__init__()
        self.active = ["first"]
        self.scales = {"first": 1.0, "second": 1.0}
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in self.scales})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        for name in self.active:
            h = h + self.scales[name] * self.adapters[name](x)
        return h.square().mean()


class Configured(Chain, config=lambda: SimpleNamespace(power=2, unused=0)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x).abs().pow(self.config.power).mean()


class Activation(Chain, activation=lambda: torch.tanh):
    """A function in an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.hidden(x)).square().mean()


GLOBAL_SCALE = 1.0


class GlobalScale(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x).square().mean() * GLOBAL_SCALE


class ClassScale(Chain):
    scale: ClassVar[float] = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x).square().mean() * self.scale


class BlockScale(WithParts, inside=block, scale=1.0):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x) * self.scale


class BlockScales(Chain, blocks=three(BlockScale)):
    """A chain of such blocks."""


class TwoHeads(Chain, used=(WIDTH, 2), unused=(WIDTH, 2)):
    """Two outputs, of which the loss uses one."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.hidden(x)
        return self.used(h), self.unused(h)


# -- hooks ----------------------------------------------------------------------------------

FEATURES: dict[str, torch.Tensor] = {}


def store_in_global(module: nn.Module, args: Any, result: torch.Tensor) -> None:
    FEATURES["h"] = result


class FeatureHook:
    """A hook that collects features, for a loss that compares them."""

    def __init__(self) -> None:
        self.features: list[torch.Tensor] = []

    def __call__(self, module: nn.Module, args: Any, result: torch.Tensor) -> None:
        self.features.append(result)


class FeatureModule(nn.Module):
    """A module outside of the model, with a method as a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def store(self, module: nn.Module, args: Any, result: torch.Tensor) -> None:
        self.last = result.abs()


READERS: WeakKeyDictionary[nn.Module, Callable[[], Any]] = WeakKeyDictionary()
"""For each `Hooked`: returns what its hook has stored. It is not reachable from the model."""


class Hooked(Chain):
    """A hook on a block stores its result."""

    def __init__(self, hook: Callable[..., None], features: Callable[[], Any]) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(hook)
        READERS[self] = features


def _hook_in_closure() -> Hooked:
    stored: dict[str, torch.Tensor] = {}
    return Hooked(lambda module, args, result: stored.update(h=result.tanh()), stored.values)


def _hook_object() -> Hooked:
    hook = FeatureHook()
    return Hooked(hook, lambda: hook.features)


def _hook_of_other_module() -> Hooked:
    other = FeatureModule()
    return Hooked(other.store, lambda: [] if other.last is None else [other.last])


def _loss_with_features(out: torch.Tensor, model: Hooked, args: Any) -> torch.Tensor:
    *_, last = READERS[model]()
    return out + 0.1 * last.abs().mean()


@dataclass(frozen=True)
class Effect:
    """A kind of side effect.

    `make` returns the model, `state` what the effect has changed so far. `change` is what the
    training loop does before step number `step`. `inputs` are the model's arguments for a batch,
    and `loss` is computed from the outputs, the model and the arguments. `observe` is what the
    arguments contain after a step. Where it is not "", plans of whole models raise an error with
    the words `refused` instead.
    """

    make: Callable[[], Any]
    state: Callable[[Any], Any] = lambda model: None
    change: Callable[[Any, int], object] = lambda model, step: None
    inputs: Callable[[torch.Tensor], tuple[Any, ...]] = lambda x: (x,)
    loss: Callable[[Any, Any, tuple[Any, ...]], torch.Tensor] = lambda out, model, args: out
    refused: str = ""
    observe: Callable[[tuple[Any, ...]], Any] = lambda args: args


def _set(path: str, value_of: Callable[[int], Any]) -> Callable[[Any, int], None]:
    """Return a change of the attribute at a dotted path of the model."""

    def change(model: Any, step: int) -> None:
        *owners, name = path.split(".")
        owner = model
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, value_of(step))

    return change


def _change_adapters(model: Adapters, step: int) -> None:
    model.active[:] = ["second"] if step % 2 else ["first"]
    model.scales["first"] = 1.0 + step // 2


def _change_global(model: nn.Module, step: int) -> None:
    global GLOBAL_SCALE
    GLOBAL_SCALE = 1.0 + step % 2


def _change_class(model: nn.Module, step: int) -> None:
    ClassScale.scale = 1.0 + step % 2


def _freeze(model: Chain, step: int) -> None:
    model.stem.requires_grad_(step % 2 == 0)


def _attach_hooks(model: Chain) -> Chain:
    model.seen = seen = Counter[str]()  # type: ignore[assignment]

    def count(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            seen[name] += 1

        return hook

    model.register_forward_hook(count("root"))
    model.stem.weight.register_hook(count("gradient"))
    next(model.blocks[0].parameters()).register_post_accumulate_grad_hook(count("accumulated"))
    return model


class AppendedTensors(Chain, norms=list):
    """Appends a tensor to a list in each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        self.norms.append(result.detach().norm())
        return result


_COUNTS = "which a planned step would not do"
_RANDOM = "which a plan would do once"


def _stored_by_hook(make: Callable[[], Hooked]) -> Effect:
    words = "Hooked stores a tensor in"
    return Effect(
        make,
        lambda m: [feature.detach().clone() for feature in READERS[m]()],
        loss=_loss_with_features,
        refused=words,
    )


_COUNTED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "warm-up": (WarmUp, lambda m: m.steps),
    "counter": (Counting, lambda m: m.calls),
    "counters in blocks": (CountingBlocks, lambda m: [b.calls for b in m.blocks]),
    "lists": (Logging, lambda m: (list(m.log), list(m.recent), dict(m.counts), set(m.seen))),
    "attribute of a parameter": (ParameterAttribute, lambda m: getattr(m.stem.weight, "uses", 0)),
    "class attribute": (ClassAttribute, lambda m: ClassAttribute.calls),
    "global variable": (GlobalCounter, lambda m: GLOBAL_CALLS),
    "object": (ObjectState, lambda m: (m.state.calls, list(m.state.inner.rows))),
    "array": (ArrayState, lambda m: m.histogram.tolist()),
    "closure": (closure_counter, lambda m: m.count()),
    "class of a helper": (OtherClass, lambda m: (Registry.calls, list(Registry.seen))),
    "helper module": (
        HelperModule,
        lambda m: (side_effect_module.CALLS, list(side_effect_module.ROWS)),
    ),
    "module imported in a function": (ModuleInFunction, lambda m: side_effect_module.CALLS),
    "object of a helper": (HelperObject, lambda m: side_effect_module.METER.ticks),
    "thread-local": (ThreadLocal, lambda m: dict(vars(side_effect_module.LOCAL))),
    "default argument": (
        DefaultArgument,
        lambda m: [list(d) for d in count_in_default.__defaults__ or ()],
    ),
    "attribute of a function": (
        FunctionAttribute,
        lambda m: dict(vars(side_effect_module.count_in_attribute)),
    ),
    "global iterator": (GlobalIterator, lambda m: repr(side_effect_module.NUMBERS)),
    "iterators": (Iterators, lambda m: m.same_factors is m.factors),
    "stream in memory": (Stream, lambda m: side_effect_module.STREAM.getvalue()),
    "bytes": (Bytes, lambda m: (bytes(m.bytes), list(m.array))),
    "big array": (BigArray, lambda m: (m.counts[1:9].tolist(), m.objects.tolist())),
    "deep object": (DeepObject, lambda m: (m.meter().ticks, m.hidden_modules[0].calls)),
}
"""Effects on Python values that a planned step would do once: models and their states."""

EFFECTS: dict[str, Effect] = {
    "nothing": Effect(Chain),
    "tensors in a list": Effect(
        AppendedTensors,
        lambda m: [norm.clone() for norm in m.norms],
        refused="adds a tensor to norms, " + _COUNTS,
    ),
    "frozen parameters": Effect(
        MomentumEncoder, lambda m: [p.detach().clone() for p in m.target.parameters()]
    ),
    "statistics": Effect(Normed),
    "replaced buffer": Effect(ReplacedBuffer),
    "written input": Effect(WrittenInput, inputs=lambda x: (x, torch.ones(3))),
    "torch's generator": Effect(Dropped, lambda m: torch.get_rng_state()),
    "own generator": Effect(
        OwnGenerator, lambda m: m.generator.get_state(), refused="torch.Generator"
    ),
    "Python's generator": Effect(PythonRandom, lambda m: random.getstate(), refused=_RANDOM),
    "NumPy's generator": Effect(
        NumpyRandom, lambda m: np.random.get_state()[1].tolist(), refused=_RANDOM
    ),
    "retained gradient": Effect(
        RetainedGradient,
        lambda m: m.last.grad if hasattr(m, "last") else None,
        loss=lambda out, model, args: (model.last.retain_grad(), out)[1],
        refused="retain_grad",
    ),
    "retained inside": Effect(
        RetainedInside, lambda m: m.last.grad if hasattr(m, "last") else None, refused="retain_grad"
    ),
    "reversed gradient": Effect(
        ReversedGradient, change=_set("strength", lambda step: 1.0 + step % 2)
    ),
    "observed gradient": Effect(
        ObservedGradient, lambda m: list(m.norms), refused="in the backward"
    ),
    "first call": Effect(Initialises, lambda m: m.is_ready),
    "stored tensors": Effect(
        StoredTensor, lambda m: (m.last.clone(), m.statistics["mean"].clone(), m.statistics["rows"])
    ),
    "stored loss": Effect(
        AuxiliaryLoss,
        lambda m: m.auxiliary.detach().clone(),
        loss=lambda out, model, args: out + 0.1 * model.auxiliary,
    ),
    "stored loss, unused": Effect(AuxiliaryLoss, lambda m: m.auxiliary.requires_grad),
    "batch": Effect(Normalising, inputs=lambda x: ({"x": x, "weights": torch.ones(len(x))},)),
    "list argument": Effect(Collecting, inputs=lambda x: (x, [[]])),
    "list argument, used": Effect(
        Collecting,
        inputs=lambda x: (x, [[]]),
        loss=lambda out, model, args: out + args[1][1].abs().mean(),
    ),
    "changed weight": Effect(LossWeight, change=_set("weight", lambda step: 0.5 + step)),
    "changed dropout": Effect(
        DropoutSchedule,
        lambda m: torch.get_rng_state(),
        change=_set("dropout.p", lambda step: 0.1 + 0.2 * (step % 2)),
    ),
    "changed adapter": Effect(Adapters, change=_change_adapters),
    "changed configuration": Effect(
        Configured, change=_set("config.power", lambda step: 2 + step % 2)
    ),
    "changed function": Effect(
        Activation,
        change=_set("activation", lambda step: torch.sigmoid if step % 2 else torch.tanh),
    ),
    "changed global variable": Effect(GlobalScale, change=_change_global),
    "changed class attribute": Effect(ClassScale, change=_change_class),
    "changed in a block": Effect(
        BlockScales, change=lambda model, step: setattr(model.blocks[1], "scale", 1.0 + step % 2)
    ),
    "frozen now and then": Effect(Chain, change=_freeze),
    "evaluation mode": Effect(
        Dropped, change=lambda model, step: model.train(step % 2 == 0) and None
    ),
    "hooks": Effect(lambda: _attach_hooks(Chain()), lambda m: sorted(m.seen.items())),
    "unused head": Effect(TwoHeads, loss=lambda out, model, args: out[0].square().mean()),
    "hook, closure": _stored_by_hook(_hook_in_closure),
    "hook, object": _stored_by_hook(_hook_object),
    "hook, global variable": _stored_by_hook(lambda: Hooked(store_in_global, FEATURES.values)),
    "hook, other module": _stored_by_hook(_hook_of_other_module),
    "dataclass": Effect(
        WritesFields,
        inputs=lambda x: (Example(x, torch.ones(len(x))),),
        loss=lambda out, model, args: out + 0.1 * args[0].hidden.abs().mean(),
        observe=_contents,
    ),
    "dataclass, checked": Effect(
        WritesFields,
        inputs=lambda x: (CheckedExample(x, torch.ones(len(x))),),
        refused="changes the attribute 'hidden'",
        observe=_contents,
    ),
    "UserDict": Effect(
        WritesItems,
        inputs=lambda x: (UserDict(x=x),),
        loss=lambda out, model, args: out + 0.1 * args[0]["hidden"].abs().mean(),
        observe=_contents,
    ),
    "a generator of Python in an attribute": Effect(
        OwnPythonGenerators,
        lambda m: (m.python.getstate(), str(m.numpy.bit_generator.state)),
        refused=_RANDOM,
    ),
    "NumPy's generator in an attribute": Effect(
        OwnNumpyGenerator, lambda m: str(m.numpy.bit_generator.state), refused=_RANDOM
    ),
    "sparse gradient": Effect(SparseEmbedding, refused=r"is sparse \(sparse=True\)"),
    "transforms of torch.func": Effect(Tangents),
    "exception of the model": Effect(Checks, lambda m: (list(m.errors), m.count.item())),
    **{name: Effect(*effect, refused=_COUNTS) for name, effect in _COUNTED.items()},
}
