"""Graphs and traces whose parts agree, from generated ones.

A JSON schema describes each field, and cannot say that two fields agree: that an operation reads
what an earlier one produces, or that a tensor has as many strides as sizes. These functions change
only what has to agree: sizes, costs, flags and names stay as they were generated.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import prod
from typing import Any

_LIMIT_BYTES = 2**62
_LIMIT_S = 1e100


def consistent_graph(graph: dict[str, Any]) -> dict[str, Any]:
    """Return a graph in which each value is produced once, before it is read."""
    operations = [dict(operation) for operation in graph["operations"]]
    values = list(graph["values"]) if operations else []
    names = _unique_names()
    start = 0
    for index, operation in enumerate(operations):
        end = (index + 1) * len(values) // len(operations)
        operation["name"] = names(operation["name"])
        operation["inputs"] = _within(operation["inputs"], start)
        operation["outputs"] = list(range(start, end))
        if operation.get("overwrites"):
            produced_bytes = sum(value["size_bytes"] for value in values[start:end])
            overwrites = operation["inputs"][: len(operation["overwrites"])]
            fits = sum(values[v]["size_bytes"] for v in overwrites) <= produced_bytes
            operation["overwrites"] = overwrites if fits else []
        start = end
    overwritten = {v for operation in operations for v in operation.get("overwrites", ())}
    results = set(_within(graph["results"], len(values))) - overwritten
    graph = {**graph, "operations": operations, "values": values, "results": sorted(results)}
    if graph["boundary"] is not None:
        graph["boundary"] = int(graph["boundary"]) % len(operations) if operations else None
    if graph["boundary"] is not None:
        operations[graph["boundary"]]["recomputable"] = False
    if graph.get("library_bytes", 0) > graph["constant_bytes"]:
        graph["library_bytes"] = graph["constant_bytes"]
    return _with_small_totals(graph)


def _with_small_totals(graph: dict[str, Any]) -> dict[str, Any]:
    """Return the graph with sizes and costs whose sums are in range."""
    sizes = [value["size_bytes"] for value in graph["values"]]
    workspaces = [operation["workspace_bytes"] for operation in graph["operations"]]
    if sum(sizes) + graph["constant_bytes"] + max(workspaces, default=0) >= _LIMIT_BYTES:
        for value in graph["values"]:
            value["size_bytes"] = 1
        for operation in graph["operations"]:
            operation["workspace_bytes"] = 0
            operation["overwrites"] = []
        graph |= {"constant_bytes": 1, "library_bytes": 0}
    if sum(operation["cost_s"] for operation in graph["operations"]) >= _LIMIT_S:
        for operation in graph["operations"]:
            operation["cost_s"] = 1.0
    return graph


def consistent_trace(trace: dict[str, Any]) -> dict[str, Any]:
    """Return a trace with costs, whose names and storages are defined before they are used."""
    return _TraceBuilder(trace).build()


class _TraceBuilder:
    """Defines the tensors of a trace in order. Each is in a storage of its own, unless a view."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self._trace = trace
        self._name, self._node_name = (_unique_names("backward_start") for _ in range(2))
        self._storages = count()
        self._forward: dict[str, int] = {}
        """The storage of each tensor that the forward may read."""
        self._backward: dict[str, int] = {}
        """The storage of each other tensor."""

    def build(self) -> dict[str, Any]:
        """Return the trace with consistent parts."""
        trace = self._trace
        placeholders = [self._placeholder(p) for p in trace["placeholders"]]
        tangents = [p["name"] for p in placeholders if p["kind"] == "tangent"]
        nodes = [self._node(node) for node in trace["nodes"]]
        outputs = [self._output(output, tangents) for output in trace["outputs"]]
        defined = [*self._forward, *self._backward]
        gradients = [
            {"placeholder": defined[i % len(defined)], "name": defined[-1 - i % len(defined)]}
            for i, _ in enumerate(trace["gradients"] if defined else ())
        ]
        used = next(self._storages)
        sizes = [size % 2**40 for size in trace["storage_bytes"]]
        return {
            **trace,
            "placeholders": placeholders,
            "nodes": nodes,
            "outputs": [output for output in outputs if output],
            "gradients": gradients,
            "storage_bytes": [*sizes, *[64] * (used - len(sizes))],
            "library_bytes": trace.get("library_bytes", 0) % 2**40,
            "inputs": _consistent_structure(trace["inputs"], iter(range(10**6))),
            "result": _result_structure(trace["result"], len(outputs) if self._forward else 0),
        }

    def _placeholder(self, placeholder: dict[str, Any]) -> dict[str, Any]:
        return {**placeholder, **self._tensor(placeholder, placeholder["kind"] == "tangent")}

    def _tensor(
        self, tensor: dict[str, Any], is_backward: bool, storage: int | None = None
    ) -> dict[str, Any]:
        """Define a tensor; return its name, storage and sizes."""
        name = self._name(tensor["name"])
        storage = next(self._storages) if storage is None else storage
        (self._backward if is_backward else self._forward)[name] = storage
        meta = dict(tensor["tensor"])
        meta["stride"] = [*meta["stride"], *[0] * 64][: len(meta["shape"])]
        if prod(map(int, meta["shape"])) >= 2**63:
            meta["shape"] = [1] * len(meta["shape"])
        return {"name": name, "storage": storage, "tensor": meta}

    def _node(self, node: dict[str, Any]) -> dict[str, Any]:
        is_backward = node.get("backward", False)
        names = [*self._forward, *(self._backward if is_backward else ())]
        storages = list(self._forward.values())
        parts: dict[str, Any] = {}
        if "args" in node:
            parts["args"] = _with_names(node["args"], names)
        if "kwargs" in node:
            parts["kwargs"] = {k: _with_names(item, names) for k, item in node["kwargs"].items()}
        is_view = bool(node.get("view") and node.get("results") and storages)
        results = [
            {
                **result,
                **self._tensor(
                    result, is_backward, storages[i % len(storages)] if is_view else None
                ),
            }
            for i, result in enumerate(node.get("results", ()))
        ]
        cost_s = 1e-6 if node.get("cost_s") is None else min(node["cost_s"], 1e9)
        workspace_bytes = (node.get("workspace_bytes") or 0) % 2**40
        return {
            **node,
            **parts,
            "name": self._node_name(node["name"]),
            "results": results,
            "view": is_view,
            "cost_s": cost_s,
            "workspace_bytes": workspace_bytes,
        }

    def _output(self, output: dict[str, Any], tangents: list[str]) -> dict[str, Any]:
        names = list(self._forward)
        if not names:
            return {}
        tangent = tangents[0] if tangents and output.get("tangent") else ""
        return {**output, "name": names[len(output["name"]) % len(names)], "tangent": tangent}


