"""Profile of a block's forward by operator call, as selective checkpointing sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS

from remat.blockwise.choose import SaveCandidate
from remat.frontend.blocks.module_state import BufferSnapshot
from remat.frontend.blocks.profile import (
    ModuleInvocation,
    recompute_obstacle,
    synchronized_time_s,
)
from remat.frontend.capture.model.preserved_state import rng_state_preserved
from remat.frontend.common.operators import written_arguments
from remat.frontend.common.pytree import tensors_in

_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator in a block's forward.

    `call_index` counts the calls of the operator `name` from 0. The outputs allocate new storages
    of `output_bytes`. The outputs are `is_unsavable` if they are views of inputs, or if an operator
    writes to them later. `is_random` operators advance the random number generator.
    """

    name: str
    call_index: int
    time_s: float
    output_bytes: int
    is_unsavable: bool
    is_random: bool


def profile_operators(run: Callable[[], Any]) -> tuple[tuple[OperatorCall, ...], float]:
    """Run a block several times. Return its operator calls up to the last one that the backward
    needs, because the recomputation of a block stops there, and the seconds of the whole forward.

    Times are the minimum of the runs. If the runs differ in their operators, which then depend on
    the data, there are no calls to count, and the result is `((), 1.0)`.
    """
    profiles = [_profile_operators_once(run) for _ in range(_ROUNDS)]
    first, num_needed = profiles[0]
    kinds = [_operator_call_key(call) for call in first]
    if any([_operator_call_key(call) for call in calls] != kinds for calls, _ in profiles):
        return (), 1.0
    fastest = tuple(
        replace(call, time_s=min(calls[index].time_s for calls, _ in profiles))
        for index, call in enumerate(first)
    )
    return fastest[:num_needed], math.fsum(call.time_s for call in fastest)


def block_fingerprint(call: ModuleInvocation) -> tuple[object, str]:
    """Return a key that is equal for blocks that run the same operators on the same sizes and train
    the same parameters; and the reason why such a block must not be recomputed, or ""."""
    module = call.submodule.module
    buffers = BufferSnapshot(module)
    with rng_state_preserved():
        calls, _ = _profile_operators_once(call.with_leaf_inputs().with_non_leaf_inputs().run)
    kinds = tuple(map(_operator_call_key, calls))
    has_changed = buffers.has_changed()
    buffers.restore()
    reason = "its forward changes its buffers" if has_changed else recompute_obstacle(call)[0]
    trainable = tuple(p.requires_grad for p in module.parameters())
    return (type(module), kinds, trainable), reason


def saving_candidates(
    operators: Sequence[OperatorCall],
) -> tuple[list[SaveCandidate], list[int]]:
    """Return the operator calls whose outputs may be saved, as candidates and as indices.

    Random numbers are replayed from the start of the block. So if the output of a random operator
    is saved, those of all later random operators must be saved, too; their recomputation would
    generate other numbers.
    """
    indices = [i for i, call in enumerate(operators) if call.output_bytes and not call.is_unsavable]
    last_unsavable_random = max(
        (i for i, call in enumerate(operators) if call.is_random and i not in indices), default=-1
    )
    indices = [i for i in indices if not operators[i].is_random or i > last_unsavable_random]
    random_candidates = [n for n, i in enumerate(indices) if operators[i].is_random]
    candidates: list[SaveCandidate] = []
    for number, index in enumerate(indices):
        call = operators[index]
        needs = tuple(n for n in random_candidates if n > number) if call.is_random else ()
        candidates.append(SaveCandidate(call.time_s, call.output_bytes, needs))
    return candidates, indices


def saved_calls_by_operator(
    operators: Sequence[OperatorCall], indices: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the call indices of some operator calls, by operator name. `indices` selects the
    calls."""
    calls: dict[str, tuple[int, ...]] = {}
    for index in sorted(indices):
        call = operators[index]
        calls[call.name] = (*calls.get(call.name, ()), call.call_index)
    return calls


def _operator_call_key(call: OperatorCall) -> tuple[object, ...]:
    """Return the name, output bytes and savability, which are equal for calls that count as the
    same."""
    return call.name, call.output_bytes, call.is_unsavable


def _profile_operators_once(run: Callable[[], Any]) -> tuple[list[OperatorCall], int]:
    """Run a block once, and return its operator calls with the number of them up to the last one
    that the backward needs."""
    mode = _OperatorProfilingMode()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        mode.num_needed = len(mode.calls)
        return tensor.detach()  # an output that references itself would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), mode:
        run()
    calls = [
        replace(call, is_unsavable=call.is_unsavable or not mode.mutated.isdisjoint(storages))
        for call, storages in mode.calls
    ]
    return calls, mode.num_needed


class _OperatorProfilingMode(TorchDispatchMode):
    """Dispatch mode that times operator calls, below autograd like selective checkpointing's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OperatorCall, frozenset[StorageWeakRef]]] = []
        """The operator calls with the storages of their outputs."""
        self.num_needed = 0
        self.mutated: set[StorageWeakRef] = set()
        self._call_counts: dict[str, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = {} if kwargs is None else kwargs
        if func in SAC_IGNORED_OPS:
            return func(*args, **keywords)
        start_s = synchronized_time_s(args)
        outputs = func(*args, **keywords)
        time_s = synchronized_time_s(outputs) - start_s
        inputs = {_storage_ref(t) for t in tensors_in((args, keywords))}
        output_tensors = {_storage_ref(t): t for t in tensors_in(outputs)}
        new_bytes = sum(
            tensor.untyped_storage().nbytes()
            for ref, tensor in output_tensors.items()
            if ref not in inputs
        )
        name = str(func)
        call_index = self._call_counts.get(name, 0)
        self._call_counts[name] = call_index + 1
        is_unsavable = is_random = True  # for anything but an `OpOverload`
        if isinstance(func, torch._ops.OpOverload):
            written = tensors_in(list(written_arguments(func, args, keywords)))
            self.mutated |= set(map(_storage_ref, written))
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            is_unsavable = func._schema.is_mutable or not inputs.isdisjoint(output_tensors)
        call = OperatorCall(name, call_index, time_s, new_bytes, is_unsavable, is_random)
        self.calls.append((call, frozenset(output_tensors)))
        return outputs


def _storage_ref(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's storage, which compares by storage."""
    return StorageWeakRef(tensor.untyped_storage())
