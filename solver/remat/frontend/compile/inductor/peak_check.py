"""The peak of what Inductor will really run: read off its scheduler, after it has fused.

The plan is for kernels that remat chose; Inductor may still not fuse what it was asked to, copy a
tensor into another layout, or need a kernel more. So its own list of kernels, with the buffers that
each reads and writes, is simulated by the rules of `remat.simulate` before a line of code is
generated: what a kernel reads and what it writes are there while it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import fx
from torch._inductor.memory import compute_memory_timeline, prepare_planning_info
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from remat.frontend.compile import reporting
from remat.frontend.compile.inductor.buffer_reuse import (
    donated,
    inside_of,
    overwritten,
    passed_on,
    whole_of,
)
from remat.frontend.compile.inductor.compat import SchedulerPass
from remat.frontend.compile.inductor.extern_workspace import scratch_bytes
from remat.frontend.compile.inductor.fusion_control import runs_of
from remat.frontend.compile.joint.fx_utils import node_bytes
from remat.frontend.compile.joint.symbolic_sizes import growth
from remat.frontend.compile.registry import CompiledPlan, find
from remat.limits.budget import format_bytes


class OverBudget(Exception):
    """The kernels of a plan take more than was asked for."""

    def __init__(
        self, compiled: CompiledPlan, peak_bytes: int, budget_bytes: int, apart: Collection[str]
    ) -> None:
        super().__init__(
            f"Inductor's kernels take {format_bytes(peak_bytes)} where "
            f"{format_bytes(budget_bytes)} were asked for "
            '(backend="remat" then plans again; a Partitioner needs a larger budget)'
        )
        self.compiled = compiled
        self.excess_bytes = peak_bytes - budget_bytes
        self.apart = frozenset(apart)


class Verifier(SchedulerPass):
    """Notes the peak of each planned graph in its plan. Raises `OverBudget`. `of` are plans that
    code in Inductor's cache is verified for."""

    def __init__(self, of: str) -> None:
        self._of = of

    def __call__(self, nodes: list[Any]) -> list[Any]:
        compiled = _plan_of(nodes)
        if compiled is None:
            return nodes
        is_backward = bool(V.graph.is_backward)
        held = compiled.held_names if is_backward else frozenset[str]()
        passing = compiled.passing if is_backward else {}
        peak_bytes = compiled.given_bytes + live_peak_bytes(nodes, held, passing=passing)
        if is_backward:
            peak_bytes += compiled.held_bytes + compiled.copied_bytes
        else:
            compiled.copied_bytes = copied_bytes()
        half = "backward" if is_backward else "forward"
        compiled.verified[half] = peak_bytes
        reporting.verified(compiled, half)
        budget_bytes = compiled.budget_bytes
        if budget_bytes is not None and peak_bytes > budget_bytes:
            raise OverBudget(compiled, peak_bytes, budget_bytes, _apart(nodes, compiled, held))
        return nodes

    def uuid(self) -> str:
        """For Inductor's cache: code that comes from there is not verified again."""
        return self._of


def _apart(nodes: Sequence[Any], compiled: CompiledPlan, held: Collection[str]) -> set[str]:
    """What was planned to be written over what it is made of, and is not."""
    over = overwritten(nodes, donated().difference(held))
    graph, runs = compiled.plan.graph, compiled.plan.schedule.runs
    planned: Counter[int] = Counter()
    for node in nodes:
        in_place = sum(buffer.get_name() in over for buffer in node.get_outputs())
        for number, run in runs_of(node):
            if number == compiled.number:
                planned[runs[run]] += in_place
    operations = ((graph.operations[op], found) for op, found in planned.items())
    missed = (o for o, found in operations if found < len(o.overwrites))
    return {graph.values[v].name for operation in missed for v in operation.outputs}


