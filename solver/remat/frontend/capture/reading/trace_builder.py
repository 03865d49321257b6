"""`TraceBuilder`: reads fx nodes as the records of a trace, with its tensors and storages by name.

The recorded step of a capture, the joint graph of AOTAutograd and single operations whose costs are
measured are all read by it. They differ in two parameters: the value of a symbolic size (that of a
call, or the upper bound), and the storage of a tensor (of its fake tensor, or by schemas).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from remat.documents.arguments import Argument, Ref
from remat.documents.records import (
    Environment,
    Gradient,
    Node,
    Output,
    Placeholder,
    Result,
    TensorMeta,
)
from remat.documents.structure import Structure
from remat.documents.trace import Trace
from remat.errors import TraceError
from remat.frontend.capture.symbol_values import SYMBOLIC_TYPES, SymbolicNumber, SymbolValues
from remat.frontend.common.aliases import is_getitem, mutated_args
from remat.frontend.common.operators import argument_from_torch, is_random

OPAQUE_TARGET = "remat.opaque.default"
"""The target of calls that cannot be described. There is no rule for it."""

StorageOf: TypeAlias = Callable[[fx.Node, int, torch.Tensor], tuple[Hashable, Any]]
"""A function that returns the key of the storage of a tensor, and the storage's bytes. It is called
with the node that returns the tensor, the tensor's position in the returned tuple (or -1), and the
fake tensor."""


def fake_storage(node: fx.Node, position: int, tensor: torch.Tensor) -> tuple[Hashable, Any]:
    """Return the storage of the fake tensor itself: a `StorageOf`."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def identifier(name: str) -> str:
    """Return a node's name as a trace allows it: after an "n" if it begins with two underscores."""
    return f"n{name}" if name.startswith("__") else name


