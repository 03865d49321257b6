"""Constant folding during a capture, so that the model may branch on constant tensors.

Hugging Face models test a tensor that they made with `arange` ("are these position ids packed
sequences?"). On fake tensors such a test has no answer: the capture fails, or the model takes its
tracing path, with other kernels than in eager mode. `ConstantFolding` keeps a real copy of every
small tensor that depends on no input, parameter or random number, and answers `bool(t)`, `int(t)`
and `t.item()` from it. So the capture takes the same branch as eager mode.

In a symbolic capture such a tensor may depend on symbolic sizes. The answer then holds for the
captured sizes; it is recorded with a recipe for the tensor, and checked again for other sizes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from remat.errors import TraceError
from remat.frontend.capture.symbol_values import SymbolValues, size_hint
from remat.frontend.common.torch_modes import capture_paused

MAX_ELEMENTS = 1 << 22
"""Larger tensors are not folded. A mask of 2048 x 2048 still is."""

_FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "arange",
        "ones",
        "zeros",
        "full",
        "tensor",
        "eye",
        "linspace",
        "scalar_tensor",
    )
)
_SCALAR_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("__bool__", "item", "__int__", "__float__", "__index__")
)
_SAMPLES = ("normal_", "bernoulli_", "random_")
_UNIFORM = frozenset({torch.rand, torch.rand_like})
_COMPARISONS = frozenset(
    function
    for name in ("gt", "ge", "lt", "le")
    for function in (getattr(torch, name), getattr(torch.Tensor, name))
)
_MEMORY_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("numpy", "__array__", "__dlpack__", "tolist", "data_ptr")
)
"""They read memory, or pass it on, without an operator that a capture could record."""
_write_counts: Counter[int] = Counter()
"""The writes of recorded operators into each storage, by the storage's address."""


def count_write(tensor: torch.Tensor) -> None:
    """Count a write into the storage of a tensor: constants in this storage are none from now."""
    if tensor.layout is torch.strided:
        _write_counts[tensor.untyped_storage()._cdata] += 1


class _Constant(NamedTuple):
    """The real value of a constant tensor, with the storage of the fake tensor and the number of
    writes into it, for which the value is valid."""

    value: torch.Tensor
    storage: torch.UntypedStorage
    write_count: int

    @classmethod
    def of(cls, tensor: torch.Tensor, value: torch.Tensor) -> _Constant:
        storage = tensor.untyped_storage()
        return cls(value, storage, _write_counts[storage._cdata])

    def is_valid_for(self, tensor: torch.Tensor) -> bool:
        """True if the tensor still has this storage, and no operator has written into it since."""
        address = self.storage._cdata
        is_written = self.write_count != _write_counts[address]
        return not is_written and tensor.untyped_storage()._cdata == address


_MAX_RANDOM_ELEMENTS = 16


def _is_never_zero(random: object) -> bool:
    """True for a result of `torch.rand` that has a 0 next to never: few numbers, and not in half
    precision."""
    return (
        isinstance(random, torch.Tensor)
        and random.dtype in (torch.float32, torch.float64)
        and not _depends_on_symbols(random.numel())
        and random.numel() <= _MAX_RANDOM_ELEMENTS
    )


class _SharedMemory:
    """The memory of a constant that the model's code has passed on without a copy."""

    def __init__(self, constant: _Constant, user: np.ndarray[Any, Any] | torch.Tensor) -> None:
        """`user` is an array in this memory, or a tensor that lives as long as its users."""
        self._value = constant.value
        self._content = _bytes_of(constant.value).clone()
        self._address, self._write_count = constant.storage._cdata, constant.write_count
        self._fake = StorageWeakRef(constant.storage)
        self._user = weakref.ref(user)

    def is_written(self) -> bool:
        """True if a tensor in this memory exists that lacks a write through an array, or an array
        that lacks a write into the tensor."""
        if self._fake.expired():
            return False
        if self._user() is not None and self._write_count != _write_counts[self._address]:
            return True
        with capture_paused():
            return not torch.equal(_bytes_of(self._value), self._content)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as bytes, so that NaN equals itself."""
    return tensor.flatten().view(torch.uint8)


class _RandomOperations(TorchDispatchMode):
    """A mode that notes if it was in effect for an operator that samples random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.were_called = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.were_called |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class DataDependentReadError(Exception):
    """The model's code reads the memory of a tensor that a capture has no values of."""


