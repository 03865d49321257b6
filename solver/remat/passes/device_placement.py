"""Passes that change the devices of a Trace or a Program: to another device of the same type, or
from the CPU, where a step for an absent GPU is captured. Pure data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from remat.documents.arguments import Literal
from remat.documents.program import Program, Statement
from remat.documents.records import Node, Placeholder, Result, TensorMeta
from remat.documents.trace import Trace

T = TypeVar("T")


def trace_on_device(trace: Trace, device: str) -> Trace:
    """Return the trace with its tensors moved to `device`. Tensors on another type of device than
    the trace's, such as a CPU scalar among CUDA tensors, stay where they are."""
    moved = _device_replacement(trace.device, device)
    return trace.replace(
        device=device,
        placeholders=tuple(_with_devices(p, moved) for p in trace.placeholders),
        nodes=tuple(_with_devices(node, moved) for node in trace.nodes),
    )


def program_on_device(program: Program, device: str) -> Program:
    """Return the program with its tensors moved to `device`. Tensors on another type of device than
    the program's stay where they are."""
    if program.device == device:
        return program
    moved = _device_replacement(program.device, device)
    return program.model_copy(
        update={
            "device": device,
            "placeholders": tuple(_with_devices(p, moved) for p in program.placeholders),
            "forward": tuple(_with_devices(s, moved) for s in program.forward),
            "backward": tuple(_with_devices(s, moved) for s in program.backward),
        }
    )


def results_on_cpu(trace: Trace, storages: set[int]) -> Trace:
    """Return the trace in which all results whose storages have these indices are on the CPU."""
    if not storages:
        return trace
    nodes = tuple(
        node.model_copy(
            update={
                "results": tuple(
                    _with_devices(r, lambda device: "cpu") if r.storage in storages else r
                    for r in node.results
                )
            }
        )
        for node in trace.nodes
    )
    return trace.replace(nodes=nodes)


def device_type(device: str) -> str:
    """Return the type of a device, "cuda" for "cuda:1"."""
    return device.partition(":")[0]


def _device_replacement(old: str, new: str) -> Callable[[str], str]:
    """Return a function that replaces all devices of the type of `old` by `new`."""
    old_type = device_type(old)
    return lambda device: new if device_type(device) == old_type else device


def _with_devices(item: T, device_of: Callable[[str], str]) -> T:
    """Return a record or an argument with `device_of(device)` in place of each device in it."""
    result: Any = item
    match item:
        case Literal("device", name):
            result = Literal("device", device_of(name))
        case tuple():
            result = tuple(_with_devices(part, device_of) for part in item)
        case TensorMeta():
            result = item.model_copy(update={"device": device_of(item.device)})
        case Placeholder() | Result():
            result = item.model_copy(update={"tensor": _with_devices(item.tensor, device_of)})
        case Node() | Statement():
            update: dict[str, Any] = {
                "args": _with_devices(item.args, device_of),
                "kwargs": {k: _with_devices(v, device_of) for k, v in item.kwargs.items()},
            }
            if isinstance(item, Node):
                update["results"] = _with_devices(item.results, device_of)
            else:
                update["device"] = device_of(item.device)
            result = item.model_copy(update=update)
    return result
