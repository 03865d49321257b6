"""`OperatorRecorder`: a dispatch mode that records operators in a graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx.experimental import symbolic_shapes
from torch.utils._python_dispatch import TorchDispatchMode

from remat.errors import TraceError
from remat.frontend.capture.eager_kernels.fake_results import STORAGE_COPIES, fake_in_copied_storage
from remat.frontend.capture.lifetimes import Lifetimes
from remat.frontend.capture.model.forward_checks import GeneratorWatch
from remat.frontend.capture.model.module_paths import ModulePaths
from remat.frontend.capture.model.wrapped_code import CheckpointCall, current_checkpoint
from remat.frontend.capture.reading.reader import GraphInput
from remat.frontend.capture.symbol_values import SYMBOLIC_TYPES, SymbolicNumber
from remat.frontend.common.writes import write, writer_of

Tensor = torch.Tensor

_aten = torch.ops.aten


class ForeignTensorError(Exception):
    """The model reads a tensor that is none of its inputs, and no result of its operations: one
    that an earlier call or capture stored."""


class _TensorNode(NamedTuple):
    """The node of a tensor, an alias of the tensor, and the number of writes into its storage
    before the node."""

    node: fx.Node
    tensor: Tensor
    write_count: int = 0


@dataclass
class _WrittenStorage:
    """A storage that operators write into: the node of the last write, which returns the whole
    tensor, and the node's fake result, which has its own storage."""

    node: fx.Node
    value: Tensor
    write_count: int = 0


