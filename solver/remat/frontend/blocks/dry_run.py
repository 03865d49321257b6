"""One step of the model without its blocks' memory: what is outside of them, and how they are
called.

The model runs as it is, with real data, but each block drops its graph once it has run, and gives
back zeros in the backward. So the step takes little more than what is outside of blocks and one
block, whatever the model; what it finds is where in time each block runs, and how much is there
then. Random numbers and buffers are as before afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.blockwise.step import Event, Way
from remat.errors import TraceError
from remat.frontend.blocks.discovery import Site, trained
from remat.frontend.blocks.fsdp2 import (
    end_forward,
    here,
    in_a_forward,
    is_sharded,
    sharded_parameters,
)
from remat.frontend.blocks.module_state import Buffers, python_restored, tensors_left
from remat.frontend.blocks.patching import replaced
from remat.frontend.blocks.profile import Invocation, gets_gradient, measured_ways
from remat.frontend.blocks.stub import Passing, handed_back
from remat.frontend.capture.model.context import restored
from remat.frontend.capture.model.flat_model import differentiated
from remat.frontend.common.pytree import flatten, joined, split, tensors_in
from remat.frontend.memory.gauge import Gauge, gauge
from remat.frontend.memory.meter import unique_bytes
from remat.frontend.runtime.guards import Call, Signature, Watch, signature

Look = Callable[[Gauge, Invocation], tuple[Way, ...]]
"""What tells the ways of a call of the module's own forward."""


_CHANGED = "it changes a list or a dict that it is given"


@dataclass(frozen=True)
class SeenCall:
    """A call of a block, without its `key` (and with the reason, `why`) where its arguments are
    nothing that can be described. `storages` are those of its tensors, of so many bytes."""

    site: Site
    key: Signature | None
    storages: tuple[StorageWeakRef, ...]
    sizes_bytes: tuple[int, ...]
    why: str = ""
    measured: tuple[Way, ...] = ()
    """What `look` told, where that was asked for: by default as it is, and checkpointed."""
    used: frozenset[str] = frozenset()
    """The paths of those results that got a gradient; none where nobody knows."""


@dataclass(frozen=True)
class Observation:
    """The calls in the order of the forward, the events of the step, with constant memory, the
    storages that something outside of blocks held when the backward began, and their bytes with all
    that was held then beside constant memory."""

    calls: tuple[SeenCall, ...]
    events: tuple[Event, ...]
    held: frozenset[StorageWeakRef]
    outside_bytes: int = 0


