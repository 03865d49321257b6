"""Follow constants through a capture, so that branches on them need no `torch.compile` detour.

Hugging Face models ask "are these position ids packed sequences?" of a tensor that they themselves
made with `arange`. Under fake tensors that question has no answer and the capture fails, or the
model takes its tracing path, with other kernels than in eager mode. `ConstantFolding` keeps a real
copy of every small tensor that depends on no input, parameter or random number, and answers
`bool(t)`, `int(t)` and `t.item()` from it: the capture takes the branch that eager takes.

Where sizes are symbols, such a tensor may have been made of them. The answer is then that of the
call that is captured, and it is kept with how the tensor was made: for calls in other sizes, the
question is asked again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from remat.errors import TraceError
from remat.frontend.capture.symbolic_sizes import Sizes, hint

MAX_ELEMENTS = 1 << 22
"""Larger tensors are not followed: a mask of 2048 x 2048 still is."""

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
_QUESTIONS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("__bool__", "item", "__int__", "__float__", "__index__")
)
_MUTATING = (
    frozenset({"__setitem__"})
    | {
        f"__i{name}__"
        for name in ("or", "and", "xor", "lshift", "rshift", "add", "sub", "mul", "pow", "mod")
    }
    | {"__ifloordiv__", "__itruediv__", "__idiv__"}
)
_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "empty", "uniform")


class ConstantFolding(TorchFunctionMode):
    """While active, tensors made of constants have known values."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[Question] = []
        """Those that were asked of what was made of symbols."""
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        known = all(t in self._known for t in tensors)
        if func in _QUESTIONS and tensors and known:
            with _disable_current_modes():
                answer = func(self._known[tensors[0]])
            if (made := self._made.get(tensors[0])) is not None:
                self.questions.append(Question(func, made, answer))
            return answer
        result = func(*args, **kwargs)
        if _mutates(func) or "out" in kwargs or kwargs.get("inplace"):
            # What was written may be a view of anything known: forget it all, rather than guess.
            self._known.clear()
            self._made.clear()
        elif known and (tensors or func in _FACTORIES) and not _is_random(func):
            self._follow(func, args, kwargs, result)
        return result

    def _follow(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        made = [t for t in _tensors(result) if t not in self._known]
        if not made or any(hint(t.numel()) > MAX_ELEMENTS for t in made):
            return
        try:
            with _disable_current_modes(), torch.no_grad():
                real = func(*self._real(args), **self._real(kwargs))
        except Exception:
            return  # then the value is simply not known
        given = _mapped(self._recipe, (args, kwargs))
        is_sized = any(map(_is_of_sizes, tree_leaves(given)))
        for number, (tensor, value) in enumerate(
            zip(_tensors(result), _tensors(real), strict=False)
        ):
            if type(value) is torch.Tensor and [*value.shape] == [*map(hint, tensor.shape)]:
                self._known[tensor] = value
                if is_sized:
                    self._made[tensor] = Made(func, given, number)

    def _recipe(self, item: Any) -> Any:
        """What is made of symbols again, and what is constant as it is."""
        if isinstance(item, torch.Tensor):
            return self._made.get(item, self._known[item])
        return item

    def _real(self, tree: Any) -> Any:
        return _mapped(self._real_one, tree)

    def _real_one(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return self._known[item]
        return hint(item) if isinstance(item, torch.SymInt) else item


@dataclass(frozen=True, eq=False)
class Made:
    """How a tensor was made: by a function of sizes, constants and what was made before, of whose
    results it is one."""

    func: Callable[..., Any]
    given: tuple[tuple[Any, ...], dict[str, Any]]
    number: int

    def again(self, sizes: Sizes, known: dict[Made, torch.Tensor]) -> torch.Tensor:
        """The tensor in other sizes."""
        if self not in known:
            args, kwargs = _mapped(lambda x: _in(x, sizes, known), self.given)
            found = _tensors(self.func(*args, **kwargs))[self.number]
            if found.numel() > MAX_ELEMENTS:
                raise TraceError("a capture in this size would not follow what it asks of")
            known[self] = found
        return known[self]


@dataclass(frozen=True)
class Question:
    """What was asked of a tensor, and what its answer was."""

    func: Callable[..., Any]
    of: Made
    answer: object

    def has_same_answer(self, sizes: Sizes) -> bool:
        """In other sizes. Needs to run outside of a capture."""
        try:
            with torch.no_grad():
                return bool(self.func(self.of.again(sizes, {})) == self.answer)
        except TraceError:
            return False


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """As `tree_map`, which takes a slice for a leaf."""

    def of(item: Any) -> Any:
        if isinstance(item, slice):
            return slice(function(item.start), function(item.stop), function(item.step))
        return function(item)

    return tree_map(of, tree)


def _is_of_sizes(item: Any) -> bool:
    if isinstance(item, slice):
        return any(map(_is_of_sizes, (item.start, item.stop, item.step)))
    return isinstance(item, (Made, torch.SymInt))


def _in(item: Any, sizes: Sizes, known: dict[Made, torch.Tensor]) -> Any:
    if isinstance(item, Made):
        return item.again(sizes, known)
    return sizes(item) if isinstance(item, torch.SymInt) else item


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", ""))


def _mutates(func: Callable[..., Any]) -> bool:
    name = _name(func)
    return name in _MUTATING or (name.endswith("_") and not name.endswith("__"))


def _is_random(func: Callable[..., Any]) -> bool:
    return any(word in _name(func) for word in _RANDOM)
