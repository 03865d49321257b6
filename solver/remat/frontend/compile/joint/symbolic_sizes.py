"""Upper bounds of symbolic sizes: a plan is made for the largest sizes that its code may receive.

All sizes of a step grow with its symbols (batch, tokens), and so does its peak: a plan that fits at
the upper bounds fits at smaller sizes. `torch._dynamo.mark_dynamic(x, dim, max=...)` sets a bound.
A symbol without one gets one here, by a guard: a call with a larger size recompiles and replans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_symbols

_UNBOUNDED = 1 << 40
"""Upper bounds of this size and more mean that torch knows of no bound."""

_HEADROOM_FACTOR = 2
"""A missing bound becomes the size of the first call times this, rounded up to a power of two."""

ScopedSymbol = tuple[sympy.Symbol, ShapeEnv]
"""A symbol of a size with the shape environment that holds its value and bounds."""


def max_size(size: int | torch.SymInt | torch.SymFloat | torch.SymBool) -> int:
    """Return the upper bound of a size as an int, its hint if it has no bound. Adds no guard."""
    if isinstance(size, int):
        return size
    node = size.node
    upper = upper_bound(node.expr, node.shape_env)
    if upper is not None:
        return upper
    return int(node.hint) if node.hint is not None else 0


def upper_bound(expression: sympy.Expr | int, env: ShapeEnv) -> int | None:
    """Return the largest value that an expression of sizes may have, None if it is unbounded."""
    if isinstance(expression, int) or expression.is_Integer:
        return int(expression)
    upper = env.bound_sympy(expression).upper
    is_bounded = isinstance(upper, sympy.Integer) and abs(int(upper)) < _UNBOUNDED
    return int(upper) if is_bounded else None


def add_missing_bounds(placeholders: Iterable[fx.Node]) -> list[ScopedSymbol]:
    """Guard each unbounded symbol in the sizes of these placeholders by an upper bound with
    headroom for larger calls. Return the symbols that had no bound."""
    symbols = list(_symbols(placeholders))
    unbounded = [(symbol, env) for symbol, env in symbols if upper_bound(symbol, env) is None]
    for symbol, env in unbounded:
        size = _HEADROOM_FACTOR * int(env.backed_var_to_val[symbol])
        _guard(symbol, env, 1 << (size - 1).bit_length())
    return unbounded


def bound_by_current_size(symbols: Iterable[ScopedSymbol]) -> None:
    """Guard each symbol by its value in the current call: larger calls recompile."""
    for symbol, env in symbols:
        _guard(symbol, env, int(env.backed_var_to_val[symbol]))


def growth_factor(expression: sympy.Expr | int, env: ShapeEnv) -> float:
    """Return the upper bound of an expression of sizes divided by its value in the first call."""
    first_values = env.backed_var_to_val
    if isinstance(expression, int) or not expression.free_symbols.issubset(first_values):
        return 1.0
    upper = upper_bound(expression, env)
    first = int(str(expression.xreplace(first_values)))
    return upper / first if upper is not None and first else 1.0


def _guard(symbol: sympy.Symbol, env: ShapeEnv, upper: int) -> None:
    env.evaluate_expr(sympy.Le(symbol, upper))


def _symbols(placeholders: Iterable[fx.Node]) -> Iterator[ScopedSymbol]:
    """Yield the symbols in the sizes of placeholders that have a value in the first call."""
    seen: set[sympy.Symbol] = set()
    for node in placeholders:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if not isinstance(size, torch.SymInt):
                continue
            env = size.node.shape_env
            for symbol in free_symbols(size) - seen:
                seen.add(symbol)
                if symbol in env.backed_var_to_val:
                    yield symbol, env
