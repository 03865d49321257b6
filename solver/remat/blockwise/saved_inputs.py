"""`SavedInputs`: the inputs that a block's plan saves, and how long its backward needs each.

The graph of a block counts its inputs as constant memory, because other code produced them. In the
step, an input to which nothing but this block refers is freed after the backward's last read of
it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.rewrite import tensor_of_variable
from remat.schedule import Schedule
from remat.simulate import simulate

NEVER_FREED = sys.maxsize
"""The last read of an input that the backward holds to its end."""


@dataclass(frozen=True, slots=True)
class HeldInput:
    """An input that the block holds until run `last_read` of its backward."""

    size_bytes: int
    last_read: int


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
            for name in node.operand_names:
                last_read_of_storage[trace.storage_of[name]] = run
        tensors = (tensor_of_variable(name, trace.storage_of) for name in program.saved)
        saved_storages = {trace.storage_of[name] for name in tensors}
        return cls(
            last_reads={
                int(p.target): last_read_of_storage.get(p.storage, NEVER_FREED)
                for p in trace.placeholders
                if p.kind == "input" and p.storage in saved_storages
            },
            during_bytes=tuple(
                size - graph.constant_bytes for size in timeline.during_bytes[first_run:]
            ),
        )

    def backward_bytes(self, inputs: Sequence[HeldInput]) -> int:
        """Return the peak of the backward with these inputs, each until its last read."""
        return max(
            (
                size_bytes + sum(i.size_bytes for i in inputs if i.last_read >= run)
                for run, size_bytes in enumerate(self.during_bytes)
            ),
            default=0,
        )
