"""`Call` and `SplitCall`: the input and the output of an operator's rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from remat.documents.arguments import Args, Argument, Ref
from remat.documents.records import Node, TensorMeta
from remat.passes.split.states import WHOLE, State


@dataclass(frozen=True)
class Call:
    """An operation, the metadata of all tensors, and the states of those that it reads."""

    node: Node
    metas: Mapping[str, TensorMeta]
    states: Mapping[str, State]
    rows: int

    def meta(self, index: int) -> TensorMeta:
        """Return the metadata of an argument that is a tensor."""
        return self.metas[self.name(index)]

    def name(self, index: int) -> str:
        """Return the name of an argument that is a tensor; "" if it is none."""
        argument = self.argument(index)
        return argument.name if isinstance(argument, Ref) else ""

    def state(self, index: int) -> State:
        """Return the state of an argument; no tensor is whole."""
        return self.states.get(self.name(index), WHOLE)

    @property
    def all_states(self) -> list[State]:
        """The states of the tensors that the operation reads."""
        return [self.states.get(name, WHOLE) for name in self.tensors]

    def argument(self, index: int, default: Argument = None) -> Any:
        """Return an argument, or the default if the call leaves it out."""
        return self.node.args[index] if index < len(self.node.args) else default

    @property
    def tensors(self) -> list[str]:
        """The names of the tensors that the operation reads, each once."""
        return list(dict.fromkeys(self.node.operand_names))


@dataclass(frozen=True)
class SplitCall:
    """The states of an operation's results, and what a piece of it calls.

    `results` has a state for each of the node's results. `arguments` returns the arguments of a
    piece with so many rows, if they differ from those of the whole; `target` is its operator, if
    another. The argument with the index `scaled` is multiplied by the piece's share of the rows.
    """

    results: tuple[State, ...]
    arguments: Callable[[int], Args] | None = None
    target: str = ""
    scaled: int | None = None


Rule = Callable[[Call], SplitCall | None]
"""Returns what a call in these states gives; None if it cannot be split so."""


def all_results(call: Call, state: State) -> SplitCall:
    """Return the call of which all results have one state."""
    return SplitCall((state,) * len(call.node.results))


def replaced(call: Call, index: int, argument: Argument) -> Args:
    """Return the arguments of the call with another one at `index`."""
    return (*call.node.args[:index], argument, *call.node.args[index + 1 :])
