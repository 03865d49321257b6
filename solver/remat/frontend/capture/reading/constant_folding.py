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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
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
_MEMORY_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("numpy", "__array__", "__dlpack__", "tolist", "data_ptr")
)
"""They read memory, or pass it on, without an operator that a capture could record."""
_IN_PLACE_METHODS = (
    frozenset({"__setitem__"})
    | {
        f"__i{name}__"
        for name in ("or", "and", "xor", "lshift", "rshift", "add", "sub", "mul", "pow", "mod")
    }
    | {"__ifloordiv__", "__itruediv__", "__idiv__"}
)
_NONDETERMINISTIC_NAMES = (
    "rand",
    "dropout",
    "bernoulli",
    "normal",
    "multinomial",
    "empty",
    "uniform",
)


class DataDependentReadError(Exception):
    """The model's code reads the memory of a tensor that a capture has no values of."""


class ConstantFolding(TorchFunctionMode):
    """A mode that evaluates functions of constant tensors, and answers conversions to scalars.

    `queries` are the conversions of tensors that depend on symbolic sizes, with their answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[ConstantQuery] = []
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._recipes: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors_in_tree((args, kwargs))
        is_constant = all(t in self._values for t in tensors)
        if func in _SCALAR_CONVERSIONS and tensors and is_constant:
            with capture_paused():
                answer = func(self._values[tensors[0]])
            if (recipe := self._recipes.get(tensors[0])) is not None:
                self.queries.append(ConstantQuery(func, recipe, answer))
            return answer
        if func in _MEMORY_READS and any(map(torch._is_functional_tensor, tensors)):
            return self._read_memory(func, args, kwargs, is_constant)
        result = func(*args, **kwargs)
        if _is_in_place_function(func) or "out" in kwargs or kwargs.get("inplace"):
            # The written tensor may be a view of any constant: drop all values.
            self._values.clear()
            self._recipes.clear()
        elif (
            is_constant
            and (tensors or func in _FACTORIES)
            and not _is_nondeterministic_function(func)
        ):
            self._evaluate(func, args, kwargs, result)
        return result

    def _read_memory(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], is_constant: bool
    ) -> Any:
        """Return the result of a function that reads the memory of a constant tensor. Raises
        `DataDependentReadError` for other tensors, and for an address."""
        if not is_constant or func is torch.Tensor.data_ptr:
            raise DataDependentReadError(
                f"Tensor.{_torch_function_name(func)} of a tensor without data"
            )
        with capture_paused():
            real_args, real_kwargs = _map_argument_leaves(self._real_argument, (args, kwargs))
            return func(*real_args, **real_kwargs)

    def _evaluate(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        """Compute and store the real values of the fake tensors in `result`, and with symbolic
        sizes their recipes. Do nothing if they are too large, or an error occurs."""
        new_tensors = [t for t in _tensors_in_tree(result) if t not in self._values]
        if not new_tensors or any(size_hint(t.numel()) > MAX_ELEMENTS for t in new_tensors):
            return
        try:
            with capture_paused(), torch.no_grad():
                real_args, real_kwargs = _map_argument_leaves(self._real_argument, (args, kwargs))
                real_result = func(*real_args, **real_kwargs)
        except Exception:
            return  # then the result counts as not constant
        arguments = _map_argument_leaves(self._recipe_argument, (args, kwargs))
        is_symbolic = any(map(_depends_on_symbols, tree_leaves(arguments)))
        for index, (tensor, value) in enumerate(
            zip(_tensors_in_tree(result), _tensors_in_tree(real_result), strict=False)
        ):
            if type(value) is torch.Tensor and [*value.shape] == [*map(size_hint, tensor.shape)]:
                self._values[tensor] = value
                if is_symbolic:
                    self._recipes[tensor] = TensorRecipe(func, arguments, index)

    def _recipe_argument(self, item: Any) -> Any:
        """Return the recipe of a tensor that depends on symbols, the real value of another tensor,
        and any other argument unchanged."""
        if isinstance(item, torch.Tensor):
            return self._recipes.get(item, self._values[item])
        return item

    def _real_argument(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return self._values[item]
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


def _is_in_place_function(func: Callable[..., Any]) -> bool:
    """True for a function that writes into its first argument, by its name."""
    name = _torch_function_name(func)
    return name in _IN_PLACE_METHODS or (name.endswith("_") and not name.endswith("__"))


def _is_nondeterministic_function(func: Callable[..., Any]) -> bool:
    """True for a function whose name has one of `_NONDETERMINISTIC_NAMES`."""
    return any(name in _torch_function_name(func) for name in _NONDETERMINISTIC_NAMES)
