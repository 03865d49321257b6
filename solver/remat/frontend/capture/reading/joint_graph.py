"""`JointGraph`: forward and backward of a training step as one graph of functional operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx


@dataclass(frozen=True)
class GraphInput:
    """A tensor that the step reads, by the `kind` and `target` of its `Placeholder`."""

    kind: str
    target: str


@dataclass(frozen=True, eq=False)
class JointGraph:
    """The forward and backward of a training step as functional operators.

    The `val` of a node is its fake tensor, or several; `module` is the path of the module that it
    belongs to, and `is_backward` is True if it was recorded after the forward (operators only).
    `constants` are real tensors, by the target of their `get_attr` node. `inputs` says what each
    placeholder is. `writes` are pairs of an input and its new value, which the forward leaves in
    it; `gradients` are pairs of an input and its gradient. `outputs` are the outputs of the model.
    `sources` has for each item of `gradients` the indices of the outputs that depend on the input.
    """

    graph: fx.Graph
    constants: Mapping[str, torch.Tensor]
    inputs: Mapping[fx.Node, GraphInput]
    writes: Sequence[tuple[fx.Node, fx.Node]]
    outputs: Sequence[fx.Node]
    gradients: Sequence[tuple[fx.Node, fx.Node]]
    sources: Sequence[frozenset[int]]