class OperatorRecorder(TorchDispatchMode):
    """A mode that appends each operator to a graph. The `val` of a node is its fake result; its
    `module` is the path of the module whose forward called it, or whose backward it belongs to. Its
    `checkpoint` is the number of the checkpoint that ran it, and `is_saved` whether that one saves
    its result; see `remat.documents.records.Node`.

    The graph is functional. An operator that writes into a part of a tensor becomes a call of
    `remat.write`, which returns the whole tensor after the write; see `write_recorded`. Later
    operators read views of this result.
    """

    supports_higher_order_operators = True

    def __init__(self, module_paths: ModulePaths, generators: GeneratorWatch) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.inputs: dict[GraphInput, fx.Node] = {}
        self.is_backward = False
        self._module_paths = module_paths
        self._generators = generators
        self.freed: list[tuple[fx.Node, fx.Node]] = []
        """For each storage that is freed, the last operation before, and the storage's last node.
        """
        self._lifetimes = Lifetimes(self._note_free, self._forget)
        self.last_operation: fx.Node | None = None
        self._nodes: dict[int, _TensorNode] = {}
        """The node of each live tensor, and of the aliases in `_allocations`, by their `id`."""
        self._allocations: dict[int, _TensorNode] = {}
        """The first node of each storage, by the storage's address."""
        self._allocated_ids: dict[int, int] = {}
        """The `id` of the tensor of each of them, while it lives."""
        self._buffers: dict[int, _WrittenStorage] = {}
        """The storages that operators have written into, by their addresses."""
        self._written: tuple[OpOverload, Tensor] | None = None
        self._checkpoints: dict[CheckpointCall, int] = {}
        self._last_input = self.graph._root

    def add_input(self, name: str, key: GraphInput, tensor: Tensor) -> None:
        """Add a placeholder after the others; `tensor` is its fake tensor."""
        with self.graph.inserting_after(self._last_input):
            self._last_input = self.inputs[key] = self.graph.placeholder(name)
        self._set_value(self._last_input, tensor)

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor: a new view if its storage was written into since. A real
        tensor that no recorded operation returned is a constant: `torch.tensor` makes such. Raises
        `ForeignTensorError` for a fake one."""
        if id(tensor) not in self._nodes:
            if isinstance(tensor, FakeTensor):
                raise ForeignTensorError(f"a tensor of shape {tuple(tensor.shape)}")
            name = f"_tensor_constant{len(self.constants)}"
            self.constants[name] = tensor
            self._set_value(self.graph.create_node("get_attr", name), tensor)
        record = self._nodes[id(tensor)]
        buffer = self._buffers.get(_storage_address(tensor))
        if buffer is not None and record.write_count < buffer.write_count:
            record = _TensorNode(self._view_of(buffer, tensor), record.tensor, buffer.write_count)
            self._nodes[id(tensor)] = record
        return record.node

    # -- writes -----------------------------------------------------------------------------

    def may_write(self, tensor: Tensor) -> bool:
        """True if a write into this tensor can be recorded: an operation of the step allocated its
        storage, for one tensor without overlap or gaps, of the same dtype, and not complex."""
        allocation = self._allocations.get(_storage_address(tensor))
        if allocation is None or allocation.node.op != "call_function":
            return False
        whole = allocation.tensor
        return (
            tensor.dtype == whole.dtype
            and not whole.dtype.is_complex
            and self.is_whole(whole)
            and _is_certain(whole.storage_offset() == 0)
            and torch._debug_has_internal_overlap(whole) == 0
        )

    def is_whole(self, tensor: Tensor) -> bool:
        """True if a tensor has as many elements as its storage."""
        size_bytes = tensor.numel() * tensor.element_size()
        return _is_certain(size_bytes == tensor.untyped_storage().nbytes())

    @contextmanager
    def write_recorded(self, func: OpOverload, tensor: Tensor) -> Iterator[None]:
        """Within the context, record a call of `func` as a write into `tensor`."""
        self._written = func, tensor
        try:
            yield
        finally:
            self._written = None

    def _record_write(
        self, func: OpOverload, tensor: Tensor, args: Any, kwargs: dict[str, Any]
    ) -> None:
        writer = writer_of(func)
        assert writer is not None
        allocation = self._allocations[_storage_address(tensor)]
        whole = allocation.tensor
        others = {key: item for key, item in kwargs.items() if key != writer.out_name}
        part = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        arguments = args if writer.out_name else args[1:]
        node = self._create_node(
            write,
            (self.node_of(whole), str(func), *part, *arguments),
            others,
            f"write_{func.overloadpacket.__name__.strip('_')}",
        )
        value = torch.empty_strided(
            whole.shape, whole.stride(), dtype=whole.dtype, device=whole.device
        )
        node.meta["val"] = value
        buffer = self._buffers.setdefault(_storage_address(tensor), _WrittenStorage(node, value))
        buffer.node, buffer.value = node, value
        buffer.write_count += 1
        for key in (id(whole), self._allocated_ids.get(_storage_address(whole))):
            if key in self._nodes:
                self._nodes[key] = _TensorNode(node, whole, buffer.write_count)

    def _view_of(self, buffer: _WrittenStorage, tensor: Tensor) -> fx.Node:
        """Return a new node for a view of a storage that was written into after the view's node."""
        base = buffer.node
        if tensor.dtype != buffer.value.dtype:
            elements = buffer.value.numel()
            flat = self._create_node(_aten.as_strided.default, (base, [elements], [1], 0), {})
            flat.meta["val"] = buffer.value.as_strided((elements,), (1,), 0)
            base = self._create_node(_aten.view.dtype, (flat, tensor.dtype), {})
            base.meta["val"] = flat.meta["val"].view(tensor.dtype)
        part = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        node = self._create_node(_aten.as_strided.default, (base, *part), {})
        node.meta["val"] = _fake_view_of_storage(buffer, tensor)
        return node

    # -- operators --------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self._generators.note_random_operation()
        if self._written is not None and self._written[0] is func:
            tensor = self._written[1]
            self._record_write(func, tensor, args, kwargs)
            return func(*args, **kwargs)
        if not isinstance(func, OpOverload):
            raise TraceError(
                f"the model uses {func}, which is not a single operator (but a higher-order "
                "operator or the Python function of a custom kernel); run that part outside of the "
                "model"
            )
        if func is _aten.lift_fresh.default:
            func = _aten.lift_fresh_copy.default  # a constant must not be written into
        result = func(*args, **kwargs)
        if func in STORAGE_COPIES:
            result = fake_in_copied_storage(args[0])
        if isinstance(result, (Tensor, list, tuple)):
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        node = self._create_node(func, args, kwargs, func.overloadpacket.__name__)
        if (call := current_checkpoint()) is not None:
            node.meta["checkpoint"] = self._checkpoints.setdefault(call, len(self._checkpoints) + 1)
            node.meta["is_saved"] = call.saves(func, args, kwargs, result)
        self._set_value(node, result)

    def _create_node(
        self, func: Any, args: Iterable[Any], kwargs: dict[str, Any], name: str = ""
    ) -> fx.Node:
        node = self.graph.create_node(
            "call_function",
            func,
            tuple(map(self._argument, args)),
            {name: self._argument(value) for name, value in kwargs.items()},
            name=self.graph._target_to_str(name or func.overloadpacket.__name__),
        )
        node.meta["module"] = self._module_paths.current
        node.meta["is_backward"] = self.is_backward
        self.last_operation = node
        return node

    def _argument(self, item: Any) -> Any:
        if isinstance(item, fx.Node):
            return item
        if isinstance(item, Tensor):
            return self.node_of(item)
        if isinstance(item, (list, tuple)):
            return [self._argument(i) for i in item]
        if isinstance(item, SYMBOLIC_TYPES):
            return SymbolicNumber(item.node.expr)
        return item

    def _set_value(self, node: fx.Node, value: Any) -> None:
        """Set the fake result of a node: an alias, so that the recorder does not lengthen the life
        of the tensor."""
        if isinstance(value, Tensor):
            alias = value.detach() if isinstance(value, FakeTensor) else value
            node.meta["val"] = self._in_written_storage(alias)
            address = _storage_address(value)
            buffer = self._buffers.get(address)
            write_count = 0 if buffer is None else buffer.write_count
            record = self._nodes[id(value)] = _TensorNode(node, alias, write_count)
            if address not in self._allocations:
                self._allocations[address] = self._nodes[id(alias)] = record
                self._allocated_ids[address] = id(value)
            if alias is not value:
                self._lifetimes.add(value, address)
            return
        items = [t.detach() if isinstance(t, FakeTensor) else t for t in value]
        node.meta["val"] = self._in_written_storage(type(value)(items))
        for index, item in enumerate(value):
            getter = self.graph.create_node("call_function", operator.getitem, (node, index))
            if isinstance(item, Tensor):
                self._set_value(getter, item)

    def _in_written_storage(self, value: Any) -> Any:
        """Return a fake result as a view of the last write's result, if its storage was written
        into; else unchanged."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._in_written_storage, value))
        buffer = self._buffers.get(_storage_address(value)) if isinstance(value, Tensor) else None
        return value if buffer is None else _fake_view_of_storage(buffer, value)

    # -- lifetimes --------------------------------------------------------------------------

    def end(self) -> None:
        """Forget the tensors: what is freed from now on was live until the end of the step."""
        self._lifetimes.stop()

    def _note_free(self, address: int) -> None:
        self._allocated_ids.pop(address, None)
        last = self._buffers.get(address) or self._allocations[address]
        if self.last_operation is not None:
            self.freed.append((self.last_operation, last.node))

    def _forget(self, tensor_id: int) -> None:
        self._nodes.pop(tensor_id, None)


_is_certain = getattr(symbolic_shapes, "statically_known_true")  # noqa: B009  # its name has a word that ours must not have
"""True if a comparison of sizes holds for all values of their symbols."""


def _storage_address(tensor: Tensor) -> int:
    """Return a number that identifies the storage of a tensor; -1 for a sparse tensor."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -1


def _fake_view_of_storage(buffer: _WrittenStorage, tensor: Tensor) -> Tensor:
    """Return a fake view of the last write's result, in the layout and dtype of a tensor."""
    whole = buffer.value
    if tensor.dtype != whole.dtype:
        whole = whole.as_strided((whole.numel(),), (1,), 0).view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
