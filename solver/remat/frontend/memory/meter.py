"""Live bytes and their peak: of storages on the CPU, and of torch's allocators.

The CPU has no allocator statistics, so `LiveStorageMeter` intercepts every operation and tracks the
storages that operations create, by weak references. It counts tensors that operations return, not
the workspace that a kernel allocates and frees.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, Self

import torch
import torch.profiler
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remat.costs.roofline import count_flops
from remat.documents.trace import CUDA_ALIGNMENT_BYTES
from remat.frontend.common.torch_modes import attributes_set


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

    Inside of any dispatch mode autograd adds gradients out of place (`can_accumulate_inplace` of
    torch), so where such a sum makes the peak, a step in eager mode takes less without the meter.
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
        argument_storages = {_tensor_storage(t)._cdata for t in leaves if _has_own_memory(t)}
        argument_storages |= {s._cdata for s in leaves if isinstance(s, torch.UntypedStorage)}
        del leaves
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if not _has_own_memory(tensor):
                continue
            storage = _tensor_storage(tensor)
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
            self._on_free(address)

        self._weak_references[address] = weakref.ref(storage, on_free)

    def _on_free(self, address: int) -> None:
        """Do nothing more about a storage that is freed; a recorder writes an event."""

    def add_resize(self, change_bytes: int, storage: torch.UntypedStorage) -> None:
        """Count the change of a storage that was resized outside of any operation, also if it is
        older than the meter; nothing for storages without memory, which are on "meta"."""
        if storage.device.type == "meta":
            return
        if storage._cdata in self._sizes_bytes:
            self._sizes_bytes[storage._cdata] += change_bytes
        self.live_bytes += change_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _update_size(self, storage: torch.UntypedStorage) -> None:
        """Count the change of a tracked storage: an operation such as `resize_` may grow it."""
        change_bytes = storage.nbytes() - self._sizes_bytes[storage._cdata]
        self._sizes_bytes[storage._cdata] += change_bytes
        self.live_bytes += change_bytes


def _resize_tracked(meter: LiveStorageMeter) -> AbstractContextManager[None]:
    """Return a context in which calls of `UntypedStorage.resize_` are reported to the meter: FSDP2
    frees gathered parameters by it."""
    original_resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        bytes_before = storage.nbytes()
        result = original_resize(storage, size_bytes)
        meter.add_resize(storage.nbytes() - bytes_before, storage)
        return result

    return attributes_set((torch.UntypedStorage, "resize_", resize_))


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' distinct storages, as the allocators of their devices round
    them: tied weights and views count once."""
    parts = [part for tensor in tensors for part in _dense_tensors_of(tensor)]
    storages = {_tensor_storage(t)._cdata: storage_bytes(_tensor_storage(t)) for t in parts}
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
    parameters, buffers and batch; with `flops`, FLOPs are counted, too. The step's return value is
    freed before `remaining_bytes` is read."""
    meter = LiveStorageMeter(unique_bytes(constants), count_flops=flops)
    with meter:
        step()
    return StepMemory(meter.peak_bytes, meter.live_bytes, meter.flops)


_CAPTURE_TENSORS = FakeTensor, FunctionalTensor
"""Tensors without memory, with which a capture computes."""


def _has_own_memory(item: object) -> bool:
    """True for a tensor with memory: neither sparse, nor on "meta", nor fake as in a capture."""
    if not isinstance(item, torch.Tensor) or item.layout != torch.strided:
        return False
    return not (item.is_meta or isinstance(item, _CAPTURE_TENSORS))


def _dense_tensors_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
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


def _tensor_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor."""
    return tensor.untyped_storage()


class MemoryGauge(Protocol):
    """Reads the bytes that were allocated since the gauge was created."""

    def live(self) -> int:
        """Return the live bytes."""
        ...

    def peak(self) -> int:
        """Return the peak of the live bytes since the last call of this method, and reset it."""
        ...


class _CpuGauge:
    """A memory gauge that reads a `LiveStorageMeter`."""

    def __init__(self, meter: LiveStorageMeter) -> None:
        self._meter = meter

    def live(self) -> int:
        return self._meter.live_bytes

    def peak(self) -> int:
        peak_bytes = self._meter.peak_bytes
        self._meter.reset_peak()
        return peak_bytes


class _CudaGauge:
    """A memory gauge that reads the statistics of torch's CUDA allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._initial_bytes = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._initial_bytes

    def peak(self) -> int:
        peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._initial_bytes
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak_bytes


@contextmanager
def memory_gauge(device: torch.device) -> Iterator[MemoryGauge]:
    """Yield a memory gauge for the operations inside of this context. On CUDA, it resets the
    device's peak statistics."""
    if device.type == "cuda":
        wait_for_autograd(device)
        yield _CudaGauge(device)
        return
    with LiveStorageMeter() as meter:
        yield _CpuGauge(meter)


def wait_for_autograd(device: torch.device) -> None:
    """Wait until autograd's thread of a GPU has released the results of the last backward; nothing
    on a CPU.

    The thread may do so some milliseconds after the call that computed them has returned, while
    something else is measured. It always does so before it starts the next backward: this runs one
    of a tensor without elements.
    """
    if device.type != "cuda":
        return
    with torch.enable_grad():
        leaf = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(leaf.clone(), leaf, torch.empty(0, device=device))


def cuda_peak(step: Callable[[], object], device: torch.device | str | int | None = None) -> int:
    """Run the step and return the peak of allocated bytes on a CUDA device, including memory
    allocated before the step. Call the step once before, so that libraries have their workspaces.

    Resets the device's peak statistics, like `torch.cuda.reset_peak_memory_stats`: torch can
    neither measure a peak separately from these, nor restore the old value.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def allocated_peak(step: Callable[[], object]) -> int:
    """Run the step and return the peak of the bytes that the CPU's allocator hands out, without
    memory allocated before the step. For steps that torch compiled: their operations cannot be
    intercepted. Includes the workspaces of kernels. Call the step once before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # no log message when the profiler starts
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    kineto = profile.profiler
    assert kineto is not None
    assert kineto.kineto_results is not None
    events: list[Any] = [e for e in kineto.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))
