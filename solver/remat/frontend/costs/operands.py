"""Operands: real tensors for operations of a trace, with contents that their kernels accept.

Results of a forward that its backward reads, except the first (a log-sum-exp, a random seed, the
statistics of a norm, the indices of a pool), come from running that forward: only its kernel
determines their contents and device. All other tensors are synthetic. Floats are normally
distributed, and positive for probabilities or variances. Integers that an operation uses as indices
are random and in range, since that decides its speed. Other integers are zero, which is a valid
index of every table (an invalid index breaks a CUDA context for good).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch._ops import OpOverload

from remat.costs.layouts import span_bytes, span_elements
from remat.documents.arguments import Argument, Literal, Ref, referenced_names
from remat.documents.records import Node, Result, TensorMeta
from remat.errors import RematError
from remat.frontend.common.operators import (
    MEASURABLE_NAMESPACES,
    literal_to_torch,
    resolve_operator,
)
from remat.frontend.common.torch_modes import NEEDS_GRAD_MODE, run_with_grad_mode

_MAX_RANDOM_ELEMENTS = 1 << 16
"""The number of random elements of a tensor; the rest of it repeats them."""

_OFFSET_MODULUS = 64
"""Storage offsets count modulo this number of elements, which preserves a tensor's alignment."""

_PROBABILITIES = ("bernoulli", "multinomial", "binary_cross_entropy", "poisson", "binomial")
_DIVISIONS = ("div", "remainder", "fmod", "floor_divide")
_POSITIVE = ("var", "std")
_NEEDS_FORWARD = ("_attention", "_rnn")
"""Operations whose backward follows pointers in results of the forward (a seed on the host, a
library's opaque workspace): with any other data it crashes the process."""


