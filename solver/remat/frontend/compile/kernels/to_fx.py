"""Schedule -> joint graph: what the solver decided, as the graph that torch compiles.

Every run of the schedule becomes the nodes of its region once more, in the schedule's order. Views
are written again where they are read. Each run has a number of its own in `meta`, by which Inductor
is held to it (`kernels.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from remat.frontend.compile.inductor.compat import extract
from remat.frontend.compile.inductor.fusion_control import RUN, materialize
from remat.frontend.compile.joint.fx_utils import (
    is_elementwise,
    is_item,
    is_joined,
    is_number,
    is_written_anyway,
    maker,
    node_bytes,
    source,
    tensors,
)
from remat.frontend.compile.kernels.fusion_groups import Region
from remat.frontend.compile.kernels.to_solver import Step
from remat.frontend.compile.registry import CompiledPlan
from remat.schedule import Schedule


def write(
    step: Step, compiled: CompiledPlan, num_fwd_outputs: int, static: Iterable[int], *, held: bool
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward that run exactly the schedule. With `held`, what is written is marked
    for Inductor, results of libraries too: it would put off a product for a sum that reads it.
    Eager mode writes everything anyway."""
    writer = _Writer(step, compiled, held)
    writer.write(compiled.plan.schedule)
    return writer.halves(num_fwd_outputs, static)


