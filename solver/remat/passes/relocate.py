"""Other devices into a Trace or a Program: the same step, on another device of the same kind, or a
step that was captured in place of one on a device that is not here. Pure data.
"""

from __future__ import annotations

from remat.documents.arguments import Args, Argument, Kwargs, Literal
from remat.documents.program import Program, Statement
from remat.documents.records import Node, Placeholder, Result, TensorMeta
from remat.documents.trace import Trace


def relocated(trace: Trace, place: str) -> Trace:
    """The trace with what is on its own kind of device ("cpu", "cuda") on `place`; a scalar on the
    CPU beside CUDA tensors stays there."""
    move = _Move(trace.device, place)
    return trace.replace(
        device=place,
        placeholders=tuple(move.placeholder(p) for p in trace.placeholders),
        nodes=tuple(move.node(node) for node in trace.nodes),
    )


def relocated_program(program: Program, place: str) -> Program:
    """As `relocated`, for a program."""
    if program.device == place:
        return program
    move = _Move(program.device, place)
    return program.model_copy(
        update={
            "device": place,
            "placeholders": tuple(move.placeholder(p) for p in program.placeholders),
            "forward": tuple(move.statement(s) for s in program.forward),
            "backward": tuple(move.statement(s) for s in program.backward),
        }
    )


def kind_of(device: str) -> str:
    """ "cuda" of "cuda:1"."""
    return device.partition(":")[0]


class _Move:
    """From every device of a kind to one place."""

    def __init__(self, home: str, place: str) -> None:
        self._kind = kind_of(home)
        self._place = place

    def placeholder(self, placeholder: Placeholder) -> Placeholder:
        return placeholder.model_copy(update={"tensor": self._meta(placeholder.tensor)})

    def node(self, node: Node) -> Node:
        results = tuple(
            result.model_copy(update={"tensor": self._meta(result.tensor)})
            for result in node.results
        )
        return node.model_copy(update={"results": results, **self._arguments(node)})

    def statement(self, statement: Statement) -> Statement:
        device = self._name(statement.device)
        return statement.model_copy(update={"device": device, **self._arguments(statement)})

    def _arguments(self, call: Node | Statement) -> dict[str, Args | Kwargs]:
        return {
            "args": tuple(self._argument(item) for item in call.args),
            "kwargs": {key: self._argument(item) for key, item in call.kwargs.items()},
        }

    def _argument(self, argument: Argument) -> Argument:
        match argument:
            case Literal("device", name):
                return Literal("device", self._name(name))
            case tuple():
                return tuple(self._argument(item) for item in argument)
        return argument

    def _meta(self, meta: TensorMeta) -> TensorMeta:
        return meta.model_copy(update={"device": self._name(meta.device)})

    def _name(self, device: str) -> str:
        return self._place if kind_of(device) == self._kind else device


def results_on_host(trace: Trace, storages: set[int]) -> Trace:
    """The trace with everything in these storages on the CPU."""

    def moved(result: Result) -> Result:
        if result.storage not in storages:
            return result
        return result.model_copy(
            update={"tensor": result.tensor.model_copy(update={"device": "cpu"})}
        )

    if not storages:
        return trace
    return trace.replace(
        nodes=tuple(
            node.model_copy(update={"results": tuple(moved(r) for r in node.results)})
            for node in trace.nodes
        )
    )
