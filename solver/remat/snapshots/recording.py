"""A recording with what all findings need: live bytes over time, its steps, and the phase and the
place of each stack."""

from __future__ import annotations

import re
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from remat.snapshots.findings import Place
from remat.snapshots.model import (
    NEVER,
    DeviceMemory,
    FailedRequest,
    Frame,
    Integers,
    Snapshot,
    Stack,
)

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER = range(5)
PHASES = ("forward", "backward", "recomputation", "optimizer", "script")

_LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib/python\d|^<(frozen|string|eval_with_key|built)|^$|^\?\?"
    r"|\.(c|cc|cpp|cu|cuh|h|hpp|so)(\.[\d.]+)?$|/remat/frontend/api/watch\.py$"
)
_OPTIMIZER_FILE = re.compile(r"torch/optim/|/optim(izer)?s?/|bitsandbytes/optim|optimizer\.py$")
_WORKSPACE_BYTES = (32 << 20, 8_519_680)
"""cuBLAS's workspace on Hopper and later, and on earlier GPUs (`CUDABlas.cpp` of torch)."""
_MIN_STEPS = 4
"""The smallest number of steps from which growth is inferred."""


class Recording:
    """The memory of a device up to `moment`, the event that is explained: the last request that
    failed, or else the peak."""

    def __init__(self, snapshot: Snapshot, memory: DeviceMemory) -> None:
        self.snapshot, self.memory, self.names = snapshot, memory, snapshot.names
        self.request: FailedRequest | None = memory.failed[-1] if memory.failed else None
        peak = int(np.argmax(self.curve)) if len(self.curve) else 0
        self.moment = peak if self.request is None else self.request.event

    @cached_property
    def curve(self) -> Integers:
        """Live bytes just before each event, and after the last one."""
        return self._curve(np.ones(len(self.memory.allocations.sizes), dtype=bool))

    def _curve(self, rows: NDArray[np.bool_]) -> Integers:
        """Return the live bytes of some allocations just before each event, and after the last."""
        allocations = self.memory.allocations
        changes = np.zeros(self.memory.event_count + 2, dtype=np.int64)
        np.add.at(changes, allocations.starts[rows] + 1, allocations.sizes[rows])
        ended = rows & (allocations.ends != NEVER)
        np.subtract.at(changes, allocations.ends[ended] + 1, allocations.sizes[ended])
        return np.cumsum(changes)[: self.memory.event_count + 1]

    @cached_property
    def live(self) -> NDArray[np.bool_]:
        """A mask of the allocations that are live at the moment."""
        return self.memory.allocations.live_at(self.moment)

    @property
    def live_bytes(self) -> int:
        return int(self.memory.allocations.sizes[self.live].sum())

    # -- stacks -----------------------------------------------------------------------------

    @cached_property
    def phases(self) -> Integers:
        """The phase of each stack."""
        return np.array([_phase(s, self.snapshot) for s in self.snapshot.stacks], dtype=np.int64)

    @cached_property
    def places(self) -> list[Place]:
        """The place of each stack."""
        return [_place(stack) for stack in self.snapshot.stacks]

    def allocation_phases(self) -> Integers:
        """Return the phase of each allocation."""
        return self.phases[self.memory.allocations.stacks]

    def place_of(self, rows: NDArray[np.bool_]) -> Place:
        """Return the place that allocated the most bytes of these allocations."""
        allocations = self.memory.allocations
        totals = np.bincount(
            allocations.stacks[rows], allocations.sizes[rows], len(self.snapshot.stacks)
        )
        place = self.places[int(np.argmax(totals))]
        if place.module or place.frame:
            return place
        names = [self.names.get(int(a), "") for a in allocations.addresses[rows]]
        module = common_module([name for name in names if name])
        # The backward has no frames on a GPU: its call has.
        first = allocations.starts[rows].max(initial=-1)
        calls = self._backward_rows[allocations.starts[self._backward_rows] < first]
        if not len(calls):
            return Place(module=module)
        script = self.places[allocations.stacks[calls[-1]]].script
        return Place(script, script, module)

    def common_place(self, rows: NDArray[np.bool_]) -> Place:
        """Return the innermost frame of user code, and the module, that most bytes of these
        allocations share."""
        allocations = self.memory.allocations
        sizes = np.bincount(allocations.stacks[rows], allocations.sizes[rows])
        order = [int(s) for s in np.argsort(-sizes) if sizes[s]]
        covered = np.cumsum(sizes[order])
        most = [
            s for s, end in zip(order, covered, strict=True) if end - sizes[s] < 0.8 * covered[-1]
        ]
        stacks = [self.snapshot.stacks[s] for s in most]
        frame = None
        for column in zip(*(user_frames(s)[::-1] for s in stacks if s.frames), strict=False):
            if len(set(column)) > 1:
                break
            frame = column[0]
        module = common_module([stack.module for stack in stacks if stack.module])
        return Place(frame, self.place_of(rows).script, module)

    # -- steps ------------------------------------------------------------------------------

    @cached_property
    def has_backward(self) -> bool:
        """True if the steps end with calls of `backward`."""
        return len(self._backward_calls) > 0

    @property
    def has_steps(self) -> bool:
        """False if the stacks show that no module runs: the script is still loading data."""
        return not self.snapshot.has_frames or self.first_step_start() < self.memory.event_count

    @cached_property
    def _backward_calls(self) -> Integers:
        """Events at which a call of `backward` starts."""
        return self.memory.allocations.starts[self._backward_rows]

    @cached_property
    def _backward_rows(self) -> Integers:
        """The gradients of losses, which torch creates where `backward` starts, in order."""
        is_start = [
            any(f.function == "_make_grads" for f in stack.frames) for stack in self.snapshot.stacks
        ]
        allocations = self.memory.allocations
        rows = np.flatnonzero(np.array(is_start)[allocations.stacks] & (allocations.starts >= 0))
        return rows[np.argsort(allocations.starts[rows])]

    @cached_property
    def marks(self) -> Integers:
        """An event of each step, at the same place of the step: the call of
        `backward`, the optimizer's step, or else an allocation that occurs once a step."""
        marks = self._backward_calls
        stacks = self.memory.allocations.stacks[self._backward_rows]
        counts = np.bincount(stacks) if len(stacks) else np.zeros(1, dtype=np.int64)
        if (counts >= _MIN_STEPS).any():  # of several calls a step, one counts
            fewest = int(np.argmin(np.where(counts >= _MIN_STEPS, counts, len(stacks) + 1)))
            marks = marks[stacks == fewest]
        if len(marks) < _MIN_STEPS:
            optimizer = np.sort(
                self.memory.allocations.starts[self.allocation_phases() == OPTIMIZER]
            )
            others = np.sort(self.memory.allocations.starts[self.allocation_phases() == FORWARD])
            later = np.searchsorted(others, optimizer)
            first = np.flatnonzero(np.diff(later, prepend=-1))
            marks = optimizer[first] if len(first) > len(marks) else marks
        if len(marks) < _MIN_STEPS:
            repeated = self._repeated_allocation()
            marks = repeated if len(repeated) > len(marks) else marks
        end = self.memory.event_count if self.request is None else self.moment
        return marks[(marks >= 0) & (marks < end)]

    def _repeated_allocation(self) -> Integers:
        """Return the starts of the allocations of one stack and size, or of one stack, that occur
        the fewest times, at even distances, in most of the recording. Empty if there are none."""
        allocations = self.memory.allocations
        recorded = allocations.starts >= 0
        starts, stacks = allocations.starts[recorded], allocations.stacks[recorded]
        sizes = allocations.sizes[recorded]
        keys = stacks if self.snapshot.has_frames else sizes
        order = np.lexsort((starts, keys))
        borders = np.flatnonzero(np.diff(keys[order])) + 1
        best = np.zeros(0, dtype=np.int64)
        for group in np.split(starts[order], borders):
            if len(group) < _MIN_STEPS or (len(best) and len(group) >= len(best)):
                continue
            distances = np.diff(group)
            if group[-1] - group[0] < 0.5 * len(self.curve) or distances.min() < 4:
                continue
            if distances.std() <= 0.5 * distances.mean():
                best = group
        return best

    @cached_property
    def troughs(self) -> Integers:
        """The event between each two marks at which the fewest bytes are live that are freed at
        some time: not parameters, state, and what leaks."""
        marks = self.marks
        is_freed = self.memory.allocations.ends != NEVER
        if self.request is not None:
            is_freed &= ~self.live
        curve = self._curve(is_freed)
        return np.array(
            [
                start + 1 + int(np.argmin(curve[start + 1 : end + 1]))
                for start, end in pairwise(marks)
            ],
            dtype=np.int64,
        )

    @cached_property
    def births(self) -> Integers:
        """The number of troughs before each allocation, -1 for one from before the recording. The
        first step is number 0."""
        starts = self.memory.allocations.starts
        return np.where(starts < 0, -1, np.searchsorted(self.troughs, starts, side="right"))

    @property
    def step(self) -> int:
        """The number of the step at the moment."""
        return int(np.searchsorted(self.troughs, self.moment, side="right"))

    @cached_property
    def is_transient(self) -> NDArray[np.bool_]:
        """A mask of the live allocations that belong to the present step, from its trough on."""
        return self.live & (self.births == self.step) & (self.births >= 0) & ~self.is_workspace

    @cached_property
    def is_workspace(self) -> NDArray[np.bool_]:
        """A mask of the workspaces that cuBLAS keeps from the first step on, one a thread."""
        allocations, phases = self.memory.allocations, self.allocation_phases()
        mask = np.isin(allocations.sizes, _WORKSPACE_BYTES) & np.isin(phases, (FORWARD, BACKWARD))
        mask &= (allocations.ends == NEVER) & (self.births <= 0)
        for phase in (FORWARD, BACKWARD):
            if (mask & (phases == phase)).sum() > 1:
                mask &= phases != phase
        return mask

    def first_step_start(self) -> int:
        """Return the event of the first allocation of a forward pass; the number of events if there
        is none."""
        starts = self.memory.allocations.starts[self.allocation_phases() == FORWARD]
        starts = starts[starts >= 0]
        return int(starts.min()) if len(starts) else self.memory.event_count


