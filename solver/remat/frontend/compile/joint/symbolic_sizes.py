"""Sizes that are symbols: a plan is for the largest that its code is ever called with.

All sizes of a step grow with its symbols (batch, tokens), and so does its peak: what fits at the
largest fits below. A symbol that has no largest (`torch._dynamo.mark_dynamic(x, dim, max=...)`
gives one) gets one here, by a guard: a call beyond compiles, and plans, again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_symbols

_UNBOUNDED = 1 << 40
"""Upper bounds above are torch's way to say that there is none."""

GROWTH = 2
"""A symbol's bound is the power of two at or above so many times the size of the first call."""


def largest(size: int | torch.SymInt | torch.SymFloat | torch.SymBool) -> int:
    """A size as a number, without a guard: its upper bound, or where there is none its hint."""
    if isinstance(size, int):
        return size
    node = size.node
    upper = upper_bound(node.expr, node.shape_env)
    if upper is not None:
        return upper
    return int(node.hint) if node.hint is not None else 0


def upper_bound(expression: sympy.Expr | int, env: ShapeEnv) -> int | None:
    """The largest value of an expression; None where it has none."""
    if isinstance(expression, int) or expression.is_Integer:
        return int(expression)
    upper = env.bound_sympy(expression).upper
    is_known = isinstance(upper, sympy.Integer) and abs(int(upper)) < _UNBOUNDED
    return int(upper) if is_known else None


Symbol = tuple[sympy.Symbol, ShapeEnv]


def bound(placeholders: Iterable[fx.Node]) -> list[Symbol]:
    """Give a bound to each symbol of these that has none. Those that had none."""
    every = list(_symbols(placeholders))
    found = [(symbol, env) for symbol, env in every if upper_bound(symbol, env) is None]
    for symbol, env in found:
        most = GROWTH * int(env.backed_var_to_val[symbol])
        _guard(symbol, env, 1 << (most - 1).bit_length())
    return found


def bound_by_call(symbols: Iterable[Symbol]) -> None:
    """In these no call may be larger than this one."""
    for symbol, env in symbols:
        _guard(symbol, env, int(env.backed_var_to_val[symbol]))


def growth(expression: sympy.Expr | int, env: ShapeEnv) -> float:
    """How many times its value in the first call an expression may be."""
    known = env.backed_var_to_val
    if isinstance(expression, int) or not expression.free_symbols.issubset(known):
        return 1.0
    most, now = upper_bound(expression, env), int(str(expression.xreplace(known)))
    return most / now if most is not None and now else 1.0


def _guard(symbol: sympy.Symbol, env: ShapeEnv, limit: int) -> None:
    env.evaluate_expr(sympy.Le(symbol, limit))


def _symbols(placeholders: Iterable[fx.Node]) -> Iterator[Symbol]:
    """Of the sizes of placeholders, those that a first call has given a value."""
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