class OperandFactory:
    """Creates the arguments of operations as real tensors.

    Tensors that the trace has on devices of the type `trace_device_type` are created on `device`,
    others on their own device (a CPU scalar that is an operand next to CUDA tensors).
    """

    def __init__(
        self,
        metas: Mapping[str, TensorMeta],
        trace_device_type: str,
        device: torch.device,
        nodes: Iterable[Node] = (),
    ) -> None:
        self._metas = metas
        self._trace_device_type = trace_device_type
        self._device = device
        self._generators: dict[torch.device, torch.Generator] = {}
        self._producers: dict[str, tuple[int, Node, Result]] = {
            result.name: (index, node, result)
            for index, node in enumerate(nodes)
            for result in node.results
        }

    def create_arguments(
        self, node: Node, operator: object
    ) -> tuple[list[object], dict[str, object]]:
        """Return positional and keyword arguments of an operation; a tensor that occurs twice is
        created once.

        Raises `RematError` for an operation that must not run on synthetic tensors, if the trace
        does not contain its forward.
        """
        tensors: dict[str, object] = {}
        forwards = self.required_forwards(node)
        if _needs_forward(node) and not any(_is_forward_of(node, f) for f in forwards):
            raise RematError("only its forward can create its inputs")
        for forward in forwards:
            tensors.update(self._run_operation(forward, tensors))
        return self._operation_arguments(node, operator, tensors)

    def required_forwards(self, node: Node) -> list[Node]:
        """Return the forward operations of which `node` reads another result than the first, in the
        order in which they run. Operations of remat itself are left out."""
        forwards: dict[int, Node] = {}
        for name in node.operand_names:
            index, producer, result = self._allocating_operation(name)
            if producer is None or result is None or producer.backward or result.position <= 0:
                continue
            if not producer.target.startswith("remat."):
                forwards[index] = producer
        return [forwards[index] for index in sorted(forwards)]

    def _allocating_operation(self, name: str) -> tuple[int, Node | None, Result | None]:
        """Return the operation that allocates the storage of a tensor, its index and its result;
        (-1, None, None) for a placeholder."""
        for base in self._view_bases(name):
            if base in self._producers and not self._producers[base][1].view:
                return self._producers[base]
        return -1, None, None

    def _view_bases(self, name: str | None) -> Iterator[str]:
        """Yield a tensor, the tensor that it is a view of, and so on."""
        while name is not None:
            yield name
            _, producer, _ = self._producers.get(name, (-1, None, None))
            if producer is None or not producer.view:
                return
            name = next(referenced_names(producer.args), None)

    def _run_operation(self, node: Node, tensors: dict[str, object]) -> dict[str, object]:
        """Run an operation and return its results by name. Its operands are taken from `tensors`,
        or created and added there, since a reader of its results usually reads them as well."""
        operator = resolve_operator(node.target, MEASURABLE_NAMESPACES)
        args, kwargs = self._operation_arguments(node, operator, tensors)
        if node.target in NEEDS_GRAD_MODE:
            returned = run_with_grad_mode(operator, args, kwargs)
        else:
            with torch.no_grad():
                returned = operator(*args, **kwargs)
        return {
            result.name: returned[result.position] if result.position >= 0 else returned  # type: ignore[index]
            for result in node.results
        }

    def _operation_arguments(
        self, node: Node, operator: object, tensors: dict[str, object]
    ) -> tuple[list[object], dict[str, object]]:
        """Return the arguments of an operation. Tensors are taken from `tensors`, or created and
        added there."""
        names = _operator_argument_names(operator)
        args = [
            self._operation_argument(argument, node, names[i] if i < len(names) else "", 0, tensors)
            for i, argument in enumerate(node.args)
        ]
        kwargs = {
            key: self._operation_argument(value, node, key, 0, tensors)
            for key, value in node.kwargs.items()
        }
        return args, kwargs

    def _operation_argument(
        self, argument: Argument, node: Node, name: str, position: int, tensors: dict[str, object]
    ) -> object:
        """Return the argument `name` of an operation as its kernel takes it. A tensor is taken from
        `tensors`, or created and added there; `position` counts within a list of tensors.

        A method, because a nested function that calls itself is a reference cycle, and would keep
        all operands allocated until the garbage collector runs.
        """
        match argument:
            case Ref(key):
                if key not in tensors and self._is_view_of_any(key, tensors):
                    tensors.update(self._run_operation(self._producers[key][1], tensors))
                elif key not in tensors:
                    tensors[key] = self._create_tensor(key, node, name, position)
                return tensors[key]
            case Literal("device", text):
                return self._device_for(text)
            case Literal(kind, text):
                return literal_to_torch(kind, text)
            case tuple():
                return [
                    self._operation_argument(item, node, name, i, tensors)
                    for i, item in enumerate(argument)
                ]
            case _:
                return argument

    def _is_view_of_any(self, name: str, tensors: Mapping[str, object]) -> bool:
        """True if the tensor `name` is a view of one of `tensors`."""
        return any(base in tensors for base in self._view_bases(name))

    def _device_for(self, trace_device: str) -> torch.device:
        """Return the device on which a tensor of the trace is created."""
        device = torch.device(trace_device)
        return self._device if device.type == self._trace_device_type else device

    def _create_tensor(self, key: str, node: Node, name: str, position: int) -> torch.Tensor:
        """Create the tensor `key` of the trace, as the argument `name` of `node`; `position` counts
        within a list of tensors."""
        meta = self._metas[key]
        device = self._device_for(meta.device)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        generator = self._generators[device]
        operation = node.target.split(".")[1]
        dtype = literal_to_torch("dtype", meta.dtype)
        assert isinstance(dtype, torch.dtype)
        offset = meta.offset % _OFFSET_MODULUS
        flat = torch.empty(
            offset + span_elements(meta.shape, meta.stride), dtype=dtype, device=device
        )
        if dtype == torch.bool:
            _fill_booleans(flat, generator, operation)
        elif dtype.is_floating_point or dtype.is_complex:
            _fill_floats(flat, generator, operation, name)
        else:
            index_count = index_upper_bound(node, name, position, self._metas)
            if index_count is not None:
                _fill_with_repetitions(flat, _random_integers(flat, generator, index_count))
            else:
                flat.fill_(1 if operation.startswith(_DIVISIONS) else 0)
        return flat.as_strided(meta.shape, meta.stride, offset)


def _needs_forward(node: Node) -> bool:
    """True if an operation is a backward that crashes on synthetic tensors."""
    operation = node.target.split(".")[1]
    return operation.endswith("_backward") and any(word in operation for word in _NEEDS_FORWARD)


def _is_forward_of(node: Node, forward: Node) -> bool:
    """True if `node` is the backward of the operation `forward`, by their names."""
    base_name = node.target.split(".")[1].removesuffix("_backward")
    return forward.target.split(".")[1].removesuffix("_forward") == base_name


def operand_and_result_bytes(node: Node, metas: Mapping[str, TensorMeta]) -> int:
    """Return the bytes of an operation's operands and results, which running it alone needs."""
    tensors = [metas[name] for name in set(node.operand_names)] + [
        result.tensor for result in node.results
    ]
    return sum(map(span_bytes, tensors))


