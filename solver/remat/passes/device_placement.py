"""Passes that change the devices of a Trace or a Program: to another device of the same type, or
from the CPU, where a step for an absent GPU is captured. Pure data.
"""

from __future__ import annotations

from remat.documents.arguments import Args, Argument, Kwargs, Literal
from remat.documents.program import Program, Statement
from remat.documents.records import Node, Placeholder, Result, TensorMeta
from remat.documents.trace import Trace


def trace_on_device(trace: Trace, device: str) -> Trace:
    """Return the trace with its tensors moved to `device`. Tensors on another type of device than
    the trace's, such as a CPU scalar among CUDA tensors, stay where they are."""
    replacement = _DeviceReplacement(trace.device, device)
    return trace.replace(
        device=device,
        placeholders=tuple(replacement.placeholder(p) for p in trace.placeholders),
        nodes=tuple(replacement.node(node) for node in trace.nodes),
    )


def program_on_device(program: Program, device: str) -> Program:
    """Return the program with its tensors moved to `device`. Tensors on another type of device than
    the program's stay where they are."""
    if program.device == device:
        return program
    replacement = _DeviceReplacement(program.device, device)
    return program.model_copy(
        update={
            "device": device,
            "placeholders": tuple(replacement.placeholder(p) for p in program.placeholders),
            "forward": tuple(replacement.statement(s) for s in program.forward),
            "backward": tuple(replacement.statement(s) for s in program.backward),
        }
    )


def device_type(device: str) -> str:
    """Return the type of a device, "cuda" for "cuda:1"."""
    return device.partition(":")[0]


class _DeviceReplacement:
    """Replaces all devices of the type of `old` by the device `new`, in records of a document."""

    def __init__(self, old: str, new: str) -> None:
        self._old_type = device_type(old)
        self._new = new

    def placeholder(self, placeholder: Placeholder) -> Placeholder:
        return placeholder.model_copy(update={"tensor": self._meta(placeholder.tensor)})

    def node(self, node: Node) -> Node:
        results = tuple(
            result.model_copy(update={"tensor": self._meta(result.tensor)})
            for result in node.results
        )
        return node.model_copy(update={"results": results, **self._arguments(node)})

    def statement(self, statement: Statement) -> Statement:
        device = self._device(statement.device)
        return statement.model_copy(update={"device": device, **self._arguments(statement)})

    def _arguments(self, call: Node | Statement) -> dict[str, Args | Kwargs]:
        return {
            "args": tuple(self._argument(item) for item in call.args),
            "kwargs": {key: self._argument(item) for key, item in call.kwargs.items()},
        }

    def _argument(self, argument: Argument) -> Argument:
        match argument:
            case Literal("device", name):
                return Literal("device", self._device(name))
            case tuple():
                return tuple(self._argument(item) for item in argument)
        return argument

    def _meta(self, meta: TensorMeta) -> TensorMeta:
        return meta.model_copy(update={"device": self._device(meta.device)})

    def _device(self, device: str) -> str:
        return self._new if device_type(device) == self._old_type else device


def results_on_cpu(trace: Trace, storages: set[int]) -> Trace:
    """Return the trace with all results in the storages with these indices on the CPU."""

    def on_cpu(result: Result) -> Result:
        if result.storage not in storages:
            return result
        return result.model_copy(
            update={"tensor": result.tensor.model_copy(update={"device": "cpu"})}
        )

    if not storages:
        return trace
    return trace.replace(
        nodes=tuple(
            node.model_copy(update={"results": tuple(on_cpu(r) for r in node.results)})
            for node in trace.nodes
        )
    )
