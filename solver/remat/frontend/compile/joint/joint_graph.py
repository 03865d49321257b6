"""A step as torch.compile would run it without remat, in one graph: what remat plans on.

torch's own partitioner decides first, so that a plan for all of the memory is what torch.compile
does anyway: the backward makes again what costs nothing there. Both halves come back together, the
backward reading the forward's nodes, so that more of the forward can run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import fx

from remat.frontend.compile.inductor.compat import (
    changed_afterwards,
    frees_tangents,
    is_tangent,
    min_cut,
)
from remat.frontend.compile.inductor.probe import Kernel, Observation, observed
from remat.frontend.compile.joint.fx_utils import (
    changes,
    elements,
    is_fusible,
    is_number,
    is_product,
    makes_several,
    may_run_again,
    node_bytes,
    source,
    tensors,
)
from remat.limits.outputs import are_dropped


class Fused(NamedTuple):
    """The tensors that a kernel writes, as far as Inductor tells, the operations in it, whether it
    is the call of a library, and what it holds while it runs, if that is known. `over` has what it
    writes and what it may write that over, where nobody else needs that any more."""

    written: tuple[fx.Node, ...]
    parts: tuple[fx.Node, ...]
    is_call: bool = False
    scratch_bytes: int | None = None
    over: tuple[tuple[fx.Node, fx.Node], ...] = ()


@dataclass(frozen=True)
class Joint:
    """`calls` are all operations in their order, the forward's `forward` ones first. `outputs` are
    what the forward returns, `gradients` what the backward does; both as torch has them, None and
    numbers included. `saved` is what the backward reads of the forward. `kernels` are Inductor's,
    in their order; None without Inductor. `observed` are forward and backward as it runs them.
    `mutated` is what does not stay as it was given."""

    module: fx.GraphModule
    placeholders: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]
    forward: int
    outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    saved: tuple[fx.Node, ...]
    kernels: tuple[Fused, ...] | None
    observed: tuple[Observation, ...]
    mutated: frozenset[fx.Node]
    output_meta: dict[str, Any]

    @cached_property
    def place(self) -> dict[fx.Node, int]:
        """Of each operation, its number."""
        return {node: number for number, node in enumerate(self.calls)}

    @property
    def results(self) -> set[fx.Node]:
        """What the forward makes and returns."""
        found = {source(n) for n in self.outputs if isinstance(n, fx.Node)}
        return {n for n in found if n in self.place and not is_number(n)}

    def held(self, outputs: str) -> frozenset[fx.Node]:
        """Of what the forward makes, what its caller holds until the backward ends. The loss is
        held also where `outputs` are dropped."""
        dropped = are_dropped(outputs)
        losses = (n for n in self.results if all(elements(t) == 1 for t in tensors(n)))
        return frozenset(losses if dropped else self.results)

    @property
    def returned(self) -> list[fx.Node]:
        """The nodes among outputs and gradients."""
        return [n for n in (*self.outputs, *self.gradients) if isinstance(n, fx.Node)]

    @property
    def tangents(self) -> tuple[fx.Node, ...]:
        """Gradients that come from outside."""
        return tuple(node for node in self.placeholders if is_tangent(node))

    @cached_property
    def passing(self) -> dict[fx.Node, int]:
        """Of these, what is freed once it is read, with its bytes. (`loss.backward()` holds that of
        the loss.)"""
        return _passing(self.tangents, self.gradients)

    @property
    def given(self) -> tuple[fx.Node, ...]:
        """Parameters, buffers and batch."""
        return tuple(node for node in self.placeholders if not is_tangent(node))

    @property
    def given_bytes(self) -> int:
        """Of parameters, buffers and batch."""
        return sum(map(node_bytes, self.given))

    @property
    def copied_bytes(self) -> int:
        """Of parameters and batch in another layout: Inductor makes these copies before all else,
        and the backward reads most of them."""
        return self.observed[0].copied_bytes if self.observed else 0

    def is_fused(self, call: fx.Node) -> bool:
        """Whether the compiler makes kernels of an operation and its neighbours: it is no call of a
        library."""
        if self.kernels is None or (makes_several(call) and not may_run_again(call)):
            return False
        return is_fusible(call) or call in self._made

    @cached_property
    def _made(self) -> set[fx.Node]:
        """Products that Inductor did not call a library for: of a vector, on CPUs."""
        parts = {True: set[fx.Node](), False: set[fx.Node]()}
        for kernel in self.kernels or ():
            parts[kernel.is_call].update(filter(is_product, kernel.parts))
        return parts[False] - parts[True]

    def is_backward(self, call: fx.Node) -> bool:
        """Whether an operation is of the backward."""
        return self.place[call] >= self.forward


def _fused(kernel: Kernel, here: Mapping[str, fx.Node]) -> Fused:
    written, parts = (
        tuple(here[name] for name in names if name in here and here[name].op == "call_function")
        for names in (kernel.written, kernel.parts)
    )
    over = tuple(
        (source(here[made]), source(here[before]))
        for made, before in kernel.over
        if made in here and before in here
    )
    return Fused(written, parts, kernel.is_call, kernel.scratch_bytes, over)


def _passing(tangents: Iterable[fx.Node], gradients: Iterable[object]) -> dict[fx.Node, int]:
    """Gradients from outside that nobody holds once they are read, with their bytes."""
    if not frees_tangents():
        return {}
    returned = {source(n) for n in gradients if isinstance(n, fx.Node)}
    large = (n for n in tangents if any(elements(t) > 1 for t in tensors(n)))
    return {n: node_bytes(n) for n in large if n not in returned}


def _given_away(shown: Mapping[str, fx.Node], outputs: Sequence[object]) -> set[str]:
    """Inputs of the backward that it may write over, as torch has it: what the forward made for it
    alone, and shows it once."""
    returned = {source(n) for n in outputs if isinstance(n, fx.Node)}
    times = Counter(shown.values())
    return {
        name
        for name, node in shown.items()
        if times[node] == 1 and node.op != "placeholder" and node not in returned
    }


def rejoined(
    module: fx.GraphModule,
    inputs: Sequence[object],
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None,
    *,
    inductor: bool,
) -> Joint:
    """From the joint graph that AOTAutograd has made. Changes that."""
    for node in module.graph.nodes:  # torch.utils.checkpoint's marks: what runs again is planned
        node.meta.pop("recompute", None)
    output_meta = dict(module.graph.output_node().meta)
    later = {node.name for node in changed_afterwards(module)}
    given = [(n.name, n) for n in module.graph.nodes if n.op == "placeholder"]
    halves = min_cut(module, inputs, num_fwd_outputs, static_lifetime_input_indices)
    graph = fx.Graph()
    made: dict[str, fx.Node] = {name: graph.node_copy(node) for name, node in given}
    placeholders = tuple(made.values())
    constants: dict[object, fx.Node] = {}
    returned: list[tuple[Any, ...]] = []
    calls: list[fx.Node] = []
    kernels: list[Fused] = []
    seen: list[Observation] = []
    forward = 0
    saved: tuple[fx.Node, ...] = ()
    mutated = {made[name] for name in later}
    for is_backward, half in enumerate(halves):
        here: dict[fx.Node, fx.Node] = {}
        for node in half.graph.nodes:
            if node.op == "placeholder":
                here[node] = made[str(node.target)]
            elif node.op == "get_attr":
                if node.target not in constants:
                    constants[node.target] = graph.node_copy(node)
                here[node] = constants[node.target]
            elif node.op == "output":
                returned.append(fx.map_arg(tuple(node.args[0]), here.__getitem__))  # type: ignore[arg-type]
            elif (
                is_backward
                and any(source(here[n]) in mutated for n in node.all_input_nodes)
                and ((first := made.get(node.name)) is not None and first.target == node.target)
            ):
                # torch 2.13 makes again what the forward read of a buffer that it then changed.
                here[node] = first
            else:
                here[node] = graph.node_copy(node, here.__getitem__)
                calls.append(here[node])
                made.setdefault(node.name, here[node])
        if is_backward:
            reads = {n for call in calls[forward:] for n in call.all_input_nodes}
            saved = tuple(n for n in calls[:forward] if n in reads)
        else:
            forward = len(calls)
            mutated |= {source(n) for call in calls for n in changes(call)}
        if inductor:
            named = {n.name: here[n] for n in here}
            shown = {n.name: source(here[n]) for n in here if n.op == "placeholder"}
            # Parameters, and views of them, are no part of what lives and dies here.
            given = {n for n in placeholders if not is_tangent(n)}
            storages = {
                name: (n.name, 0 if n in given else node_bytes(n)) for name, n in shown.items()
            }
            gone = _given_away(shown, returned[0][:num_fwd_outputs])
            passing = _passing(filter(is_tangent, shown.values()), returned[-1])
            freed = {n.name: size_bytes for n, size_bytes in passing.items()}
            seen.append(observed(half, storages, gone, freed, seen[0] if seen else None))
            kernels += [_fused(kernel, named) for kernel in seen[-1].kernels]
    return Joint(
        module=module,
        placeholders=placeholders,
        calls=tuple(calls),
        forward=forward,
        outputs=returned[0][:num_fwd_outputs],
        gradients=returned[1],
        saved=saved,
        kernels=tuple(kernels) if inductor else None,
        observed=tuple(seen),
        mutated=frozenset(mutated.union(source(n) for call in calls for n in changes(call))),
        output_meta=output_meta,
    )
