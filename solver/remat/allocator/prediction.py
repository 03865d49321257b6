"""What a step on a CUDA device asks torch's allocator for, in order, and what that then takes.

The simulator counts bytes; the allocator counts blocks, and takes segments from the device. So a
plan whose peak is its budget can be allocated a little more (the last mebibyte of a large block is
not split off), and the device must have room for more still (fragments between blocks). `predict`
replays the allocator (`remat.allocator.replay`) over two steps: the first begins with an empty
allocator, the second with the segments that the first left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from remat.allocator.replay import Event, replay
from remat.documents.trace import Trace, trained
from remat.planned import P, Planned
from remat.schedule import Schedule
from remat.simulate import simulate

_STEPS = 2

_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear"),
        *("matmul", "_addmm_activation", "_int_mm", "_scaled_mm"),
    )
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Peaks of a step in bytes, what is there before it included. `requested_bytes` is what the
    tensors need, `allocated_bytes` what `torch.cuda.max_memory_allocated` will say,
    `reserved_bytes` what `max_memory_reserved` will: the room that the device must have. The last
    two with torch's default segments and with `expandable_segments:True`."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    expandable_allocated_bytes: int
    expandable_reserved_bytes: int

    def allocated(self, *, is_expandable: bool) -> int:
        """By the kind of segments."""
        return self.expandable_allocated_bytes if is_expandable else self.allocated_bytes

    def reserved(self, *, is_expandable: bool) -> int:
        """By the kind of segments."""
        return self.expandable_reserved_bytes if is_expandable else self.reserved_bytes

    @classmethod
    def of_plan(cls, plan: Planned) -> Prediction | None:
        """What the plan's stats tell, None where they do not."""
        found = {key: plan.stats.get(name) for key, name in _STATS.items()}
        if all(isinstance(size, int) for size in found.values()):
            return cls(**found)  # type: ignore[arg-type]  # all are int
        return None


_STATS = {f.name: f.name.replace("_bytes", "_peak_bytes") for f in fields(Prediction)}
"""A prediction's fields in `Plan.stats`."""


def is_on_cuda(trace: Trace) -> bool:
    """Whether torch's caching allocator serves the step."""
    return trace.device.partition(":")[0] == "cuda"


def uses_cublas(target: str) -> bool:
    """Whether an operation is a matrix product, for which cuBLAS holds a workspace."""
    return target.rpartition(".")[0] in _PRODUCTS


def predict(trace: Trace, schedule: Schedule) -> Prediction:
    """What two steps of a measured trace take. Raises `GraphError` for a schedule of another."""
    events = list(step_events(trace, schedule))
    blocks, expandable = replay(events), replay(events, is_expandable=True)
    return Prediction(
        blocks.requested_bytes,
        blocks.allocated_bytes,
        blocks.reserved_bytes,
        expandable.allocated_bytes,
        expandable.reserved_bytes,
    )


def with_prediction(plan: P, trace: Trace) -> P:
    """The plan with the prediction in its stats; as it is where it is for no CUDA device."""
    if not is_on_cuda(trace):
        return plan
    found = predict(trace, plan.schedule)
    told: Mapping[str, int] = {name: getattr(found, key) for key, name in _STATS.items()}
    return replace(plan, stats={**plan.stats, **told})


def step_events(trace: Trace, schedule: Schedule, steps: int = _STEPS) -> Iterator[Event]:
    """Allocations and frees of `steps` training steps, in order, the first of them cold.

    Parameters, buffers and inputs come first, and with accumulation their `.grad`. Each run
    allocates its outputs, then its workspace; that is freed first, then what nobody reads any
    more. cuBLAS takes one half of `library_bytes` at the first matrix product of the forward and
    one at that of the backward, which runs in another thread, and keeps them. At the end of a step
    its outputs and gradients are freed (`zero_grad`).
    """
    sizes = trace.storages
    constants = {p.storage: None for p in trace.placeholders if p.kind != "tangent"}
    for storage in constants:
        yield Event(("constant", storage), sizes[storage])
    if trace.accumulating:
        for p in trained(trace):
            yield Event(("grad", p.name), sizes[p.storage])
    graph = trace.graph()
    timeline = simulate(graph, schedule)
    size_of = [sizes[trace.storage_of[value.name]] for value in graph.values]
    made: list[list[int]] = [[] for _ in schedule.runs]
    dead: list[list[int]] = [[] for _ in range(len(schedule) + 1)]
    for number, copy in enumerate(timeline.copies):
        made[copy.start].append(number)
        dead[copy.end].append(number)
    libraries = {False, True} if trace.library_bytes else set[bool]()
    for step in range(steps):
        for run, op in enumerate(schedule.runs):
            node, operation = trace.operations[op], graph.operations[op]
            is_backward = operation.backward
            for number in made[run]:
                yield Event((step, number), size_of[timeline.copies[number].value])
            if node is not None and is_backward in libraries and uses_cublas(node.target):
                libraries.remove(is_backward)
                yield Event(("library", is_backward), trace.library_bytes // 2)
            if operation.workspace_bytes:
                yield Event("workspace", operation.workspace_bytes)
                yield Event("workspace", None)
            for number in dead[run]:
                yield Event((step, number), None)
        for number in dead[-1]:
            yield Event((step, number), None)