class ConstantFolding(TorchFunctionMode):
    """A mode that evaluates functions of constant tensors, and answers conversions to scalars.

    `queries` are the conversions of tensors that depend on symbolic sizes, with their answers. A
    comparison of a few numbers of `torch.rand` in float32 or float64 with 0 or less, or with 1 or
    more, is constant, too: such is the code of a dropout of whole layers that is off. It ignores
    that `torch.rand` returns 0 once in 2^24 calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[ConstantQuery] = []
        self._constants: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._recipes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._uniform: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Random numbers between 0 and 1, as constants of 0.5: valid until they are written."""
        self._shared: list[_SharedMemory] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._check_shared_memory()
        tensors = _tensors_in_tree((args, kwargs))
        is_constant = self._are_constant(tensors)
        if func in _SCALAR_CONVERSIONS and tensors and is_constant:
            with capture_paused():
                answer = func(self._constants[tensors[0]].value)
            if (recipe := self._recipes.get(tensors[0])) is not None:
                self.queries.append(ConstantQuery(func, recipe, answer))
            return answer
        if func in _MEMORY_READS and any(map(torch._is_functional_tensor, tensors)):
            return self._read_memory(func, args, kwargs, tensors)
        result = func(*args, **kwargs)
        if _torch_function_name(func) in _SAMPLES and tensors:
            # Some have kernels of the capture, below which no write is counted.
            count_write(tensors[0])
        if (
            is_constant
            and (tensors or func in _FACTORIES)
            and "empty" not in _torch_function_name(func)
            and self._are_constant(tensors)  # it has not written into them
        ):
            self._evaluate(func, args, kwargs, result)
        elif func in _UNIFORM and _is_never_zero(result):
            with capture_paused():
                half = torch.full([*result.shape], 0.5)
            self._uniform[result] = _Constant.of(result, half)
        elif func in _COMPARISONS and len(args) == len(tensors) + 1 == 2:
            self._evaluate_comparison(func, args[0], args[1], result)
        return result

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None:
            self._check_shared_memory()

    def _are_constant(self, tensors: Iterable[torch.Tensor]) -> bool:
        return all(t in self._constants and self._constants[t].is_valid_for(t) for t in tensors)

    def _check_shared_memory(self) -> None:
        """Raise `TraceError` if a tensor and an array that share memory exist, and one of them was
        written into: the recorded operators would not see it in the other."""
        for shared in self._shared:
            if shared.is_written():
                raise TraceError(
                    "the model's code writes into memory that a constant tensor shares with NumPy "
                    "or another library, which a plan would not do in each step. Remedy: share a "
                    "copy, as in tensor.clone().numpy(), or use tensors only"
                )

    def _read_memory(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Return the result of a function that reads the memory of a constant tensor. Raises
        `DataDependentReadError` for other tensors, and for an address."""
        if not self._are_constant(tensors) or func is torch.Tensor.data_ptr:
            raise DataDependentReadError(
                f"Tensor.{_torch_function_name(func)} of a tensor without data"
            )
        with capture_paused():
            real_args, real_kwargs = _map_argument_leaves(self._real_argument, (args, kwargs))
            alias = real_args[0].detach()
            result = func(alias, *real_args[1:], **real_kwargs)
            if func is not torch.Tensor.tolist:
                user = result if isinstance(result, np.ndarray) else alias
                self._shared.append(_SharedMemory(self._constants[tensors[0]], user))
            return result

    def _evaluate(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        """Compute and store the real values of the fake tensors in `result`, and with symbolic
        sizes their recipes. Do nothing if they are too large or random, or an error occurs."""
        new_tensors = [t for t in _tensors_in_tree(result) if t not in self._constants]
        if not new_tensors or any(size_hint(t.numel()) > MAX_ELEMENTS for t in new_tensors):
            return
        try:
            with capture_paused(), torch.no_grad(), _RandomOperations() as random_operations:
                real_args, real_kwargs = _map_argument_leaves(self._real_argument, (args, kwargs))
                real_result = func(*real_args, **real_kwargs)
        except Exception:
            return  # then the result counts as not constant
        if random_operations.were_called:
            return
        arguments = _map_argument_leaves(self._recipe_argument, (args, kwargs))
        is_symbolic = any(map(_depends_on_symbols, tree_leaves(arguments)))
        for index, (tensor, value) in enumerate(
            zip(_tensors_in_tree(result), _tensors_in_tree(real_result), strict=False)
        ):
            is_dense = type(value) is torch.Tensor and value.layout is torch.strided
            if is_dense and [*value.shape] == [*map(size_hint, tensor.shape)]:
                self._constants[tensor] = _Constant.of(tensor, value)
                if is_symbolic:
                    self._recipes[tensor] = TensorRecipe(func, arguments, index)

    def _evaluate_comparison(
        self, func: Callable[..., Any], random: Any, number: Any, result: torch.Tensor
    ) -> None:
        """Store the values of a comparison of a random tensor, if all random numbers between 0 and
        1 have the same answer."""
        constant = self._uniform.get(random) if isinstance(random, torch.Tensor) else None
        is_certain = isinstance(number, (int, float)) and not 0 < number < 1
        if constant is not None and is_certain and constant.is_valid_for(random):
            with capture_paused():
                self._constants[result] = _Constant.of(result, func(constant.value, number))

    def _recipe_argument(self, item: Any) -> Any:
        """Return the recipe of a tensor that depends on symbols, the real value of another tensor,
        and any other argument unchanged."""
        if isinstance(item, torch.Tensor):
            return self._recipes.get(item, self._constants[item].value)
        return item

    def _real_argument(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return self._constants[item].value
        return size_hint(item) if isinstance(item, torch.SymInt) else item


@dataclass(frozen=True, eq=False)
class TensorRecipe:
    """The call that produces a constant tensor: tensor number `index` of what `func` returns.

    Its arguments are SymInts, constants and other recipes.
    """

    func: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    index: int

    def evaluate(
        self, values: SymbolValues, results: dict[TensorRecipe, torch.Tensor]
    ) -> torch.Tensor:
        """Compute the tensor for these symbol values; `results` caches the recipes within it."""
        if self not in results:
            args, kwargs = _map_argument_leaves(
                lambda item: _concrete_recipe_argument(item, values, results), self.arguments
            )
            tensor = _tensors_in_tree(self.func(*args, **kwargs))[self.index]
            if tensor.numel() > MAX_ELEMENTS:
                raise TraceError(
                    f"a constant has {tensor.numel()} elements at this size; a capture folds up to "
                    f"{MAX_ELEMENTS}"
                )
            results[self] = tensor
        return results[self]


@dataclass(frozen=True)
class ConstantQuery:
    """A conversion of a constant tensor to a scalar during a symbolic capture, and its answer."""

    func: Callable[..., Any]
    recipe: TensorRecipe
    answer: object

    def has_same_answer(self, values: SymbolValues) -> bool:
        """True if the conversion gives the same scalar for these symbol values. False if a tensor
        is too large at them. Must be called outside of a capture."""
        try:
            with torch.no_grad():
                return bool(self.func(self.recipe.evaluate(values, {})) == self.answer)
        except TraceError:
            return False


def _map_argument_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of arguments with a function applied to its leaves, and to the bounds of its
    slices, which `tree_map` treats as leaves."""

    def apply(item: Any) -> Any:
        if isinstance(item, slice):
            return slice(function(item.start), function(item.stop), function(item.step))
        return function(item)

    return tree_map(apply, tree)


def _depends_on_symbols(item: Any) -> bool:
    if isinstance(item, slice):
        return any(map(_depends_on_symbols, (item.start, item.stop, item.step)))
    return isinstance(item, (TensorRecipe, torch.SymInt))


def _concrete_recipe_argument(
    item: Any, values: SymbolValues, results: dict[TensorRecipe, torch.Tensor]
) -> Any:
    if isinstance(item, TensorRecipe):
        return item.evaluate(values, results)
    return values.size(item) if isinstance(item, torch.SymInt) else item


def _tensors_in_tree(tree: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    _collect_tensors(tree, tensors)
    return tensors


_PLAIN_TYPES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})


def _collect_tensors(tree: Any, tensors: list[torch.Tensor]) -> None:
    """Append the tensors of a tree to `tensors`. For the types that nearly all arguments have,
    torch's functions for all trees are not used, which take ten times as long."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
    elif type(tree) is tuple or type(tree) is list:
        for item in tree:
            _collect_tensors(item, tensors)
    elif type(tree) is dict:
        for item in tree.values():
            _collect_tensors(item, tensors)
    elif type(tree) not in _PLAIN_TYPES:
        tensors += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _torch_function_name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", ""))