def check_dense_tensor(tensor: torch.Tensor) -> None:
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
    value_of: Callable[[Any], Any] = SymbolValues().concrete
    """Returns the value of a symbolic number."""
    storage_of: StorageOf = fake_storage
    allows_opaque: bool = False
    """True if a call without a schema (a higher-order operator, a Triton kernel), or with arguments
    that are no data, becomes an operation with the target `OPAQUE_TARGET`, whose arguments are the
    tensors that it reads."""
    arguments: dict[fx.Node, Argument] = field(default_factory=dict)
    """The nodes that were read, as arguments of the nodes that follow."""
    _index_by_storage: dict[Hashable, int] = field(default_factory=dict)
    _meta_by_key: dict[tuple[object, ...], TensorMeta] = field(default_factory=dict)
    """The metadata so far, to be shared: a network has few different ones."""

    # -- fx nodes ---------------------------------------------------------------------------

    def read_input(self, node: fx.Node, tensor: torch.Tensor, **fields: Any) -> Placeholder:
        """Add a graph input or a constant with this value. `fields` are the other fields of its
        record."""
        placeholder = Placeholder(
            name=identifier(node.name),
            tensor=self.tensor_meta(tensor),
            storage=self.storage_index(node, -1, node.meta.get("val", tensor)),
            **fields,
        )
        self.arguments[node] = Ref(placeholder.name)
        self.placeholders.append(placeholder)
        self.meta_by_name[placeholder.name] = placeholder.tensor
        self.storage_by_name[placeholder.name] = placeholder.storage
        self.existing_storages.add(placeholder.storage)
        return placeholder

    def read_call(
        self, node: fx.Node, target: str = "", *, returns: bool = True, **fields: Any
    ) -> Node:
        """Return the record of a call, with the name `target` of its operator (by default the
        node's) and other `fields`. Register its results unless it `returns` nothing new: an
        operator that writes into an argument returns this argument.

        Raises `TraceError` for an argument or a result that cannot be written as data. Where
        `allows_opaque`, the call is opaque instead.
        """
        results = self.read_results(node) if returns else ()
        if not returns:
            self.arguments.update((node, self._encode(n)) for n in mutated_args(node)[:1])
        is_view = self.add_storages(str(node.target), results)

        def record(name: str, args: Iterable[Argument], kwargs: dict[str, Argument]) -> Node:
            return Node(
                name=identifier(node.name),
                target=name,
                args=tuple(args),
                kwargs=kwargs,
                results=results,
                view=is_view,
                random=is_random(node),
                **fields,
            )

        try:
            args = [argument_from_torch(item, self._encode) for item in node.args]
            kwargs = {k: argument_from_torch(v, self._encode) for k, v in node.kwargs.items()}
            return record(target or str(node.target), args, kwargs)
        except (TraceError, ValueError):
            if not self.allows_opaque:
                raise
        read = (self.arguments[n] for n in node.all_input_nodes if n in self.arguments)
        return record(OPAQUE_TARGET, read, {})

    def read_results(self, node: fx.Node) -> tuple[Result, ...]:
        """Register the tensors that a node returns, and return their records. The items of a tuple
        have the names of the `getitem` nodes that select them. Raises `TraceError` for a list that
        is used as a whole."""
        value, name = node.meta.get("val"), identifier(node.name)
        if isinstance(value, torch.Tensor):
            self.arguments[node] = Ref(name)
            return (self._new_result(node, name, value, -1),)
        if not isinstance(value, (list, tuple)):
            return ()
        names: dict[int, str] = {}
        for user in node.users:
            position = user.args[1] if is_getitem(user) else None
            if not isinstance(position, int):
                raise TraceError(
                    f"{node.target} returns a list that is passed on as a list; only its items can "
                    "be traced: run that part outside of the model"
                )
            item = value[position]
            item_name = names.setdefault(position, identifier(user.name))
            is_tensor = isinstance(item, torch.Tensor)
            self.arguments[user] = Ref(item_name) if is_tensor else self._number(item)
        return tuple(
            self._new_result(node, names.get(i, f"{name}_{i}_"), item, i)
            for i, item in enumerate(value)
            if isinstance(item, torch.Tensor)
        )

    def _encode(self, value: object) -> Argument:
        """Return an argument that is a node, or a number of a symbolic capture."""
        if not isinstance(value, fx.Node):
            return self._number(value)
        if value not in self.arguments:  # single operations are read without what they read
            item = value.meta.get("val")
            if isinstance(item, torch.Tensor):
                self.meta_by_name[identifier(value.name)] = self.tensor_meta(item)
                self.arguments[value] = Ref(identifier(value.name))
            else:
                self.arguments[value] = self._number(item)
        return self.arguments[value]

    def _number(self, value: Any) -> Argument:
        if isinstance(value, (*SYMBOLIC_TYPES, SymbolicNumber)):
            return self.value_of(value)
        if value is None or isinstance(value, (bool, int, float, complex)):
            return value
        raise TraceError(
            f"an operation of the graph has an argument of type {type(value).__name__}, which "
            "cannot be written as data"
        )

    def tensor_name(self, node: fx.Node) -> str:
        """Return the name of the tensor that a node returns."""
        argument = self.arguments[node]
        assert isinstance(argument, Ref)
        return argument.name

    def size(self, size: int | torch.SymInt) -> int:
        """Return a size, stride or number of bytes as an int."""
        return size if type(size) is int else int(self.value_of(size))

    def storage_index(self, node: fx.Node, position: int, tensor: torch.Tensor) -> int:
        """Return the index of the storage of a tensor that a node returns; a new index at the first
        call for it."""
        key, size_bytes = self.storage_of(node, position, tensor)
        if key not in self._index_by_storage:
            self._index_by_storage[key] = len(self.storage_bytes)
            self.storage_bytes.append(self.size(size_bytes))
        return self._index_by_storage[key]

    # -- records ----------------------------------------------------------------------------

    def tensor_meta(self, tensor: torch.Tensor) -> TensorMeta:
        """Return shape, stride, dtype and device of a real or fake tensor."""
        check_dense_tensor(tensor)
        shape, stride = tuple(map(self.size, tensor.shape)), tuple(map(self.size, tensor.stride()))
        key = (tensor.dtype, shape, stride, self.size(tensor.storage_offset()), tensor.device)
        if key not in self._meta_by_key:
            self._meta_by_key[key] = TensorMeta(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=shape,
                stride=stride,
                offset=key[3],
                device=str(tensor.device),
            )
        return self._meta_by_key[key]

    def new_dense_result(self, name: str, like: TensorMeta, stride: tuple[int, ...]) -> Result:
        """Return the registered result of an added operation: it has the shape and dtype of `like`
        and this stride, in a new storage that it fills."""
        elements = 1 + sum((n - 1) * s for n, s in zip(like.shape, stride, strict=True))
        element_bytes = getattr(torch, like.dtype).itemsize
        self.storage_bytes.append(0 if 0 in like.shape else elements * element_bytes)
        meta = like.model_copy(update={"stride": stride, "offset": 0})
        return self._register(name, meta, len(self.storage_bytes) - 1, -1)

    def new_view_result(self, name: str, meta: TensorMeta, base: str) -> Result:
        """Return the registered result of an added view of the tensor `base`."""
        return self._register(name, meta, self.storage_by_name[base], -1)

    def _new_result(self, node: fx.Node, name: str, tensor: torch.Tensor, position: int) -> Result:
        storage = self.storage_index(node, position, tensor)
        return self._register(name, self.tensor_meta(tensor), storage, position)

    def _register(self, name: str, meta: TensorMeta, storage: int, position: int) -> Result:
        self.meta_by_name[name] = meta
        self.storage_by_name[name] = storage
        return Result(name=name, tensor=meta, storage=storage, position=position)

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

    def step(self, outputs: Sequence[fx.Node], gradients: Sequence[fx.Node]) -> Trace:
        """Return the trace of a step without a model, which returns these outputs of its forward
        and these tensors of its backward."""
        primal = next(p.name for p in self.placeholders if p.kind == "input")
        names = dict.fromkeys(map(self.tensor_name, outputs))
        leaves = tuple(Structure(kind="leaf", leaf=n) for n in range(len(names)))
        return Trace(
            device=self.main_device(),
            placeholders=tuple(self.placeholders),
            nodes=tuple(self.nodes),
            outputs=tuple(Output(name=name, differentiable=False) for name in names),
            gradients=tuple(
                Gradient(placeholder=primal, name=name)
                for name in dict.fromkeys(map(self.tensor_name, gradients))
            ),
            storage_bytes=tuple(self.storage_bytes),
            inputs=Structure(kind="tuple"),
            result=Structure(kind="tuple", children=leaves),
            environment=Environment(torch=torch.__version__, training=True),
        )
