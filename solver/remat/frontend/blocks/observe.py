"""One step of the model without its blocks' memory: what is outside of them, and how they are
called.

The model runs as it is, with real data, but each block computes without a graph and saves nothing;
in the backward it gives back zeros. So the step takes little more than what is outside of blocks,
whatever the model; what it finds is where in time each block runs, and how much is there then.
Random numbers and buffers are as before afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten

from remat.blockwise.step import Event, Way
from remat.errors import TraceError, one_line
from remat.frontend.blocks.gauge import Gauge, gauge
from remat.frontend.blocks.measured import gets_gradient, measured_ways
from remat.frontend.blocks.sharded import (
    begin_forward,
    end_forward,
    here,
    is_sharded,
    sharded_parameters,
)
from remat.frontend.blocks.sites import Site, trained
from remat.frontend.blocks.swapped import replaced
from remat.frontend.capture.flat import differentiated
from remat.frontend.capture.surroundings import restored
from remat.frontend.meter import unique_bytes
from remat.frontend.pytree import flatten
from remat.frontend.runtime.guards import Call, Signature, Watch, signature

Look = Callable[[Gauge, Site, Callable[..., Any], tuple[Any, ...], dict[str, Any]], tuple[Way, ...]]
"""What tells the ways of a call, given the site's own forward and its arguments."""


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
            stack.enter_context(_as_in_a_forward(model, call))
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
    differentiable: dict[object, tuple[bool, ...]] = field(default_factory=dict)
    """For each kind of call, which of its results have a gradient."""
    _gradients: dict[int, int] = field(default_factory=dict)
    """By parameter of a block: the bytes of its gradient, once the block's backward has run."""
    _adding_bytes: int = 0

    def wrapped(self, site: Site) -> Callable[..., Any]:
        own = site.module.forward
        own_trained = bool(trained([site]))

        def forward(*args: Any, **kwargs: Any) -> Any:
            given, shape = tree_flatten((args, kwargs))
            if not torch.is_grad_enabled() or not (any(map(gets_gradient, given)) or own_trained):
                return own(*args, **kwargs)  # without a backward it saves nothing
            number = len(self.calls)
            self._outside()
            self.calls.append(self._seen(site, own, args, kwargs))
            self._event("forward", number, self.gauge.live())
            anchor = torch.zeros((), requires_grad=True, device=_device(given))
            parameters = trained([site]) if self.is_sharded else []
            made: list[Any] = []

            def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                again = iter(tensors)
                leaves = [next(again) if isinstance(x, torch.Tensor) else x for x in given]
                own_args, own_kwargs = tree_unflatten(leaves, shape)
                leaves, outer = tree_flatten(own(*own_args, **own_kwargs))
                made[:] = [[x.detach() if gets_gradient(x) else x for x in leaves], outer]
                return tuple(x for x in leaves if isinstance(x, torch.Tensor))

            kind = type(site.module), self.calls[-1].key and self.calls[-1].key.inputs

            tensors = [x for x in given if isinstance(x, torch.Tensor)]
            results = iter(
                _Passing.apply(self, number, kind, run, len(tensors), anchor, *tensors, *parameters)
            )
            leaves, outer = made
            self.gauge.peak()
            whole = [next(results) if isinstance(x, torch.Tensor) else x for x in leaves]
            return tree_unflatten(whole, outer)

        return forward

    def _seen(
        self, site: Site, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> SeenCall:
        try:
            call = Call.of(args, kwargs, f"an argument of {site.path} ")
        except TraceError as error:
            tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
            ways = self._run(site, own, args, kwargs)
            return SeenCall(site, None, *_storages(tensors), one_line(error), ways)
        watch = self._watches.setdefault(id(site.module), Watch(site.module))
        key = signature(watch, call.structure, call.leaves)
        ways = self._run(site, own, args, kwargs)
        return SeenCall(site, key, *_storages(call.leaves), "", ways)

    def _run(
        self, site: Site, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Way, ...]:
        if id(site.module) not in self.measured:
            return ()
        found = self.look(self.gauge, site, own, args, kwargs)
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


class _Passing(torch.autograd.Function):
    """A block that saves nothing, and passes zeros back."""

    boxed_grads_call = True  # as that of `runtime.step`, which lets go of them like this

    @staticmethod
    def forward(
        ctx: Any,
        step: _Step,
        number: int,
        kind: object,
        run: Callable[..., Any],
        count: int,
        anchor: Any,
        *tensors: Any,
    ) -> Any:
        """The first `count` tensors are the block's inputs, the others its parameters."""
        ctx.set_materialize_grads(False)
        ctx.step, ctx.number = step, number
        ctx.given = [(t.shape, t.dtype, t.device) if gets_gradient(t) else None for t in tensors]
        step.anchors.append(anchor)
        given = tensors[:count]
        if kind in step.differentiable:
            results = run(*given)
        else:  # once with a graph, which tells what of its results has a gradient
            with torch.enable_grad():
                found = run(*(t.clone() if gets_gradient(t) else t for t in map(_leaf, given)))
            step.differentiable[kind] = tuple(t.requires_grad for t in found)
            results = tuple(t.detach() for t in found)
            del found
        has = step.differentiable[kind]
        ctx.mark_non_differentiable(*(t for t, yes in zip(results, has, strict=True) if not yes))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        boxed = grads[0] if isinstance(grads[0], list) else list(grads)
        del grads
        ctx.step.backward_of(ctx.number, boxed)
        zeros = [
            None if given is None else torch.zeros(given[0], dtype=given[1], device=given[2])
            for given in ctx.given
        ]
        ctx.step.gauge.peak()
        return None, None, None, None, None, None, *zeros


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _ends(outputs: Any, differentiate: str | Sequence[str]) -> list[torch.Tensor]:
    """The outputs that gradients come from. Of what cannot be described (a cache of keys among
    the outputs) the loss, or whatever has a gradient."""
    try:
        tensors, structure = flatten(outputs, "the model's output")
    except TraceError:
        loss = getattr(outputs, "loss", None)
        found = [loss] if isinstance(loss, torch.Tensor) else tree_flatten(outputs)[0]
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
def _as_in_a_forward(model: nn.Module, call: Call) -> Iterator[None]:
    """Within the forward of a model that FSDP2 has sharded, and afterwards still so: a backward
    inside of it ends what a forward begins. Gradients are as before afterwards."""
    own = {id(p): p for p in (*sharded_parameters(model), *model.parameters())}
    before = [(p, p.grad) for p in own.values()]
    for parameter, _ in before:
        parameter.grad = None
    begin_forward(model, call.args, call.kwargs)
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
        begin_forward(model, call.args, call.kwargs)


@contextmanager
def _data_restored(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers are the same objects with the same numbers afterwards."""
    kept = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        with restored(model):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _storages(
    tensors: Sequence[torch.Tensor],
) -> tuple[tuple[StorageWeakRef, ...], tuple[int, ...]]:
    storages = [t.untyped_storage() for t in tensors]
    return tuple(map(StorageWeakRef, storages)), tuple(s.nbytes() for s in storages)


def _device(items: Iterable[Any]) -> torch.device:
    return next((x.device for x in items if isinstance(x, torch.Tensor)), torch.device("cpu"))
