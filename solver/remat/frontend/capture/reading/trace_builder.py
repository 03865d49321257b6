"""`TraceBuilder`: a trace under construction, with its tensors and storages by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from remat.documents.records import Gradient, Node, Output, Placeholder, Result, TensorMeta
from remat.errors import TraceError
from remat.frontend.capture.symbol_values import SymbolValues


def check_dense(tensor: torch.Tensor) -> None:
    """Raise `TraceError` for a tensor that is sparse, quantized or of a subclass."""
    if type(tensor).__name__ not in ("Tensor", "Parameter", "FakeTensor", "Buffer"):
        raise TraceError(f"tensors of type {type(tensor).__name__} (subclasses) are not supported")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TraceError(
            f"only strided dense tensors are supported, not {tensor.layout}. Remedy: use dense "
            "tensors, or plan the modules around that part: "
            'remat.enable(model, budget, scope="blocks")'
        )


@dataclass
class TraceBuilder:
    """The records of a trace that exist so far. The passes of this folder edit them in place.

    `storage_bytes` has the size of each storage by its index. `storage_by_name` and `meta_by_name`
    have the storage index and the metadata of each tensor. `existing_storages` are the storages of
    the graph inputs and of the results so far.
    """

    placeholders: list[Placeholder] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    storage_bytes: list[int] = field(default_factory=list)
    storage_by_name: dict[str, int] = field(default_factory=dict)
    meta_by_name: dict[str, TensorMeta] = field(default_factory=dict)
    existing_storages: set[int] = field(default_factory=set)
    symbol_values: SymbolValues = field(default_factory=SymbolValues)
    _index_by_storage: dict[int, int] = field(default_factory=dict)
    _meta_by_key: dict[tuple[object, ...], TensorMeta] = field(default_factory=dict)
    """The metadata so far, to be shared: a network has few different ones."""

    def storage_index(self, tensor: torch.Tensor) -> int:
        """Return the index of a fake tensor's storage; a new index at the first call for it."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._index_by_storage:
            self._index_by_storage[address] = len(self.storage_bytes)
            self.storage_bytes.append(self.symbol_values.size(storage.nbytes()))
        return self._index_by_storage[address]

    def tensor_meta(self, tensor: torch.Tensor) -> TensorMeta:
        """Return shape, stride, dtype and device of a real or fake tensor."""
        check_dense(tensor)
        size = self.symbol_values.size
        shape, stride = tuple(map(size, tensor.shape)), tuple(map(size, tensor.stride()))
        key = (tensor.dtype, shape, stride, size(tensor.storage_offset()), tensor.device)
        if key not in self._meta_by_key:
            self._meta_by_key[key] = TensorMeta(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=shape,
                stride=stride,
                offset=key[3],
                device=str(tensor.device),
            )
        return self._meta_by_key[key]

    def new_result(self, name: str, tensor: torch.Tensor, position: int = -1) -> Result:
        """Register a fake tensor that an operation of the joint graph returns. `position` is its
        index in the returned tuple, or -1."""
        meta = self.tensor_meta(tensor)
        return self._register(name, meta, self.storage_index(tensor), position)

    def new_dense_result(self, name: str, like: TensorMeta, stride: tuple[int, ...]) -> Result:
        """Register the result of an added operation: shape and dtype of `like`, in a new storage
        that it fills."""
        elements = 1 + sum((n - 1) * s for n, s in zip(like.shape, stride, strict=True))
        element_bytes = getattr(torch, like.dtype).itemsize
        self.storage_bytes.append(0 if 0 in like.shape else elements * element_bytes)
        meta = like.model_copy(update={"stride": stride, "offset": 0})
        return self._register(name, meta, len(self.storage_bytes) - 1, -1)

    def _register(self, name: str, meta: TensorMeta, storage: int, position: int) -> Result:
        self.meta_by_name[name] = meta
        self.storage_by_name[name] = storage
        return Result(name=name, tensor=meta, storage=storage, position=position)

    def add_placeholder(self, placeholder: Placeholder) -> None:
        """Add a graph input or a constant."""
        self.placeholders.append(placeholder)
        self.meta_by_name[placeholder.name] = placeholder.tensor
        self.storage_by_name[placeholder.name] = placeholder.storage
        self.existing_storages.add(placeholder.storage)

    def add_storages(self, operator: str, results: Sequence[Result]) -> bool:
        """Add the storages of an operation's results; return True if the operation is a view.

        It is a view if all of its results are in storages that exist already. Raises `TraceError`
        if only some of them are.
        """
        storages = {result.storage for result in results}
        is_view = bool(storages) and storages <= self.existing_storages
        if not is_view and storages & self.existing_storages:
            raise TraceError(
                f"{operator} returns both new tensors and views of its inputs, which cannot be "
                "scheduled; clone its inputs or replace it"
            )
        self.existing_storages |= storages
        return is_view

    def reads_storage(self, node: Node, storage: int) -> bool:
        """True if the node reads the storage, directly or through a view."""
        return any(self.storage_by_name[name] == storage for name in node.operand_names)

    def main_device(self) -> str:
        """Return the device of the step: the accelerator with most tensors, else the CPU."""
        counts: dict[str, int] = {}
        for meta in self.meta_by_name.values():
            counts[meta.device] = counts.get(meta.device, 0) + 1
        return max(counts, key=lambda name: (name != "cpu", counts[name]))