def observe(
    model: nn.Module,
    call: Call,
    sites: Sequence[Site],
    *,
    measured: Iterable[Site] = (),
    look: Look = measured_ways,
    differentiate: str | Sequence[str] = "auto",
    dropped: bool = False,
) -> Observation:
    """One step. Sites `measured` are also run by themselves, with a graph: `look` tells their ways.

    Raises `TraceError` where no block is called.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    torch.clear_autocast_cache()  # it would hold weights in lower precision already
    with ExitStack() as stack:
        stack.enter_context(_data_restored(model))
        stack.enter_context(torch.enable_grad())
        found = _Step(
            stack.enter_context(gauge(device)),
            _constant_bytes(model, call),
            {id(s.module) for s in measured},
            look,
            is_sharded(model),
        )
        if found.is_sharded:
            stack.enter_context(in_a_forward(model, call.args, call.kwargs))
        with replaced({s.module: found.wrapped(s) for s in sites}):
            outputs = [end_forward(model, call.args, model.forward(*call.args, **call.kwargs))]
        if not found.calls:
            raise TraceError(
                f"no block of this {type(model).__name__} is called in its forward, of "
                f"{len(sites)} that were found"
            )
        found.backward(_outside(model, sites, call), outputs, differentiate, dropped)
    calls, events, held = tuple(found.calls), tuple(found.events), frozenset(found.held)
    return Observation(calls, events, held, found.outside_bytes)


@dataclass
class _Step:
    gauge: Gauge
    constant_bytes: int
    measured: set[int]
    look: Look
    is_sharded: bool = False
    """Then the gradients of blocks are there as well, of zeros: FSDP2 reduces them."""
    calls: list[SeenCall] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    held: set[StorageWeakRef] = field(default_factory=set)
    anchors: list[torch.Tensor] = field(default_factory=list)
    """Each call has one, so that its backward runs even where nothing before it has a gradient."""
    _watches: dict[int, Watch] = field(default_factory=dict)
    outside_bytes: int = 0
    """Held when the backward began, beside constant memory."""
    _paths: dict[int, list[str]] = field(default_factory=dict)
    """Of the tensors that a call returned, once each, until its backward."""
    _gradients: dict[int, int] = field(default_factory=dict)
    """By parameter of a block: the bytes of its gradient, once the block's backward has run."""
    _adding_bytes: int = 0

    def wrapped(self, site: Site) -> Callable[..., Any]:
        own = site.module.forward
        own_trained = bool(trained([site]))

        def forward(*args: Any, **kwargs: Any) -> Any:
            given, shape = split((args, kwargs))
            if not torch.is_grad_enabled() or not (any(map(gets_gradient, given)) or own_trained):
                return own(*args, **kwargs)  # without a backward it saves nothing
            number = len(self.calls)
            self._outside()
            self.calls.append(self._seen(Invocation(site, own, args, kwargs)))
            self._event("forward", number, self.gauge.live())
            anchor = torch.zeros((), requires_grad=True, device=_device(given))
            parameters = trained([site]) if self.is_sharded else []
            made: list[Any] = []

            def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                again = iter(tensors)
                leaves = [next(again) if isinstance(x, torch.Tensor) else x for x in given]
                own_args, own_kwargs = joined(leaves, shape)
                before = tensors_left(site.module)
                result = own(*own_args, **own_kwargs)
                if left := tensors_left(site.module).keys() - before.keys():
                    why = f"it leaves a tensor in its attribute {min(n for _, n, _ in left)!r}"
                    self.calls[number] = replace(self.calls[number], key=None, why=why)
                if handed_back((args, kwargs), (own_args, own_kwargs), leaves, shape):
                    self.calls[number] = replace(self.calls[number], key=None, why=_CHANGED)
                self._paths[number] = _paths(result)
                leaves, outer = split(result)
                made[:] = [[x.detach() if gets_gradient(x) else x for x in leaves], outer]
                return tuple(x for x in leaves if isinstance(x, torch.Tensor))

            tensors = [x for x in given if isinstance(x, torch.Tensor)]
            results = iter(
                Passing.apply(self, number, run, len(tensors), anchor, *tensors, *parameters)
            )
            leaves, outer = made
            self.gauge.peak()
            whole = [next(results) if isinstance(x, torch.Tensor) else x for x in leaves]
            return joined(whole, outer)

        return forward

    def _seen(self, called: Invocation) -> SeenCall:
        site = called.site
        ways = self._ways(called)
        try:
            call = Call.of(called.args, called.kwargs, f"an argument of {site.path}: ")
        except TraceError as error:
            tensors = tensors_in((called.args, called.kwargs))
            return SeenCall(site, None, *_storages(tensors), str(error), ways)
        watch = self._watches.setdefault(id(site.module), Watch(site.module))
        key = signature(watch, call.structure, call.leaves)
        return SeenCall(site, key, *_storages(call.leaves), "", ways)

    def _ways(self, called: Invocation) -> tuple[Way, ...]:
        if id(called.site.module) not in self.measured:
            return ()
        found = self.look(self.gauge, called)
        self.gauge.peak()
        return found

    def backward(
        self,
        outside: Sequence[torch.Tensor],
        outputs: list[Any],
        differentiate: str | Sequence[str],
        dropped: bool,
    ) -> None:
        """From the model's outputs, the only item of a list, which is emptied."""
        ends = _ends(outputs[0], differentiate)
        if dropped:
            outputs.clear()
        # What is still there of what blocks were given is held by something else.
        seen = {ref for call in self.calls for ref in call.storages}
        self.held = {ref for ref in seen if not ref.expired()}
        self.outside_bytes = self.gauge.live()
        tangents = [torch.ones_like(t) for t in ends]
        self._outside()
        if self.is_sharded:
            torch.autograd.backward(ends, tangents)
            self._outside()
            return
        # Nobody gets these gradients: they are there to the end, as those in `.grad` are.
        anchors = [*outside, *self.anchors]
        found = torch.autograd.grad(ends, anchors, tangents, allow_unused=True)
        self._outside()
        del found

    def backward_of(self, number: int, tangents: list[torch.Tensor | None]) -> None:
        """It begins with these, and empties the list."""
        paths = self._paths.pop(number, ())
        if len(paths) == len(tangents):
            has = [tangent is not None for tangent in tangents]  # a zip would hold the last one
            used = frozenset(compress(paths, has))
            self.calls[number] = replace(self.calls[number], used=used)
        self._outside()
        live_bytes = self.gauge.live()
        storages = [t.untyped_storage() for t in tangents if t is not None]
        sizes = {StorageWeakRef(s): s.nbytes() for s in storages}
        storages.clear()
        tangents.clear()
        # What nobody else holds is counted in the block, until it has read it.
        own_bytes = sum(size for ref, size in sizes.items() if ref.expired())
        self._event("backward", number, live_bytes - own_bytes)
        if self.is_sharded:
            return
        own = [p for p in trained([self.calls[number].site]) if p.grad is None]
        # Autograd adds two gradients up to a third.
        self._adding_bytes = 2 * sum(p.nbytes for p in own if id(p) in self._gradients)
        self._gradients |= {id(p): p.nbytes for p in own}

    def _outside(self) -> None:
        held_bytes = self._there(self.gauge.peak()) + self._adding_bytes
        self._adding_bytes = 0
        self.events.append(Event("outside", held_bytes))

    def _event(self, kind: Literal["forward", "backward"], number: int, own_bytes: int) -> None:
        self.events.append(Event(kind, self._there(own_bytes), number))

    def _there(self, own_bytes: int) -> int:
        return self.constant_bytes + own_bytes + sum(self._gradients.values())


