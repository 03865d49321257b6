"""Concrete values for the symbols (SymInts) of a symbolic capture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from remat.errors import TraceError

SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class SymbolicNumber:
    """A number of a symbolic capture, as an argument of an operation."""

    expression: Any


class SymbolValues:
    """The values of the symbols in one call. Without any, all sizes must be plain numbers."""

    def __init__(self, values: Mapping[sympy.Symbol, int] | None = None) -> None:
        self._values = {symbol: sympy.Integer(value) for symbol, value in (values or {}).items()}
        self._cache: dict[object, bool | int | float] = {}

    def size(self, size: int | torch.SymInt) -> int:
        """Return a size, stride or number of bytes as an int."""
        return size if type(size) is int else int(self.concrete(size))

    def concrete(self, value: Any) -> Any:
        """Return the value of a SymInt, SymFloat, SymBool or `SymbolicNumber`; anything else
        unchanged."""
        if isinstance(value, SymbolicNumber):
            return self.evaluate(value.expression)
        return self.evaluate(value.node.expr) if isinstance(value, SYMBOLIC_TYPES) else value

    def evaluate(self, expression: Any) -> bool | int | float:
        """Return the value of a sympy expression. Raises `TraceError` if it has symbols without a
        value: these stand for elements of tensors."""
        if expression not in self._cache:
            result = expression.xreplace(self._values)
            if result in (sympy.true, sympy.false):
                self._cache[expression] = bool(result)
            elif not result.is_number:
                raise TraceError(f"the size {expression} depends on tensor values")
            else:
                self._cache[expression] = int(result) if result.is_integer else float(result)
        return self._cache[expression]


def size_hint(size: int | torch.SymInt) -> int:
    """Return the size that a SymInt has in the call that is being captured, without adding a guard
    to the capture. An int is returned unchanged."""
    return size if isinstance(size, int) else int(size.node.hint)
