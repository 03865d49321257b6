"""What a step really takes: live bytes of storages, and FLOPs.

The CPU has no allocator statistics, so `LiveStorageMeter` watches every operation and follows the
storages that operations create, by weak reference. It sees what operations return, not what a
kernel allocates and frees inside itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.profiler
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remat.costs.flops import count_flops


@dataclass(frozen=True, slots=True)
class StepUse:
    """What one step took. `peak_bytes` include the constants, `left_bytes` what outlives it."""

    peak_bytes: int
    left_bytes: int
    flops: int = 0


class LiveStorageMeter(TorchDispatchMode):
    """Counts the live bytes of storages that are created inside it.

    A storage counts once, however many views it has, from the operation that returned it until it
    dies (also after the meter was left). Fake tensors, of which a step may be planned meanwhile,
    take nothing. `constant_bytes` are there from the start. Works through
    backward passes on CPU, which run in the calling thread. `flops` are counted if asked for.
    """

    def __init__(self, constant_bytes: int = 0, *, count_flops: bool = False) -> None:
        super().__init__()
        self.live_bytes = constant_bytes
        self.peak_bytes = constant_bytes
        self.flops = 0
        self._counting = count_flops
        self._sizes: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        self._resized = _following(self)
        self._resized.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._resized.__exit__(*error)
        super().__exit__(*error)

    def reset_peak(self) -> None:
        """Let the peak be what is live now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # A storage from before the meter is known by being an argument; later ones are watched.
        given = {_storage(t)._cdata for t in tree_leaves((args, kwargs)) if _has_storage(t)}
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if not _has_storage(tensor):
                continue
            storage = _storage(tensor)
            if storage._cdata in self._sizes:
                self._resize(storage)
            elif storage._cdata not in given:
                self._watch(storage)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self._counting:
            self.flops += count_flops(str(func), args)
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        self._sizes[address] = storage.nbytes()
        self.live_bytes += storage.nbytes()

        def died(_: object) -> None:
            self.live_bytes -= self._sizes.pop(address)
            del self._watchers[address]

        self._watchers[address] = weakref.ref(storage, died)

    def resized(self, change_bytes: int, storage: torch.UntypedStorage) -> None:
        """A storage was resized, by no operation."""
        if storage._cdata in self._sizes:
            self._sizes[storage._cdata] += change_bytes
        self.live_bytes += change_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _resize(self, storage: torch.UntypedStorage) -> None:
        """`resize_` grows a storage in place."""
        change = storage.nbytes() - self._sizes[storage._cdata]
        self._sizes[storage._cdata] += change
        self.live_bytes += change


@contextmanager
def _following(meter: LiveStorageMeter) -> Iterator[None]:
    """Storages that are resized by hand are followed: so FSDP2 frees what it has gathered."""
    own = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        before = storage.nbytes()
        done = own(storage, size_bytes)
        meter.resized(storage.nbytes() - before, storage)
        return done

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = own  # type: ignore[method-assign]


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors (tied weights and views count once)."""
    storages = {_storage(t)._cdata: _storage(t).nbytes() for t in tensors}
    return sum(storages.values())


def measure_step(
    step: Callable[[], object], constants: Iterable[torch.Tensor] = (), *, flops: bool = False
) -> StepUse:
    """Run a step on the CPU under a `LiveStorageMeter`. Its return value counts as long as it
    lives, and is dropped before `left_bytes` is read. `constants` are parameters, buffers, batch.
    """
    meter = LiveStorageMeter(unique_bytes(constants), count_flops=flops)
    with meter:
        step()
    return StepUse(meter.peak_bytes, meter.live_bytes, meter.flops)


_STAND_INS = FakeTensor, FunctionalTensor
"""What a capture computes with."""


def _has_storage(item: object) -> bool:
    if not isinstance(item, torch.Tensor) or item.layout != torch.strided:
        return False
    return not (item.is_meta or isinstance(item, _STAND_INS))


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