class _Writer:
    def __init__(self, step: Step, compiled: CompiledPlan, held: bool) -> None:
        self.step = step
        self.compiled = compiled
        self.held = held
        self.graph = fx.Graph()
        self.copied: dict[fx.Node, fx.Node] = {}
        """Placeholders, constants and numbers: there is one of each."""
        self.current: dict[fx.Node, fx.Node] = {}
        """The latest copy of each tensor that a kernel wrote."""
        self.forward: set[fx.Node] = set()
        self.outputs: set[fx.Node] = set()
        """Of what the forward returns, what its caller holds during the backward."""
        self.ran: set[int] = set()
        self.anew: Mapping[fx.Node, fx.Node] = {}
        """What the region that is written reads instead of others."""

    def write(self, schedule: Schedule) -> None:
        joint = self.step.joint
        for node in joint.placeholders:
            self.copied[node] = self._copy(node, {})
        outputs: tuple[Any, ...] = ()
        for number, op in enumerate(schedule.runs):
            region = self.step.regions[op]
            if region is None:
                outputs = self._end_of_forward()
            else:
                self._run(region, number)
        if self.step.graph.boundary is None:
            outputs = self._end_of_forward()
        output = self.graph.output((*outputs, *self._returned(joint.gradients)))
        output.meta.update(joint.output_meta)
        self.graph.eliminate_dead_code()
        self.graph.lint()

    def _end_of_forward(self) -> tuple[Any, ...]:
        returned = self._returned(self.step.joint.outputs)
        self.outputs = {source(self.current[node]) for node in self.step.held}
        self.forward = set(self.graph.nodes)
        return returned

    def halves(
        self, num_fwd_outputs: int, static: Iterable[int]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split where the backward starts."""
        joint = fx.GraphModule(self.step.joint.module, self.graph)
        gradients = self._gradient_nodes()
        tangents = {self.copied[node] for node in self.step.joint.tangents}
        saved: list[fx.Node] = []
        numbers: list[fx.Node] = []
        objects: list[fx.Node] = []
        for node in self.graph.nodes:
            if node not in self.forward or node in tangents or node.op in ("output", "get_attr"):
                continue
            is_read_later = any(u not in self.forward and u.op != "output" for u in node.users)
            if not is_read_later and node not in gradients:
                continue
            if is_number(node) or isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)):
                numbers.append(node)
            elif any(True for _ in tensors(node)):
                if not isinstance(node.meta["val"], (tuple, list)):
                    saved.append(node)
            else:
                objects.append(node)
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        self._note_held(saved)
        return extract(joint, saved, numbers, objects, num_fwd_outputs, [inputs[i] for i in static])

    def _note_held(self, saved: list[fx.Node]) -> None:
        """What the caller and autograd hold during the backward, beside what it frees."""
        kept = {n for n in saved if source(n) in self.outputs}
        alone = self.outputs - {source(n) for n in kept}
        joint = self.step.joint
        tangents = [n for n in joint.tangents if n not in joint.passing]
        self.compiled.passing = {n.name: size_bytes for n, size_bytes in joint.passing.items()}
        self.compiled.held_names = frozenset(n.name for n in kept)
        self.compiled.held_bytes = sum(map(node_bytes, (*alone, *tangents)))
        made = {source(n) for n in saved if n.op == "call_function"}
        self.compiled.saved_bytes = sum(map(node_bytes, made | alone))

    def _gradient_nodes(self) -> set[fx.Node]:
        returned = self.graph.output_node().args[0]
        assert isinstance(returned, tuple)
        return {n for n in returned[len(self.step.joint.outputs) :] if isinstance(n, fx.Node)}

    # -- one run --------------------------------------------------------------------------------

    def _run(self, region: Region, number: int) -> None:
        local: dict[fx.Node, fx.Node] = {}
        again = id(region) in self.ran
        self.ran.add(id(region))
        self.anew = region.anew
        place = self.step.joint.place
        nodes = region.nodes if again else sorted(region.all_nodes, key=place.__getitem__)
        inside = set(nodes)
        steps: list[fx.Node] = []
        for node in nodes:
            if node in region.alone:
                inputs = {n: self._anew(n, inside, local, steps) for n in node.all_input_nodes}
                local[node] = self._copy(node, inputs)
            else:
                self._copy_here(node, local)
            for user in node.users:
                if is_item(user):
                    self._copy_here(user, local)
        for copy in (*local.values(), *steps):
            copy.meta[RUN] = (self.compiled.number, number)
        for node in region.written:
            if again and node in self.step.held:
                continue  # its first copy lives as long as any reader
            made, apart = local[node], is_joined(node)
            # Inductor says which layout a convolution is to have, not what only passes it on.
            if self.held and node_bytes(node) and (apart or not is_written_anyway(node)):
                made = self._materialized(made, number, apart=apart)
            self.current[node] = made
        self.anew = {}

    def _anew(
        self,
        node: fx.Node,
        inside: set[fx.Node],
        local: dict[fx.Node, fx.Node],
        steps: list[fx.Node],
    ) -> fx.Node:
        """A copy of it for one reader alone, if it is a step of this kernel, and of all that leads
        to it. What two read, Inductor may write to memory."""
        if maker(node) not in inside or not is_elementwise(maker(node)):
            return self._find(node, local)
        inputs = {n: self._anew(n, inside, local, steps) for n in node.all_input_nodes}
        steps.append(self._copy(node, inputs))
        return steps[-1]

    def _materialized(self, node: fx.Node, number: int, *, apart: bool) -> fx.Node:
        written = self.graph.call_function(materialize, (node, apart))
        written.meta = {**node.meta, RUN: (self.compiled.number, number)}
        return written

    def _copy_here(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> None:
        local[node] = self._copy(node, {n: self._find(n, local) for n in node.all_input_nodes})

    def _find(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
        """What an argument is now; views of it are written here."""
        node = self.anew.get(node, node)
        if node in local:
            return local[node]
        if node.op in ("placeholder", "get_attr") or is_number(node):
            return self._once(node, local)
        if source(node) is node:
            return self.current[node]
        self._copy_here(node, local)
        return local[node]

    def _once(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
        if node not in self.copied:
            inputs = {n: self._find(n, local) for n in node.all_input_nodes}
            self.copied[node] = self._copy(node, inputs)
        return self.copied[node]

    def _copy(self, node: fx.Node, inputs: dict[fx.Node, fx.Node]) -> fx.Node:
        made = self.graph.node_copy(node, inputs.__getitem__)
        made.meta = dict(node.meta)
        return made

    def _returned(self, nodes: tuple[Any, ...]) -> tuple[Any, ...]:
        local: dict[fx.Node, fx.Node] = {}
        return tuple(self._find(n, local) if isinstance(n, fx.Node) else n for n in nodes)
