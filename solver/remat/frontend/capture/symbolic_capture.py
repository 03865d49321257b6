"""One capture for calls that differ in the sizes of some dimensions, such as sequence lengths.

Those sizes are SymInts in it. Where the capture depends on a size (a branch of the model, a choice
of kernel in torch), torch records a guard. The capture is valid for all sizes that satisfy every
guard: a trace for them is read from the same joint graph, with numbers in place of the symbols.
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
from remat.frontend.capture.reading.captured_joint_graph import CapturedJointGraph
from remat.frontend.capture.symbol_values import SymbolValues
from remat.frontend.capture.trace import capture_joint_graph

InputDimension = tuple[int, int]
"""The index of an input tensor, and the index of one of its dimensions."""

MIN_SYMBOLIC_SIZE = 2
"""Torch specializes on sizes of 0 and 1, since they broadcast."""


class SymbolicCapture:
    """A joint graph with symbols for the sizes of some dimensions; equal sizes share a symbol."""

    def __init__(
        self,
        joint: CapturedJointGraph,
        symbols: dict[InputDimension, sympy.Symbol],
        shape_env: ShapeEnv,
    ) -> None:
        self.symbolic_dimensions = frozenset(symbols)
        self.guards = joint.guards
        self._joint = joint
        self._symbols = symbols
        self._guards = [guard.expr for guard in shape_env.guards]
        self._ranges = {s: shape_env.var_to_range[s] for s in symbols.values()}

    def trace_at(self, shapes: Sequence[Sequence[int]]) -> Trace | None:
        """Return the trace for inputs of these shapes, which may differ from the captured ones in
        symbolic dimensions only. None if sizes that share a symbol differ, a guard of the capture
        fails, or a constant that it read is another one."""
        sizes: dict[sympy.Symbol, int] = {}
        for (input_index, dimension), symbol in self._symbols.items():
            size = shapes[input_index][dimension]
            if sizes.setdefault(symbol, size) != size:
                return None
        values = SymbolValues(sizes)
        if not all(size in self._ranges[symbol] for symbol, size in sizes.items()):
            return None
        if not all(map(values.evaluate, self._guards)) or not self._joint.is_valid_at(values):
            return None
        return self._joint.trace(values)


def capture_symbolically(
    model: nn.Module,
    leaves: Sequence[torch.Tensor],
    inputs: Structure,
    differentiate: str | Sequence[str],
    dimensions: Collection[InputDimension],
) -> SymbolicCapture:
    """Capture a step for all sizes of the `dimensions`. Inputs that have one must be contiguous.
    `leaves` are the tensors of its arguments, whose structure is `inputs`. Raises `TraceError` if
    the model cannot be captured so."""
    from torch._dynamo.source import ConstantSource  # imports the compiler

    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    symbols: dict[InputDimension, sympy.Symbol] = {}
    fakes: list[torch.Tensor] = []
    for index, leaf in enumerate(leaves):
        symbolic = [d for d in range(leaf.dim()) if (index, d) in dimensions]
        shape: list[Any] = list(leaf.shape)
        for dimension in symbolic:
            source = ConstantSource(f"input_{index}_{dimension}")
            symbol = shape_env.create_symbol(leaf.shape[dimension], source, DimDynamic.DUCK)
            assert isinstance(symbol, sympy.Symbol)
            symbols[index, dimension] = symbol
            shape[dimension] = shape_env.create_symintnode(symbol, hint=leaf.shape[dimension])
        options: dict[str, Any] = {"dtype": leaf.dtype, "device": leaf.device}
        with mode:
            if symbolic:
                fake = torch.empty(shape, **options)
            else:
                fake = torch.empty_strided(leaf.shape, leaf.stride(), **options)
        fakes.append(fake.requires_grad_(leaf.requires_grad))
    joint = capture_joint_graph(model, fakes, inputs, differentiate, symbolic=True)
    return SymbolicCapture(joint, symbols, shape_env)