def _unique_names(*reserved: str) -> Any:
    """Return a function that returns a name unchanged the first time, and then with a number."""
    used = set(reserved)

    def unique(name: str) -> str:
        candidates = (f"{name[:150]}_{number}" for number in count())
        while name in used:
            name = next(candidates)
        used.add(name)
        return name

    return unique


def _within(numbers: list[Any], limit: int) -> list[int]:
    """Return different numbers below a limit, in ascending order."""
    return sorted({int(number) % limit for number in numbers}) if limit else []


def _with_names(argument: Any, names: list[str]) -> Any:
    """Return an argument, or a container of them, that refers to these names only."""
    if isinstance(argument, list):
        return [_with_names(item, names) for item in argument]
    if not isinstance(argument, dict):
        return argument
    if set(argument) == {"ref"} and isinstance(argument["ref"], str):
        return {"ref": names[len(argument["ref"]) % len(names)]} if names else None
    return {key: _with_names(item, names) for key, item in argument.items()}


def _consistent_structure(structure: dict[str, Any], leaves: Iterator[int]) -> dict[str, Any]:
    """Return a structure with a key for each child; leaves are numbered from the iterator, and are
    constants once it has ended."""
    children = [_consistent_structure(c, leaves) for c in structure.get("children", ())]
    keys = structure.get("keys", [])
    structure = {**structure, "children": children}
    if structure["kind"] in ("dict", "object"):
        missing = range(len(keys), len(children))
        structure["keys"] = [*keys[: len(children)], *(f"key{i}" for i in missing)]
    if structure["kind"] == "leaf":
        leaf = next(leaves, None)
        structure |= {"kind": "value"} if leaf is None else {"leaf": leaf}
    return structure


def _result_structure(structure: dict[str, Any], outputs: int) -> dict[str, Any]:
    """Return a structure whose leaves are all outputs."""
    leaves = iter(range(outputs))
    consistent = _consistent_structure(structure, leaves)
    others = [{"kind": "leaf", "leaf": leaf} for leaf in leaves]
    return {"kind": "tuple", "children": [consistent, *others]} if others else consistent
