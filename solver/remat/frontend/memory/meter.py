"""`LiveStorageMeter`: the live bytes of a step's storages on the CPU, and its FLOPs.

The CPU has no allocator statistics, so the meter intercepts every operation and tracks the storages
that operations create, by weak references. It counts tensors that operations return, not the
workspace that a kernel allocates and frees.
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
from remat.documents.trace import CUDA_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The measured memory and FLOPs of one step. `peak_bytes` includes the constants;
    `remaining_bytes` are live after the step."""

    peak_bytes: int
    remaining_bytes: int
    flops: int = 0


class LiveStorageMeter(TorchDispatchMode):
    """Counts the live bytes of storages that are created inside of this context.

    A storage counts once, however many views it has, from the operation that returned it until it
    is freed (also after the context ended). Fake tensors count nothing: a step may be planned
    inside of the context. `constant_bytes` are live from the start. Includes backward passes on the
    CPU, which run in the calling thread. `flops` are counted if `count_flops`.
    """

    def __init__(self, constant_bytes: int = 0, *, count_flops: bool = False) -> None:
        super().__init__()
        self.live_bytes = constant_bytes
        self.peak_bytes = constant_bytes
        self.flops = 0
        self._counts_flops = count_flops
        self._sizes_bytes: dict[int, int] = {}
        self._weak_references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        self._resize_tracking = _resize_tracked(self)
        self._resize_tracking.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._resize_tracking.__exit__(*error)
        super().__exit__(*error)

    def reset_peak(self) -> None:
        """Set the peak to the live bytes."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # An unknown storage of an argument is older than the meter, and does not count. `set_` has
        # a storage itself as argument.
        leaves = tree_leaves((args, kwargs))
        argument_storages = {_storage(t)._cdata for t in leaves if _has_storage(t)}
        argument_storages |= {s._cdata for s in leaves if isinstance(s, torch.UntypedStorage)}
        del leaves
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if not _has_storage(tensor):
                continue
            storage = _storage(tensor)
            if storage._cdata in self._sizes_bytes:
                self._update_size(storage)
            elif storage._cdata not in argument_storages:
                self._track(storage)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self._counts_flops:
            self.flops += count_flops(str(func), args)
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage until it is freed."""
        address = storage._cdata
        self._sizes_bytes[address] = storage.nbytes()
        self.live_bytes += storage.nbytes()

        def on_free(_: object) -> None:
            self.live_bytes -= self._sizes_bytes.pop(address)
            del self._weak_references[address]

        self._weak_references[address] = weakref.ref(storage, on_free)

    def add_resize(self, change_bytes: int, storage: torch.UntypedStorage) -> None:
        """Count the change of a storage that was resized outside of any operation."""
        if storage._cdata in self._sizes_bytes:
            self._sizes_bytes[storage._cdata] += change_bytes
        self.live_bytes += change_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _update_size(self, storage: torch.UntypedStorage) -> None:
        """Count the change of a tracked storage: an operation such as `resize_` may grow it."""
        change_bytes = storage.nbytes() - self._sizes_bytes[storage._cdata]
        self._sizes_bytes[storage._cdata] += change_bytes
        self.live_bytes += change_bytes


@contextmanager
def _resize_tracked(meter: LiveStorageMeter) -> Iterator[None]:
    """Report to the meter the calls of `UntypedStorage.resize_` inside of this context: FSDP2 frees
    gathered parameters by it."""
    original_resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        bytes_before = storage.nbytes()
        result = original_resize(storage, size_bytes)
        meter.add_resize(storage.nbytes() - bytes_before, storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original_resize  # type: ignore[method-assign]


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' distinct storages: tied weights and views count once."""
    parts = [part for tensor in tensors for part in _dense_parts(tensor)]
    storages = {_storage(t)._cdata: storage_bytes(_storage(t)) for t in parts}
    return sum(storages.values())


def storage_bytes(storage: torch.UntypedStorage) -> int:
    """Return the bytes that a storage takes in the allocator of its device."""
    return allocated_size_bytes(storage.nbytes(), storage.device)


def allocated_size_bytes(size_bytes: int, device: torch.device) -> int:
    """Return the bytes that a device's allocator takes for a request: multiples of 512 on CUDA."""
    if device.type != "cuda":
        return size_bytes
    return -(-size_bytes // CUDA_ALIGNMENT_BYTES) * CUDA_ALIGNMENT_BYTES


def measure_step(
    step: Callable[[], object], constants: Iterable[torch.Tensor] = (), *, flops: bool = False
) -> StepMemory:
    """Run a step on the CPU under a `LiveStorageMeter` and return its memory. `constants` are
    parameters, buffers and batch. The step's return value is freed before `remaining_bytes` is
    read.
    """
    meter = LiveStorageMeter(unique_bytes(constants), count_flops=flops)
    with meter:
        step()
    return StepMemory(meter.peak_bytes, meter.live_bytes, meter.flops)


_CAPTURE_TENSORS = FakeTensor, FunctionalTensor
"""Tensors without memory, with which a capture computes."""


def _has_storage(item: object) -> bool:
    """True for a tensor with memory: neither sparse, nor on "meta", nor fake as in a capture."""
    if not isinstance(item, torch.Tensor) or item.layout != torch.strided:
        return False
    return not (item.is_meta or isinstance(item, _CAPTURE_TENSORS))


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the indices and values of a sparse tensor; any other tensor itself."""
    match tensor.layout:
        case torch.sparse_coo:
            return tensor._indices(), tensor._values()
        case torch.sparse_csr | torch.sparse_bsr:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        case torch.sparse_csc | torch.sparse_bsc:
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
        case _:
            return (tensor,)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
