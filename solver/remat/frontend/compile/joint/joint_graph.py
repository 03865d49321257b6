"""The step that torch.compile would run without remat, as one graph of forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import fx

from remat.frontend.common.aliases import storage_base
from remat.frontend.compile.compat import backward_frees_tangents, is_tangent
from remat.frontend.compile.joint.fx_utils import (
    has_multiple_outputs,
    is_fusible,
    is_matmul,
    is_recomputable,
    is_symbolic_scalar,
    node_bytes,
    num_elements,
    output_tensors,
)
from remat.frontend.compile.joint.probe_result import InputLifetimes, ProbeResult
from remat.limits.outputs import are_dropped


class FxKernel(NamedTuple):
    """One of Inductor's kernels, in terms of nodes of the joint graph.

    `written` are the tensors that it writes, as far as Inductor reports them, and `origins` the
    operations that it was lowered from. `is_extern` marks extern kernels and templates.
    `workspace_bytes` are allocated only while it runs, None if that is unknown. `in_place_pairs`
    are (output, input) pairs that may share memory if the input is dead after the kernel.
    """

    written: tuple[fx.Node, ...]
    origins: tuple[fx.Node, ...]
    is_extern: bool = False
    workspace_bytes: int | None = None
    in_place_pairs: tuple[tuple[fx.Node, fx.Node], ...] = ()


@dataclass(frozen=True)
class CompiledJointGraph:
    """The joint graph of a step, after torch's min-cut partitioner and Inductor's scheduler.

    The first `num_forward` of the `operations` are the forward; all are in their order of
    execution. `forward_outputs` are returned by the forward and `gradients` by the backward, both
    with the None and scalar entries that torch has there. `saved_tensors` are nodes of the forward
    that the backward reads. `kernels` are Inductor's, in their order, and `probe_results` are the
    forward and the backward as Inductor would run them; None and empty without Inductor. `mutated`
    are the storage bases that some operation, or AOTAutograd after the forward, writes to in place.
    `plain_halves` are the forward and backward graph of plain torch.compile, None without Inductor
    and where they would give wrong results; `backward_inputs` are the lifetimes of their saved
    tensors. `batch_copy_bytes` are copies of the batch that CUDA graphs read; 0 without them.
    """

    module: fx.GraphModule
    placeholders: tuple[fx.Node, ...]
    operations: tuple[fx.Node, ...]
    num_forward: int
    forward_outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    saved_tensors: tuple[fx.Node, ...]
    kernels: tuple[FxKernel, ...] | None
    probe_results: tuple[ProbeResult, ...]
    mutated: frozenset[fx.Node]
    output_meta: dict[str, Any]
    plain_halves: tuple[fx.GraphModule, fx.GraphModule] | None = None
    backward_inputs: InputLifetimes | None = None
    batch_copy_bytes: int = 0

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        """The index of each operation in the order of execution."""
        return {node: index for index, node in enumerate(self.operations)}

    @property
    def computed_outputs(self) -> set[fx.Node]:
        """The storage bases of the forward's outputs that the forward itself computes."""
        return computed_outputs(self.forward_outputs)

    def retained_outputs(self, outputs: str) -> frozenset[fx.Node]:
        """Return the forward's outputs that the caller references until the backward ends."""
        return retained_outputs(self.forward_outputs, outputs)

    @property
    def returned_nodes(self) -> list[fx.Node]:
        """The nodes among the forward's outputs and the gradients, without None and scalars."""
        return [n for n in (*self.forward_outputs, *self.gradients) if isinstance(n, fx.Node)]

    @property
    def tangents(self) -> tuple[fx.Node, ...]:
        """The placeholders that are gradients of the forward's outputs."""
        return tuple(node for node in self.placeholders if is_tangent(node))

    @cached_property
    def donated_tangents(self) -> dict[fx.Node, int]:
        """The tangents that are freed once they are read, with their bytes. The tangent of the
        loss is not among them: `loss.backward()` holds it."""
        return donated_tangent_bytes(self.tangents, self.gradients)

    @property
    def primals(self) -> tuple[fx.Node, ...]:
        """The placeholders that are parameters, buffers and batch."""
        return tuple(node for node in self.placeholders if not is_tangent(node))

    @property
    def primals_bytes(self) -> int:
        """The bytes of parameters, buffers and batch."""
        return sum(map(node_bytes, self.primals))

    @property
    def constant_bytes(self) -> int:
        """The bytes that are allocated during the whole step: parameters, buffers, batch, and the
        copy of the batch that CUDA graphs read."""
        return self.primals_bytes + self.batch_copy_bytes

    @property
    def layout_copy_bytes(self) -> int:
        """The bytes of copies of parameters and batch in another layout. Inductor's forward makes
        them first, and the backward reads most of them."""
        return self.probe_results[0].layout_copy_bytes if self.probe_results else 0

    def strides_in_memory(self, node: fx.Node) -> tuple[int, ...]:
        """Return the strides in which the forward writes a tensor: those that Inductor selects,
        where they are known, else those of the graph."""
        saved = self.probe_results[0].output_strides if self.probe_results else {}
        return saved.get(node.name, node.meta["val"].stride())

    def is_generated(self, operation: fx.Node) -> bool:
        """True if Inductor generates the operation's kernel, and so may fuse it; False for an
        extern kernel, and always without Inductor."""
        if self.kernels is None or (
            has_multiple_outputs(operation) and not is_recomputable(operation)
        ):
            return False
        return is_fusible(operation) or operation in self._generated_matmuls

    @cached_property
    def _generated_matmuls(self) -> set[fx.Node]:
        """Matrix products without an extern kernel: those with a vector, on CPUs."""
        generated, extern = set[fx.Node](), set[fx.Node]()
        for kernel in self.kernels or ():
            matmuls = filter(is_matmul, kernel.origins)
            (extern if kernel.is_extern else generated).update(matmuls)
        return generated - extern

    def is_backward(self, operation: fx.Node) -> bool:
        """True if an operation belongs to the backward."""
        return self.position[operation] >= self.num_forward


def computed_outputs(forward_outputs: Iterable[object]) -> set[fx.Node]:
    """Return the storage bases of the forward's outputs that are no inputs of the step."""
    bases = {storage_base(n) for n in forward_outputs if isinstance(n, fx.Node)}
    return {n for n in bases if n.op == "call_function" and not is_symbolic_scalar(n)}


def retained_outputs(forward_outputs: Iterable[object], outputs: str) -> frozenset[fx.Node]:
    """Return the storage bases of the forward's outputs that the caller references until the
    backward ends.

    `outputs` is "held" or "dropped". A loss is retained even if outputs are dropped.
    """
    computed = computed_outputs(forward_outputs)
    losses = (n for n in computed if all(num_elements(t) == 1 for t in output_tensors(n)))
    return frozenset(losses if are_dropped(outputs) else computed)


def donated_tangent_bytes(
    tangents: Iterable[fx.Node], gradients: Iterable[object]
) -> dict[fx.Node, int]:
    """Return the tangents that are freed once they are read, with their bytes: those with more
    than one element that the backward does not return as a gradient."""
    if not backward_frees_tangents():
        return {}
    returned = {storage_base(n) for n in gradients if isinstance(n, fx.Node)}
    donated = (n for n in tangents if any(num_elements(t) > 1 for t in output_tensors(n)))
    return {n: node_bytes(n) for n in donated if n not in returned}
