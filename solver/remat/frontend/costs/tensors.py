"""Real tensors for operations that are only known as data, with content they accept.

What a backward reads of its forward besides the first result (a log-sum-exp, a random seed, the
statistics of a norm, the indices of a pool) comes from running that forward: only its kernel knows
what is in there, and on which device. The rest is made up. Floats are normal, positive where an
operation wants probabilities or variances. Integers that an operation uses as indices are random
and in range, since that decides its speed; all others are zero, the one integer that is an index of
every table (a bad index ends a CUDA context for good).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch._ops import OpOverload

from remat.documents.arguments import Argument, Literal, Ref, refs
from remat.documents.records import Node, Result, TensorMeta
from remat.errors import RematError
from remat.frontend.common.grad_mode import NEEDS_GRAD_MODE, with_grad_mode
from remat.frontend.common.operators import decode_literal, resolve

_BLOCK = 1 << 16
_ALIGNMENT = 64  # elements of an offset that are kept, so that kernels see the same alignment
_PROBABILITIES = ("bernoulli", "multinomial", "binary_cross_entropy", "poisson", "binomial")
_DIVISIONS = ("div", "remainder", "fmod", "floor_divide")
_POSITIVE = ("var", "std")
_NEEDS_FORWARD = ("_attention", "_rnn")
"""Their backwards follow pointers in what their forwards return (a seed on the host, a library's
opaque workspace): with anything else they end the process."""


class Operands:
    """The arguments of one node as real tensors on `device`.

    `home` is the device type that the trace was made for: its tensors go to `device`, others (a
    scalar on the CPU beside CUDA tensors) stay where they were.
    """

    def __init__(
        self,
        metas: Mapping[str, TensorMeta],
        home: str,
        device: torch.device,
        nodes: Iterable[Node] = (),
    ) -> None:
        self._metas = metas
        self._home = home
        self._device = device
        self._generators: dict[torch.device, torch.Generator] = {}
        self._makers: dict[str, tuple[int, Node, Result]] = {
            result.name: (number, node, result)
            for number, node in enumerate(nodes)
            for result in node.results
        }

    def make(self, node: Node, operator: object) -> tuple[list[object], dict[str, object]]:
        """Positional and keyword arguments; a tensor that is named twice is made once.

        Raises `RematError` for an operation that must not run on made-up tensors, where the trace
        has no forward of it.
        """
        made: dict[str, object] = {}
        forwards = self.forwards(node)
        if _needs_forward(node) and not any(_belongs(node, forward) for forward in forwards):
            raise RematError("reads what only its forward can make")
        for forward in forwards:
            made.update(self._run(forward, made))
        return self._arguments(node, operator, made)

    def forwards(self, node: Node) -> list[Node]:
        """The operations of the forward that `node` reads more of than their first result, in the
        order in which they run."""
        found: dict[int, Node] = {}
        for name in (*refs(node.args), *refs(node.kwargs)):
            number, maker, result = self._owner(name)
            if maker is None or result is None or maker.backward or result.position <= 0:
                continue
            if not maker.target.startswith("remat."):
                found[number] = maker
        return [found[number] for number in sorted(found)]

    def _owner(self, name: str) -> tuple[int, Node | None, Result | None]:
        """The operation that allocates a tensor, through views; none for a placeholder."""
        for base in self._bases(name):
            if base in self._makers and not self._makers[base][1].view:
                return self._makers[base]
        return -1, None, None

    def _bases(self, name: str | None) -> Iterator[str]:
        """A tensor, and what it is a view of, and so on."""
        while name is not None:
            yield name
            _, maker, _ = self._makers.get(name, (-1, None, None))
            name = next(refs(maker.args), None) if maker is not None and maker.view else None

    def _run(self, node: Node, made: dict[str, object]) -> dict[str, object]:
        """What an operation returns, by name. Its operands stay in `made`: whoever needs its
        results usually reads them as well."""
        operator = resolve(node.target)
        args, kwargs = self._arguments(node, operator, made)
        if node.target in NEEDS_GRAD_MODE:
            returned = with_grad_mode(operator, args, kwargs)
        else:
            with torch.no_grad():
                returned = operator(*args, **kwargs)
        return {
            result.name: returned[result.position] if result.position >= 0 else returned  # type: ignore[index]
            for result in node.results
        }

    def _arguments(
        self, node: Node, operator: object, made: dict[str, object]
    ) -> tuple[list[object], dict[str, object]]:
        names = _argument_names(operator)

        def build(argument: Argument, name: str, position: int) -> object:
            match argument:
                case Ref(key):
                    if key not in made and self._looks_into(key, made):
                        made.update(self._run(self._makers[key][1], made))
                    elif key not in made:
                        made[key] = self._tensor(key, node, name, position)
                    return made[key]
                case Literal("device", text):
                    return self._place(text)
                case Literal(kind, text):
                    return decode_literal(kind, text)
                case tuple():
                    return [build(item, name, i) for i, item in enumerate(argument)]
                case _:
                    return argument

        args = [
            build(argument, names[i] if i < len(names) else "", 0)
            for i, argument in enumerate(node.args)
        ]
        return args, {key: build(value, key, 0) for key, value in node.kwargs.items()}

    def _looks_into(self, name: str, made: Mapping[str, object]) -> bool:
        """Whether `name` is a view of a tensor that was made."""
        return any(base in made for base in self._bases(name))

    def _place(self, device: str) -> torch.device:
        found = torch.device(device)
        return self._device if found.type == self._home else found

    def _tensor(self, key: str, node: Node, name: str, position: int) -> torch.Tensor:
        meta = self._metas[key]
        device = self._place(meta.device)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        generator = self._generators[device]
        operation = node.target.split(".")[1]
        dtype = decode_literal("dtype", meta.dtype)
        assert isinstance(dtype, torch.dtype)
        offset = meta.offset % _ALIGNMENT
        flat = torch.empty(offset + extent(meta.shape, meta.stride), dtype=dtype, device=device)
        if dtype == torch.bool:
            _fill_booleans(flat, generator, operation)
        elif dtype.is_floating_point or dtype.is_complex:
            _fill_floats(flat, generator, operation, name)
        else:
            limit = index_limit(node, name, position, self._metas)
            if limit is not None:
                _fill(flat, _integers(flat, generator, limit))
            else:
                flat.fill_(1 if operation.startswith(_DIVISIONS) else 0)
        return flat.as_strided(meta.shape, meta.stride, offset)


def _needs_forward(node: Node) -> bool:
    operation = node.target.split(".")[1]
    return operation.endswith("_backward") and any(word in operation for word in _NEEDS_FORWARD)


def _belongs(node: Node, forward: Node) -> bool:
    stem = node.target.split(".")[1].removesuffix("_backward")
    return forward.target.split(".")[1].removesuffix("_forward") == stem


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last that a tensor touches."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def operand_bytes(node: Node, metas: Mapping[str, TensorMeta]) -> int:
    """Bytes to set aside to run a node by itself: its operands and its results."""
    names = (*refs(node.args), *refs(node.kwargs))
    tensors = [metas[name] for name in set(names)] + [result.tensor for result in node.results]
    return sum(
        extent(meta.shape, meta.stride) * getattr(torch, meta.dtype).itemsize for meta in tensors
    )


def index_limit(
    node: Node, name: str, position: int, metas: Mapping[str, TensorMeta]
) -> int | None:
    """The number of valid indices that the integer argument `name` chooses from, or None where it
    holds no indices. `position` counts within a list of index tensors."""
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
        scores = shape(1 if "backward" in operation else 0)
        return scores[min(1, len(scores) - 1)] if scores else 1
    if name == "index" and len(node.args) > 1 and isinstance(node.args[1], int):
        sizes = shape(0)  # gather, scatter*, index_select, index_add, ...: (self, dim, index)
        return sizes[node.args[1]] if sizes else 1
    if name == "indices" and "index" in operation:
        return _indexed_size(node, position, metas)
    return None


def _indexed_size(node: Node, position: int, metas: Mapping[str, TensorMeta]) -> int | None:
    """`aten.index` and kin: the i-th index tensor chooses in dimension i, where a boolean mask
    before it stands for as many dimensions as it has."""
    source, indices = node.args[0], node.args[1]
    if not isinstance(source, Ref) or not isinstance(indices, tuple):
        return None
    dimension = 0
    for item in indices[:position]:
        mask = isinstance(item, Ref) and metas[item.name].dtype == "bool"
        dimension += len(metas[item.name].shape) if mask and isinstance(item, Ref) else 1
    sizes = metas[source.name].shape
    return sizes[dimension] if dimension < len(sizes) else None


def _argument_names(operator: object) -> list[str]:
    if not isinstance(operator, OpOverload):
        return []
    return [argument.name for argument in operator._schema.arguments]


def _block(flat: torch.Tensor) -> int:
    return max(1, min(_BLOCK, flat.numel()))


def _integers(flat: torch.Tensor, generator: torch.Generator, limit: int) -> torch.Tensor:
    return torch.randint(max(limit, 1), (_block(flat),), device=flat.device, generator=generator)


def _fill(flat: torch.Tensor, block: torch.Tensor) -> None:
    """Repeat a block: random numbers for gigabytes would take longer than the measurement."""
    done = min(block.numel(), flat.numel())
    flat[:done].copy_(block[:done])
    while 0 < done < flat.numel():
        step = min(done, flat.numel() - done)
        flat[done : done + step].copy_(flat[:step])
        done += step


def _fill_booleans(flat: torch.Tensor, generator: torch.Generator, operation: str) -> None:
    if "index" in operation:  # the number of true elements decides the result's shape
        flat.fill_(True)
    else:
        _fill(flat, torch.rand(_block(flat), device=flat.device, generator=generator) < 0.5)


def _fill_floats(flat: torch.Tensor, generator: torch.Generator, operation: str, name: str) -> None:
    if operation.startswith(_PROBABILITIES):
        block = torch.rand(_block(flat), device=flat.device, generator=generator)
    else:
        block = torch.randn(_block(flat), device=flat.device, generator=generator)
        if any(word in name for word in _POSITIVE):
            block = block.abs_().add_(0.1)
    _fill(flat, block)