def _paths(result: object) -> list[str]:
    """Where each tensor of a result is; nothing of one that cannot be described."""
    try:
        leaves, structure = flatten(result, "the result ")
    except TraceError:
        return []
    path = {id(leaf): structure.path_of(number) for number, leaf in enumerate(leaves)}
    found = [path.get(id(tensor), "") for tensor in tensors_in(result)]
    return found if all(found) else []


def _ends(outputs: Any, differentiate: str | Sequence[str]) -> list[torch.Tensor]:
    """The outputs that gradients come from. Of what cannot be described (a cache of keys among
    the outputs) the loss, or whatever has a gradient."""
    try:
        tensors, structure = flatten(outputs, "the model's output")
    except TraceError:
        loss = getattr(outputs, "loss", None)
        found = [loss] if isinstance(loss, torch.Tensor) else tensors_in(outputs)
        return [t for t in found if gets_gradient(t)]
    wanted = differentiated(structure, tensors, differentiate)
    return [t for t, is_wanted in zip(tensors, wanted, strict=True) if is_wanted]


def _outside(model: nn.Module, sites: Sequence[Site], call: Call) -> list[torch.Tensor]:
    """What gets a gradient outside of blocks: parameters, and inputs that require one."""
    inside = {id(p) for p in trained(sites)}
    own = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
    return [*own, *(t for t in call.leaves if t.requires_grad)]


def _constant_bytes(model: nn.Module, call: Call) -> int:
    """Parameters, buffers, batch, and the gradients that are there already."""
    own = [*model.parameters(), *model.buffers(), *call.leaves]
    own += [p.grad for p in model.parameters() if p.grad is not None]
    return unique_bytes(map(here, (*own, *sharded_parameters(model))))


@contextmanager
def _data_restored(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers are the same objects with the same numbers afterwards, and numbers in
    attributes and whatever draws random ones are as before."""
    kept = Buffers(model)
    try:
        with restored(model), python_restored(model):
            yield
    finally:
        if kept.changed():
            kept.restore()


def _storages(
    tensors: Sequence[torch.Tensor],
) -> tuple[tuple[StorageWeakRef, ...], tuple[int, ...]]:
    storages = [t.untyped_storage() for t in tensors]
    return tuple(map(StorageWeakRef, storages)), tuple(s.nbytes() for s in storages)


def _device(items: Iterable[Any]) -> torch.device:
    return next((x.device for x in items if isinstance(x, torch.Tensor)), torch.device("cpu"))
