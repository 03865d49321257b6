"""`SavedInputs`: the inputs that a block's plan saves, and how long its backward needs each.

The graph of a block counts its inputs as constant memory, because other code produced them. In the
step, an input to which nothing but this block refers is freed after the backward's last read of
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from remat.documents.arguments import referenced_names
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.schedule import Schedule
from remat.simulate import simulate


@dataclass(frozen=True, slots=True)
class SavedInputs:
    """The inputs that a block saves from its forward for its backward, and the backward's memory.

    `last_reads` maps the index of each saved input, its position among the block's input tensors,
    to the last run of the backward that reads it; runs count from the start of the backward.
    `during_bytes[r]` are live during run `r`, without the block's parameters and inputs.
    """

    last_reads: Mapping[int, int]
    during_bytes: tuple[int, ...]

    @classmethod
    def of(cls, trace: Trace, schedule: Schedule, program: Program) -> SavedInputs:
        """Return the saved inputs of `program`, which is `trace` rewritten by `schedule`."""
        graph = trace.graph()
        assert graph.boundary is not None
        timeline = simulate(graph, schedule)
        first_run = schedule.runs.index(graph.boundary) + 1
        last_read_of_storage: dict[int, int] = {}
        for run, index in enumerate(schedule.runs[first_run:]):
            node = trace.operations[index]
            assert node is not None  # the boundary runs once
            for name in (*referenced_names(node.args), *referenced_names(node.kwargs)):
                last_read_of_storage[trace.storage_of[name]] = run
        saved_storages = {trace.storage_of[name] for name in program.saved}
        until_the_end = len(schedule)  # saved, and read by views alone
        return cls(
            last_reads={
                int(p.target): last_read_of_storage.get(p.storage, until_the_end)
                for p in trace.placeholders
                if p.kind == "input" and p.storage in saved_storages
            },
            during_bytes=tuple(
                size - graph.constant_bytes for size in timeline.during_bytes[first_run:]
            ),
        )

    def backward_bytes(self, sizes_bytes: Mapping[int, int]) -> int:
        """Return the peak of the backward if saved inputs of these sizes, by index, are freed after
        their last reads. Inputs that are not in `sizes_bytes` are counted elsewhere."""
        return max(
            (
                size + sum(s for i, s in sizes_bytes.items() if self.last_reads[i] >= run)
                for run, size in enumerate(self.during_bytes)
            ),
            default=0,
        )
