"""`Family`: one capture for calls that differ in sizes, such as the lengths of texts.

The sizes that vary are torch's symbols in it. What a capture decides by a size (a branch of the
model, a kernel of torch) torch writes down as a guard; a call is of the family where all guards
hold for its sizes, and its trace is then read off the graph with numbers in the symbols' places.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sympy
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from remat.documents.structure import Structure
from remat.documents.trace import Trace
from remat.frontend.capture.reading.joint_graph import Joint
from remat.frontend.capture.symbolic_sizes import Sizes
from remat.frontend.capture.trace import joint_of

Dimension = tuple[int, int]
"""Of an input, by its number, which of its dimensions."""

SMALLEST = 2
"""Torch takes sizes of 0 and 1 for numbers: they broadcast."""


class Family:
    """A joint graph with symbols for the sizes of some dimensions; equal ones have one symbol."""

    def __init__(
        self, joint: Joint, symbols: dict[Dimension, sympy.Symbol], shapes: ShapeEnv
    ) -> None:
        self.varying = frozenset(symbols)
        self._joint = joint
        self._symbols = symbols
        self._guards = [guard.expr for guard in shapes.guards]
        self._ranges = {s: shapes.var_to_range[s] for s in symbols.values()}

    def at(self, shapes: Sequence[Sequence[int]]) -> Trace | None:
        """The step with inputs of these shapes, which differ from the captured ones in varying
        dimensions only. None where the capture does not hold for them."""
        values: dict[sympy.Symbol, int] = {}
        for (number, dimension), symbol in self._symbols.items():
            size = shapes[number][dimension]
            if values.setdefault(symbol, size) != size:
                return None
        sizes = Sizes(values)
        if not all(size in self._ranges[symbol] for symbol, size in values.items()):
            return None
        if not all(map(sizes.of, self._guards)) or not self._joint.is_the_same_at(sizes):
            return None
        return self._joint.trace(sizes)


def family(
    model: nn.Module,
    leaves: Sequence[torch.Tensor],
    inputs: Structure,
    differentiate: str | Sequence[str],
    varying: Collection[Dimension],
) -> Family:
    """Capture a step for all sizes of some dimensions of its inputs, which must be contiguous.
    Raises `TraceError`."""
    from torch._dynamo.source import ConstantSource  # imports the compiler

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    symbols: dict[Dimension, sympy.Symbol] = {}
    fakes: list[torch.Tensor] = []
    for number, leaf in enumerate(leaves):
        own = [d for d in range(leaf.dim()) if (number, d) in varying]
        size: list[Any] = list(leaf.shape)
        for dimension in own:
            source = ConstantSource(f"input_{number}_{dimension}")
            symbol = shapes.create_symbol(leaf.shape[dimension], source, DimDynamic.DUCK)
            assert isinstance(symbol, sympy.Symbol)
            symbols[number, dimension] = symbol
            size[dimension] = shapes.create_symintnode(symbol, hint=leaf.shape[dimension])
        with mode:
            like = {"dtype": leaf.dtype, "device": leaf.device}
            fake = torch.empty(size, **like) if own else _laid_out(leaf, **like)
        fakes.append(fake.requires_grad_(leaf.requires_grad))
    joint = joint_of(model, fakes, inputs, differentiate, symbolic=True)
    return Family(joint, symbols, shapes)


def _laid_out(leaf: torch.Tensor, **like: Any) -> torch.Tensor:
    return torch.empty_strided(leaf.shape, leaf.stride(), **like)
