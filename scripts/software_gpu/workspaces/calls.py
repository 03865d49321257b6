"""A call of an operator on tensors of the device, and the same call as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from scripts.software_gpu.workspaces.case import Case

from remat.costs.layouts import span_bytes, span_elements
from remat.documents.arguments import Argument, Literal, Ref, encode_argument
from remat.documents.records import Node, Result, TensorMeta
from remat.frontend.common.operators import literal_to_torch, resolve_operator

Row = dict[str, Any]


def call_of(case: Case) -> Callable[[], object]:
    """Return a function that calls the operator on new tensors, whose elements do not matter."""
    operator = resolve_operator(case.target)
    args = [_build(item) for item in case.args]
    kwargs = {name: _build(item) for name, item in case.kwargs.items()}
    return lambda: operator(*args, **kwargs)


def _build(argument: object) -> object:
    if isinstance(argument, TensorMeta):
        dtype = literal_to_torch("dtype", argument.dtype)
        size = argument.offset + span_elements(argument.shape, argument.stride)
        flat = torch.empty(size, dtype=dtype, device=argument.device)  # type: ignore[arg-type]
        return flat.as_strided(argument.shape, argument.stride, argument.offset)
    if isinstance(argument, Literal):
        return literal_to_torch(argument.kind, argument.text)
    if isinstance(argument, tuple):
        return [_build(item) for item in argument]
    return argument


def results_of(returned: object) -> list[Row]:
    """Return the metadata of the tensors that a call returned, with larger storages."""
    items = returned if isinstance(returned, (list, tuple)) else [returned]
    storages: dict[int, int] = {}
    rows: list[Row] = []
    for position, item in enumerate(items):
        if not isinstance(item, torch.Tensor):
            continue
        meta = TensorMeta(
            dtype=str(item.dtype).removeprefix("torch."),
            shape=tuple(item.shape),
            stride=item.stride(),
            offset=int(item.storage_offset()),
            device=item.device.type,
        )
        storage = item.untyped_storage()
        row: Row = {
            "position": position,
            "tensor": encoded_meta(meta),
            "storage": storages.setdefault(storage.data_ptr(), len(storages)),
        }
        if storage.nbytes() > span_bytes(meta):
            row["storage_bytes"] = storage.nbytes()
        rows.append(row)
    return rows


def results_of_node(node: Node) -> list[Row]:
    """Return the metadata of the results of an operation of a trace."""
    storages: dict[int, int] = {}

    def row(result: Result) -> Row:
        return {
            "position": result.position,
            "tensor": encoded_meta(result.tensor),
            "storage": storages.setdefault(result.storage, len(storages)),
        }

    return [row(result) for result in node.results]


def encoded_meta(meta: TensorMeta) -> list[object]:
    """Return a tensor as JSON: dtype, shape, strides, offset and device."""
    device = meta.device.partition(":")[0]
    return [meta.dtype, list(meta.shape), list(meta.stride), meta.offset, device]


def encoded_call(case: Case) -> Row:
    """Return the operator and its arguments as JSON."""
    return {
        "target": case.target,
        "args": [_encoded(item) for item in case.args],
        "kwargs": {name: _encoded(item) for name, item in case.kwargs.items()},
    }


def _encoded(argument: object) -> object:
    if isinstance(argument, TensorMeta):
        return {"tensor": encoded_meta(argument)}
    if isinstance(argument, (tuple, list)):
        return [_encoded(item) for item in argument]
    return encode_argument(argument)  # type: ignore[arg-type]


def case_of_node(node: Node, metas: dict[str, TensorMeta]) -> Case:
    """Return the call that an operation of a trace makes."""

    def with_metas(argument: Argument) -> object:
        if isinstance(argument, Ref):
            return metas[argument.name]
        if isinstance(argument, tuple):
            return tuple(with_metas(item) for item in argument)
        return argument

    args = tuple(with_metas(item) for item in node.args)
    return Case(node.target, args, {name: with_metas(a) for name, a in node.kwargs.items()})