def _phase(stack: Stack, snapshot: Snapshot) -> int:
    """Return the phase in which a stack allocates. Autograd's thread of a GPU has no frames."""
    if not stack.frames:
        if stack.module:
            return FORWARD
        return BACKWARD if snapshot.has_frames else OTHER
    is_backward = is_forward = False
    for frame in stack.frames:
        if _OPTIMIZER_FILE.search(frame.file):
            return OPTIMIZER
        if frame.file.endswith("torch/utils/checkpoint.py") and (
            frame.function in ("recompute_fn", "unpack_hook", "backward")
        ):
            return RECOMPUTE
        if frame.function == "_engine_run_backward" or "torch::autograd::Engine" in frame.function:
            is_backward = True
        is_forward |= frame.function in ("forward", "_call_impl")
    if is_backward or frame_is_of_backward(stack):
        return BACKWARD
    return FORWARD if is_forward else OTHER


def frame_is_of_backward(stack: Stack) -> bool:
    """True if the innermost frames are those of `backward`, or of a backward function."""
    return any(
        f.function in ("_make_grads", "apply") and "autograd" in f.file for f in stack.frames
    )


def _place(stack: Stack) -> Place:
    """Return the place of a stack."""
    frames = [(frame, _LIBRARY.search(frame.file) is None) for frame in stack.frames]
    user = [frame for frame, is_user in frames if is_user]
    if not user:
        code = [f for f in stack.frames if f.file.endswith(".py")]
        other = [f for f in code if "/torch/" not in f.file] or code
        return Place(other[0] if other else None, None, stack.module)
    # The script is the user's code up to the first call of a library: a module, an optimizer.
    script = user[-1]
    is_started = False
    for frame, is_user in reversed(frames):
        if is_user:
            script, is_started = frame, True
        elif is_started:
            break
    return Place(user[0], script, stack.module)


def script_frames(stack: Stack) -> tuple[Frame, ...]:
    """Return the frames of the script, outermost first, up to the first call of a library or of a
    constructor."""
    frames: list[Frame] = []
    for frame in reversed(stack.frames):
        is_library = _LIBRARY.search(frame.file) is not None
        if frames and (is_library or frame.function == "__init__"):
            break
        if not is_library:
            frames.append(frame)
    return tuple(frames)


def user_frames(stack: Stack) -> tuple[Frame, ...]:
    """Return the frames of user code, innermost first."""
    return tuple(frame for frame in stack.frames if not _LIBRARY.search(frame.file))


def common_module(names: list[str]) -> str:
    """Return the module that has all of these parameters or modules; "" if they share none."""
    if not names:
        return ""
    parts = [name.split(".") for name in names]
    common: list[str] = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return ".".join(common)
