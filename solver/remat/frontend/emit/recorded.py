"""A block's forward as selective checkpointing sees it: one operator after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS

from remat.blockwise.saving import Candidate
from remat.frontend.blocks.module_state import Buffers
from remat.frontend.blocks.profile import Invocation, now_s, why_not_again
from remat.frontend.capture.model.context import random_numbers_restored
from remat.frontend.common.pytree import tensors_in

_ROUNDS = 3

_LEAST_SHARE = 0.005
"""Of the block's time: what takes less is not worth a line in a policy."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The call `number` of the operator `name` in the block. Its outputs' new storages have
    `made_bytes`; those that it only reads, or that somebody writes to later, are `fixed`: they
    cannot be saved. What is `random` moves the generator."""

    name: str
    number: int
    time_s: float
    made_bytes: int
    fixed: bool
    random: bool


def recorded(run: Callable[[], Any]) -> tuple[tuple[Ran, ...], float]:
    """The operators up to the last one that a backward needs, because a block that is run again
    stops there, and the seconds of all of them. Times are the least of several runs."""
    rounds = [_recorded(run) for _ in range(_ROUNDS)]
    first, needed = rounds[0]
    if any([_kind(r) for r in other] != [_kind(r) for r in first] for other, _ in rounds):
        return (), 1.0  # data decide on what runs: nothing can be counted
    found = tuple(
        replace(ran, time_s=min(other[number].time_s for other, _ in rounds))
        for number, ran in enumerate(first)
    )
    return found[:needed], math.fsum(ran.time_s for ran in found)


def fingerprint(call: Invocation) -> tuple[object, str]:
    """Equal for blocks that run the same operators on the same sizes, with gradients for the same;
    and why such a block must not be run twice, if it must not."""
    module = call.site.module
    before = Buffers(module)
    with random_numbers_restored():
        kinds = tuple(_kind(ran) for ran in _recorded(call.alone().made().run)[0])
    changes = before.changed()
    before.restore()
    why = "it changes its buffers when it runs" if changes else why_not_again(call)
    trained = tuple(p.requires_grad for p in module.parameters())
    return (type(module), kinds, trained), why


def candidates(operators: Sequence[Ran]) -> tuple[list[Candidate], list[int]]:
    """What may be saved, and the places of these among the operators.

    Random numbers are replayed from the block's beginning: where one operator that draws them is
    saved, all later ones have to be, or they would draw others.
    """
    places = [i for i, ran in enumerate(operators) if ran.made_bytes and not ran.fixed]
    last_drawn = max(
        (i for i, r in enumerate(operators) if r.random and i not in places), default=-1
    )
    places = [i for i in places if not operators[i].random or i > last_drawn]
    drawing = [n for n, i in enumerate(places) if operators[i].random]
    found: list[Candidate] = []
    for number, place in enumerate(places):
        ran = operators[place]
        needs = tuple(n for n in drawing if n > number) if ran.random else ()
        found.append(Candidate(ran.time_s, ran.made_bytes, needs))
    return found, places


def saved_calls(operators: Sequence[Ran], places: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The numbers of the calls at these places, by operator."""
    found: dict[str, tuple[int, ...]] = {}
    for place in sorted(places):
        ran = operators[place]
        found[ran.name] = (*found.get(ran.name, ()), ran.number)
    return found


def _kind(ran: Ran) -> tuple[object, ...]:
    return ran.name, ran.made_bytes, ran.fixed


def _recorded(run: Callable[[], Any]) -> tuple[list[Ran], int]:
    mode = _Recording()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        mode.needed = len(mode.ran)
        return tensor.detach()  # an output that holds itself would stay for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), mode:
        run()
    found = [
        replace(ran, fixed=ran.fixed or not mode.written.isdisjoint(storages))
        for ran, storages in mode.ran
    ]
    return found, mode.needed


class _Recording(TorchDispatchMode):
    """Below autograd, where the modes of selective checkpointing are, too."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[Ran, frozenset[StorageWeakRef]]] = []
        self.needed = 0
        self.written: set[StorageWeakRef] = set()
        self._counts: dict[str, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {} if kwargs is None else kwargs
        if func in SAC_IGNORED_OPS:
            return func(*args, **given)
        began = now_s(args)
        outputs = func(*args, **given)
        time_s = now_s(outputs) - began
        before = {_ref(t) for t in tensors_in((args, given))}
        made = {_ref(t): t for t in tensors_in(outputs)}
        new_bytes = sum(t.untyped_storage().nbytes() for r, t in made.items() if r not in before)
        name = str(func)
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        fixed = is_random = True  # whatever is no plain operator
        if isinstance(func, torch._ops.OpOverload):
            self.written |= set(_written(func, args, given))
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            fixed = func._schema.is_mutable or not before.isdisjoint(made)
        ran = Ran(name, number, time_s, new_bytes, fixed, is_random)
        self.ran.append((ran, frozenset(made)))
        return outputs


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[StorageWeakRef]:
    found: list[StorageWeakRef] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        found += map(_ref, tensors_in(given))
    return found


def _ref(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
