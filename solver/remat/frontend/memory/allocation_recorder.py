"""Recordings of allocations in the format of `torch.cuda.memory._snapshot()`, on CUDA and the CPU.

torch's allocator records itself on CUDA; hooks of modules set its metadata, so that each block
has the module that allocated it. The CPU has no such allocator: there a `LiveStorageMeter` writes
an event for each storage of a tensor, with the Python stack of the operation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remat.frontend.memory.meter import LiveStorageMeter
from remat.snapshots.read import DEVICE_TYPE_KEY, MODULE_METADATA, NAMES_KEY

_MAX_FRAMES = 64
_CPU_ADDRESS = 1 << 40


class ModuleMarks:
    """The module that runs now, by hooks of the modules of all models that were added."""

    def __init__(self) -> None:
        self.path = ""
        self._models: list[nn.Module] = []
        self._handles: list[Any] = []
        self._set_metadata = getattr(torch._C, "_cuda_setMemoryMetadata", lambda text: None)

    def add(self, model: nn.Module) -> None:
        """Mark the forward passes of a model's modules."""
        prefix = "" if not self._models else f"{type(model).__name__}:"
        self._models.append(model)
        for name, module in model.named_modules():
            path = prefix + (name or type(model).__name__)

            def enter(module: nn.Module, args: object, path: str = path) -> None:
                self._enter(path)

            def leave(module: nn.Module, args: object, output: object) -> None:
                self._leave()

            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))
        self._outer: list[str] = []

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._set("")

    def names(self) -> dict[str, str]:
        """Return the names of parameters, buffers and gradients by the address of their memory."""
        names: dict[str, str] = {}
        for model in self._models:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                names[str(tensor.data_ptr())] = name
                if tensor.grad is not None:
                    names[str(tensor.grad.data_ptr())] = name
        return names

    def _enter(self, path: str) -> None:
        self._outer.append(self.path)
        self._set(path)

    def _leave(self) -> None:
        self._set(self._outer.pop() if self._outer else "")

    def _set(self, path: str) -> None:
        self.path = path
        if torch.cuda.is_initialized():
            self._set_metadata(MODULE_METADATA + path if path else "")


class CudaRecorder:
    """Records the actions of torch's CUDA allocator."""

    def __init__(self, marks: ModuleMarks, max_entries: int) -> None:
        self._marks, self._max_entries = marks, max_entries

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within this context."""
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=self._max_entries
        )
        try:
            yield
        finally:
            torch.cuda.memory._record_memory_history(None)

    def snapshot(self) -> dict[str, Any]:
        """Return the snapshot, with the names of tensors."""
        snapshot: dict[str, Any] = dict(torch.cuda.memory._snapshot())  # type: ignore[arg-type]
        return snapshot | {NAMES_KEY: self._marks.names()}


class CpuRecorder(LiveStorageMeter):
    """Records the storages that operations create on the CPU as allocations."""

    def __init__(self, marks: ModuleMarks, max_entries: int) -> None:
        super().__init__()
        self._marks, self._max_entries = marks, max_entries
        self._events: list[dict[str, Any]] = []
        self._frames: dict[tuple[Any, int], dict[str, Any]] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._next_address = _CPU_ADDRESS

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within this context."""
        with self:
            yield

    def snapshot(self) -> dict[str, Any]:
        """Return the snapshot: one segment with the live storages, and the newest events."""
        blocks = [
            {
                "address": event["addr"],
                "size": event["size"],
                "requested_size": event["size"],
                "state": "active_allocated",
                "frames": event["frames"],
                "user_metadata": event["user_metadata"],
            }
            for event in self._blocks.values()
        ]
        total = sum(block["size"] for block in blocks)
        segment = {"device": 0, "address": _CPU_ADDRESS, "total_size": total, "blocks": blocks}
        return {
            "segments": [segment] if blocks else [],
            "device_traces": [self._events[-self._max_entries :]],
            DEVICE_TYPE_KEY: "cpu",
        }

    def _track(self, storage: torch.UntypedStorage) -> None:
        event = {
            "action": "alloc",
            "addr": self._next_address,
            "size": storage.nbytes(),
            "frames": self._stack(),
            "user_metadata": MODULE_METADATA + self._marks.path if self._marks.path else "",
        }
        self._next_address += -(-storage.nbytes() // 512) * 512 + 512
        self._blocks[storage._cdata] = event
        self._events.append(event)
        super()._track(storage)

    def _on_free(self, address: int) -> None:
        event = self._blocks.pop(address)
        self._events.append(
            {"action": "free_completed", "addr": event["addr"], "size": event["size"]}
        )

    def _stack(self) -> list[dict[str, Any]]:
        """Return the frames that called the operation, innermost first."""
        frames: list[dict[str, Any]] = []
        frame = sys._getframe(3)
        while frame is not None and len(frames) < _MAX_FRAMES:
            key = (frame.f_code, frame.f_lineno)
            if key not in self._frames:
                code = frame.f_code
                self._frames[key] = {
                    "filename": code.co_filename,
                    "name": code.co_name,
                    "line": frame.f_lineno,
                }
            frames.append(self._frames[key])
            frame = frame.f_back
        return frames
