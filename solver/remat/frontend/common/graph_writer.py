"""`GraphWriter`: writes the calls of a trace or of a program into an fx graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from remat.documents.program import Binding, Statement
from remat.documents.records import Node, Result
from remat.frontend.common.operators import argument_to_torch


class GraphWriter:
    """An fx graph that is written call by call. `nodes` has the node of each tensor by name."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes: dict[str, Any] = {}

    def arguments(self, record: Node | Statement) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of a call, in which names are replaced by the
        nodes of these tensors. Raises `DocumentError` for an unknown name."""
        args = tuple(argument_to_torch(item, self.nodes) for item in record.args)
        kwargs = {key: argument_to_torch(v, self.nodes) for key, v in record.kwargs.items()}
        return args, kwargs

    def call(
        self,
        function: Callable[..., object],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """Append a call to the graph, and return its node."""
        return self.graph.call_function(function, tuple(args), dict(kwargs or {}))

    def bind(self, call: fx.Node, results: Iterable[Result | Binding]) -> None:
        """Register the results of a call. The items of a tuple are selected right after the call,
        or the tuple would keep all of them alive."""
        for result in results:
            is_item = result.position >= 0
            node = self.call(operator.getitem, (call, result.position)) if is_item else call
            self.nodes[result.name] = node
