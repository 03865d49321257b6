"""Sizes that are symbols in a capture, and numbers in each call that it is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch

from remat.errors import TraceError

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Sizes:
    """What symbols stand for. Without any, sizes are the numbers that they are."""

    def __init__(self, values: Mapping[sympy.Symbol, int] | None = None) -> None:
        self._values = {symbol: sympy.Integer(value) for symbol, value in (values or {}).items()}
        self._known: dict[object, bool | int | float] = {}

    def __call__(self, size: int | torch.SymInt) -> int:
        """A size, stride or number of bytes."""
        return size if type(size) is int else int(self.number(size))

    def number(self, value: Any) -> Any:
        """A number that may be symbolic; anything else as it is."""
        return self.of(value.node.expr) if isinstance(value, _SYMBOLIC) else value

    def of(self, expression: Any) -> bool | int | float:
        """What torch has written down of symbols. Raises `TraceError` where it depends on others:
        on numbers in tensors."""
        if expression not in self._known:
            found = expression.xreplace(self._values)
            if found in (sympy.true, sympy.false):
                self._known[expression] = bool(found)
            elif not found.is_number:
                raise TraceError(f"the size {expression} depends on tensor values")
            else:
                self._known[expression] = int(found) if found.is_integer else float(found)
        return self._known[expression]


def hint(size: int | torch.SymInt) -> int:
    """What a size is in the call that is captured; asking binds the capture to nothing."""
    return size if isinstance(size, int) else int(size.node.hint)