def index_upper_bound(
    node: Node, name: str, position: int, metas: Mapping[str, TensorMeta]
) -> int | None:
    """Return the number of valid indices for the integer argument `name`, or None if its elements
    are no indices. `position` counts within a list of index tensors."""
    operation = node.target.split(".")[1]

    def shape(index: int) -> tuple[int, ...]:
        argument = node.args[index]
        return metas[argument.name].shape if isinstance(argument, Ref) else ()

    if operation == "embedding" and name == "indices":
        return next(iter(shape(0)), 1)
    if operation == "embedding_dense_backward" and name == "indices":
        rows = node.args[2]
        return rows if isinstance(rows, int) else None
    if operation.startswith("nll_loss") and name == "target":
        log_probabilities = shape(1 if "backward" in operation else 0)
        class_dim = min(1, len(log_probabilities) - 1)
        return log_probabilities[class_dim] if log_probabilities else 1
    if name == "index" and len(node.args) > 1 and isinstance(node.args[1], int):
        sizes = shape(0)  # gather, scatter*, index_select, index_add, ...: (self, dim, index)
        return sizes[node.args[1]] if sizes else 1
    if name == "indices" and "index" in operation:
        return _indexed_size(node, position, metas)
    return None


def _indexed_size(node: Node, position: int, metas: Mapping[str, TensorMeta]) -> int | None:
    """Return the size of the dimension that the index tensor at `position` of `aten.index` and
    similar operations indexes. The i-th one indexes dimension i, where a boolean mask before it
    counts for as many dimensions as it has. None if there is no such dimension."""
    indexed, indices = node.args[0], node.args[1]
    if not isinstance(indexed, Ref) or not isinstance(indices, tuple):
        return None
    dimension = 0
    for item in indices[:position]:
        is_mask = isinstance(item, Ref) and metas[item.name].dtype == "bool"
        dimension += len(metas[item.name].shape) if is_mask and isinstance(item, Ref) else 1
    sizes = metas[indexed.name].shape
    return sizes[dimension] if dimension < len(sizes) else None


def _operator_argument_names(operator: object) -> list[str]:
    """Return the names of an operator's arguments; none for one of remat's operations."""
    if not isinstance(operator, OpOverload):
        return []
    return [argument.name for argument in operator._schema.arguments]


def _random_element_count(flat: torch.Tensor) -> int:
    """Return the number of random elements to generate for a tensor."""
    return max(1, min(_MAX_RANDOM_ELEMENTS, flat.numel()))


def _random_integers(flat: torch.Tensor, generator: torch.Generator, limit: int) -> torch.Tensor:
    """Return random integers from 0 to below `limit` for a tensor, for `_fill_with_repetitions`."""
    count = _random_element_count(flat)
    return torch.randint(max(limit, 1), (count,), device=flat.device, generator=generator)


def _fill_with_repetitions(flat: torch.Tensor, block: torch.Tensor) -> None:
    """Fill a tensor with repetitions of a block: generating gigabytes of random elements would take
    longer than the measurement."""
    filled = min(block.numel(), flat.numel())
    flat[:filled].copy_(block[:filled])
    while 0 < filled < flat.numel():
        count = min(filled, flat.numel() - filled)
        flat[filled : filled + count].copy_(flat[:count])
        filled += count


def _fill_booleans(flat: torch.Tensor, generator: torch.Generator, operation: str) -> None:
    """Fill a mask: with True for an index, otherwise randomly."""
    if "index" in operation:  # the number of true elements decides the result's shape
        flat.fill_(True)
    else:
        _fill_with_repetitions(
            flat,
            torch.rand(_random_element_count(flat), device=flat.device, generator=generator) < 0.5,
        )


def _fill_floats(flat: torch.Tensor, generator: torch.Generator, operation: str, name: str) -> None:
    """Fill a tensor with random numbers: uniform for probabilities, else normal, and positive if
    the argument `name` is a variance or deviation."""
    if operation.startswith(_PROBABILITIES):
        block = torch.rand(_random_element_count(flat), device=flat.device, generator=generator)
    else:
        block = torch.randn(_random_element_count(flat), device=flat.device, generator=generator)
        if any(word in name for word in _POSITIVE):
            block = block.abs_().add_(0.1)
    _fill_with_repetitions(flat, block)