def live_peak_bytes(
    nodes: Sequence[Any],
    held: Iterable[str] = (),
    storages: Mapping[str, tuple[str, int]] | None = None,
    given: Iterable[str] | None = None,
    passing: Mapping[str, int] | None = None,
) -> int:
    """Of the inputs that can be freed and of all buffers, at the worst kernel. Inputs `held` are
    there to the end. Those that show the same of the `storages` take its bytes, until the last of
    them is read. Inputs `given` may be written over, those that torch names by default. Inputs that
    are `passing` have so many bytes until they are read: Inductor counts them as held by others.
    Calls of libraries have their scratch memory while they run."""
    scheduler = V.graph.scheduler
    outputs = OrderedSet(V.graph.get_output_names())
    _, inputs = prepare_planning_info(
        list(nodes),
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        OrderedSet(V.graph.graph_inputs.keys()),
        outputs,
    )
    lives, _, _ = compute_memory_timeline(list(nodes), inputs, outputs)
    kept = set(held)
    may_go = (donated() if given is None else set(given)) - kept
    gone = set(overwritten(nodes, may_go).values())  # their memory is the next one's
    inside = {name for node in nodes for name in inside_of(node) - passed_on(node)}
    ends: dict[str, int] = {}
    sizes: dict[str, int] = {}
    module: Any = V.graph.module
    placeholders = module.graph.find_nodes(op="placeholder")
    given_bytes = {str(n.target): node_bytes(n) for n in placeholders}
    change = [0] * (len(nodes) + 1)
    joined: dict[str, list[Any]] = {}
    for life in lives:
        name = life.buffer.get_name()
        if name in inside:
            continue
        if (whole := whole_of(name)) is not None:
            joined.setdefault(whole, []).append(life)
            continue
        lasting = life.end_step == -1 or name in kept
        end = len(nodes) if lasting else life.end_step + (name not in gone)
        times = _growth(name)
        allocated, freed = round(times * life.size_alloc), round(times * life.size_free)
        if name in given_bytes:  # torch counts what one kernel reads of it: half, or twice
            allocated = freed = given_bytes[name]
        if storages and name in storages:
            storage, size_bytes = storages[name]
            ends[storage] = max(end, ends.get(storage, 0))
            sizes[storage] = min(size_bytes, sizes.get(storage, 0) + allocated)
            continue
        change[life.start_step] += allocated
        change[end] -= freed
    for whole, parts in joined.items():  # there from the first part on, until nobody reads any
        ends_at = [len(nodes) if p.end_step == -1 else p.end_step + 1 for p in parts]
        whole_bytes = max(p.size_alloc for p in parts)
        change[min(p.start_step for p in parts)] += round(_growth(whole) * whole_bytes)
        change[max(ends_at)] -= round(_growth(whole) * whole_bytes)
    last = {read.name: n for n, node in enumerate(nodes) for read in node.read_writes.reads}
    for name, size_bytes in (passing or {}).items():
        change[0] += size_bytes
        change[last.get(name, 0) + 1] -= size_bytes
    for storage, end in ends.items():
        change[0] += sizes[storage]
        change[end] -= sizes[storage]
    held_then = accumulate(change[:-1])
    return max((a + _scratch(n) for a, n in zip(held_then, nodes, strict=True)), default=0)


def _scratch(node: Any) -> int:
    """What a kernel holds while it runs, if it is the call of a library: measured in Inductor's
    layouts, else as it was planned."""
    if not node.is_extern():
        return 0
    if (measured := scratch_bytes(node.node)) is not None:
        return measured
    planned = [0]
    for number, run in runs_of(node):
        if (compiled := find(number)) is not None:
            plan = compiled.plan
            planned.append(plan.graph.operations[plan.schedule.runs[run]].workspace_bytes)
    return max(planned)


def _growth(name: str) -> float:
    """How many times its size in the first call a tensor may have: Inductor tells the first."""
    found = V.graph.try_get_buffer(name)
    if found is None:
        found = V.graph.graph_inputs.get(name)
    try:
        expression = found.get_numel()  # type: ignore[union-attr]
    except (AttributeError, NotImplementedError):
        return 1.0  # a number, or what holds several tensors
    return growth(expression, V.graph.sizevars.shape_env)


def copied_bytes() -> int:
    """Of parameters and batch, what the forward saves for the backward in another layout: the
    backward knows it by their names."""
    module: Any = V.graph.module
    returned = module.graph.output_node().args[0]
    pairs = zip(returned, V.graph.graph_outputs, strict=True)
    given = [(n, made) for n, made in pairs if isinstance(n, fx.Node) and n.op == "placeholder"]
    sizes = [(node_bytes(n), made) for n, made in given]  # a number has none, and no name
    return sum(size for size, made in sizes if size and made.get_name() not in V.graph.graph_inputs)


def _plan_of(nodes: Sequence[Any]) -> CompiledPlan | None:
    for node in nodes:
        for number, _ in runs_of(node):
            return find(number)
    return None
