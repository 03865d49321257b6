"""Findings about memory of earlier steps: leaks, tensors of a failed step, gradients that stay, and
the state of an old optimizer.

A leak is memory of one stack that grows at the troughs between steps, in nearly every step, that
the whole recording grows with, and that is still live at the end. Memory that grew for fewer than
three steps is not called a leak.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from remat.limits.units import format_bytes
from remat.snapshots.findings import Finding, Kind, Place
from remat.snapshots.model import Integers
from remat.snapshots.recording import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    OTHER,
    RECOMPUTE,
    Recording,
    common_module,
)
from remat.snapshots.step_findings import FAILED_STEP_REMEDY

_MIN_TROUGHS = 4
_MAX_TROUGHS = 32
_MIN_SHARE = 0.01
"""The smallest share of the live bytes that a leak has taken."""
_MIN_BYTES = 1 << 16

Mask = NDArray[np.bool_]


def growth_findings(recording: Recording) -> list[Finding]:
    """Return all findings of this module."""
    leak = _leak(recording)
    candidates = [
        leak,
        None if leak else _failed_step(recording),
        _old_optimizer(recording),
        _gradients_not_freed(recording),
    ]
    return [finding for finding in candidates if finding is not None]


def _leak(recording: Recording) -> Finding | None:
    troughs = recording.troughs[-_MAX_TROUGHS:]
    if len(troughs) < _MIN_TROUGHS or not recording.has_steps:
        return None
    rows = _bytes_by_stack(recording, troughs)
    total = recording.curve[troughs]
    if len(troughs) > _MIN_TROUGHS:  # the first step creates what later ones reuse
        rows, total = rows[1:], total[1:]
    changes = np.diff(rows, axis=0)
    growth = rows[-1] - rows[0]
    end = recording.memory.event_count if recording.request is None else recording.moment
    at_end = _bytes_by_stack(recording, np.array([end]))[0]
    grows = (
        ((changes > 0).mean(axis=0) >= 0.75)
        & (changes.min(axis=0) >= -0.5 * np.maximum(1, changes.max(axis=0)))
        & (growth > 0)
        & (at_end >= 0.9 * rows[-1])
    )
    bytes_per_step = int(growth[grows].sum() / max(1, len(rows) - 1))
    grown_bytes = bytes_per_step * len(recording.troughs)
    is_small = grown_bytes < max(_MIN_BYTES, _MIN_SHARE * recording.live_bytes)
    if is_small or total[-1] - total[0] < 0.5 * growth[grows].sum():
        return None
    allocations = recording.memory.allocations
    older = allocations.live_at(end) & grows[allocations.stacks]
    newer = recording.births >= recording.births[older].max(initial=0)
    older = older & ~newer if (older & ~newer).any() else older
    return _leak_finding(recording, older, grows, bytes_per_step)


def _leak_finding(recording: Recording, older: Mask, grows: Mask, bytes_per_step: int) -> Finding:
    """Return the leak of these stacks; `older` are its allocations of earlier steps."""
    allocations = recording.memory.allocations
    sizes = allocations.sizes
    size_bytes = int(sizes[older].sum())
    phases = recording.allocation_phases()
    by_phase = np.bincount(phases[older], sizes[older], OTHER + 1)
    growing_stacks = np.flatnonzero(grows)
    live_counts = np.bincount(allocations.stacks[older], minlength=len(grows))[growing_stacks]
    place = recording.place_of(older)
    per_step = format_bytes(bytes_per_step)
    if by_phase[BACKWARD] > 0.5 * size_bytes and not _has_saved_tensors(recording, older):
        kind = Kind.KEPT_BY_BACKWARD
        text = f"{per_step} more in each step stay live after backward, and are never freed"
        remedy = (
            "Clear the list that keeps gradients, or keep their norms (.item()); after "
            "backward(create_graph=True), set p.grad = None for all parameters"
        )
    elif len(growing_stacks) <= 2 and live_counts.max(initial=0) <= 2 < len(recording.troughs) - 1:
        kind = Kind.GROWING_BUFFER
        text = f"A buffer grows by {per_step} in each step, to {format_bytes(size_bytes)}"
        remedy = "Limit the buffer's length, and clear it where a new sequence starts"
    elif _has_saved_tensors(recording, older):
        kind = Kind.KEPT_GRAPHS
        place = recording.common_place(older & (phases != BACKWARD))
        text = (
            f"{per_step} more in each step: the graphs of earlier steps keep the tensors that they "
            f"saved for backward, of {len(growing_stacks)} places"
        )
        remedy = (
            "Keep numbers instead of tensors with a graph: loss.item() or loss.detach(); evaluate "
            "inside torch.no_grad(); detach the state that goes into the next step; leave out "
            "retain_graph=True; call backward() for each loss"
        )
    else:
        kind = Kind.KEPT_TENSORS
        text = f"{per_step} more in each step stay live: a list, hook or attribute keeps tensors"
        remedy = (
            "Keep numbers (.item()), or move what you keep to the CPU (.detach().cpu()), or clear "
            "the list once it is used"
        )
    return Finding(kind, size_bytes, place, text, remedy, bytes_per_step, size_bytes)


def _has_saved_tensors(recording: Recording, older: Mask) -> bool:
    """True if a leak is that of graphs: each step leaves several tensors of its forward pass."""
    forward = older & np.isin(recording.allocation_phases(), (FORWARD, RECOMPUTE))
    steps = len(np.unique(recording.births[forward]))
    return int(forward.sum()) >= 1.5 * max(1, steps)


def _failed_step(recording: Recording) -> Finding | None:
    """Return the tensors of one earlier forward pass that outlive those of all other steps, as the
    traceback of an exception keeps them."""
    allocations = recording.memory.allocations
    stacks, births = allocations.stacks, recording.births
    is_forward = np.isin(recording.allocation_phases(), (FORWARD, OTHER))
    old = recording.live & is_forward & (births >= 0) & (births < recording.step - 1)
    if recording.step < 1:
        return None
    stack_count = len(recording.snapshot.stacks)
    freed_counts = np.bincount(stacks[~recording.live & (births >= 0)], minlength=stack_count)
    old_counts = np.bincount(stacks[old], minlength=stack_count)
    old &= (freed_counts >= old_counts)[stacks]
    old_births = births[old]
    if not len(old_births):
        return None
    birth = int(np.bincount(old_births).argmax())
    mine = old & (births == birth)
    size_bytes = int(allocations.sizes[mine].sum())
    is_whole_pass = len(set(stacks[mine].tolist())) >= 3
    is_only_one = size_bytes >= 0.9 * allocations.sizes[old].sum()
    if not is_whole_pass or not is_only_one or size_bytes < 0.05 * recording.live_bytes:
        return None
    is_recent = birth >= recording.step - 1 and recording.request is None
    if is_recent:
        return None
    return Finding(
        Kind.FAILED_STEP,
        size_bytes,
        recording.common_place(mine),
        f"The tensors of one forward pass, step {birth + 1}, are still live, unlike those of all "
        "other steps: the traceback of an exception, or a variable, keeps them",
        FAILED_STEP_REMEDY,
        0,
        size_bytes,
    )


def _old_optimizer(recording: Recording) -> Finding | None:
    """Return the state of an optimizer that a later one replaced: state of the same sizes that was
    created in different steps, more than all parameters can have."""
    allocations = recording.memory.allocations
    state = recording.live & (recording.allocation_phases() == OPTIMIZER)
    state &= recording.births < recording.step
    births = recording.births[state]
    sizes = allocations.sizes[state]
    counts = {int(b): _size_counts(sizes[births == b]) for b in np.unique(births)}
    counts = {b: c for b, c in counts.items() if sum(s * n for s, n in c.items()) >= _MIN_BYTES}
    if len(counts) < 2:
        return None
    first, *later = sorted(counts)
    bytes_of = {b: sum(s * n for s, n in c.items()) for b, c in counts.items()}
    repeated = [b for b in later if counts[b] == counts[first]]
    setup = recording.live & (allocations.starts < recording.first_step_start())
    if not repeated or sum(bytes_of.values()) <= 2.05 * allocations.sizes[setup].sum():
        return None
    size_bytes = bytes_of[first] * len(repeated)
    return Finding(
        Kind.OLD_OPTIMIZER,
        size_bytes,
        recording.place_of(state & (recording.births == repeated[-1])),
        f"The optimizer's state exists {len(repeated) + 1} times: created in step {first + 1}, and "
        f"with the same sizes in step {repeated[0] + 1}",
        "Delete the old optimizer with everything that refers to it (a scheduler, a list), or "
        "change its param_groups instead of creating another one",
        0,
        size_bytes,
    )


def _gradients_not_freed(recording: Recording) -> Finding | None:
    """Return gradients of an early step that are never freed, although the optimizer ran."""
    allocations = recording.memory.allocations
    births, phases = recording.births, recording.allocation_phases()
    gradients = recording.live & (phases == BACKWARD) & (births >= 0) & ~recording.is_workspace
    gradients &= births <= recording.step - 3
    size_bytes = int(allocations.sizes[gradients].sum())
    if size_bytes < 0.04 * recording.live_bytes or len(set(births[gradients].tolist())) > 2:
        return None
    setup = allocations.starts < recording.first_step_start()
    parameter_counts = _size_counts(allocations.sizes[setup & recording.live])
    if not all(size in parameter_counts for size in _size_counts(allocations.sizes[gradients])):
        return None
    last_birth = int(births[gradients].max())
    if not ((phases == OPTIMIZER) & (births > last_birth)).any() and recording.step < 8:
        return None  # perhaps the gradients of several batches are being accumulated
    freed = (phases == BACKWARD) & ~recording.live & (births > last_birth)
    is_partial = bool(np.isin(allocations.sizes[freed], list(parameter_counts)).any()) and (
        size_bytes < 0.9 * sum(s * n for s, n in parameter_counts.items())
    )
    names = [recording.names.get(int(a), "") for a in allocations.addresses[gradients]]
    place = Place(module=common_module([name for name in names if name]))
    if not place.module:
        place = recording.place_of(_parameters_of_gradients(recording, gradients, setup))
    who = "of parameters that no optimizer updates" if is_partial else "of all parameters"
    remedy = (
        "Call requires_grad_(False) on these parameters, so that they get no gradients, or "
        "model.zero_grad() instead of optimizer.zero_grad()"
        if is_partial
        else "Call optimizer.zero_grad(set_to_none=True), the default, before the next forward pass"
    )
    return Finding(
        Kind.GRADIENTS_NOT_FREED,
        size_bytes,
        place,
        f"Gradients {who}, created in step {last_birth + 1}, are never freed",
        remedy,
        0,
        size_bytes,
    )


def _parameters_of_gradients(recording: Recording, gradients: Mask, setup: Mask) -> Mask:
    """Return a mask of allocations of the setup with the sizes of gradients, of the stack that has
    the most similar sizes."""
    allocations = recording.memory.allocations
    wanted = _size_counts(allocations.sizes[gradients])
    best, best_match = setup & np.isin(allocations.sizes, list(wanted)), -1
    for stack in np.unique(allocations.stacks[best]):
        mine = setup & recording.live & (allocations.stacks == stack)
        counts = _size_counts(allocations.sizes[mine])
        match = sum(min(n, wanted.get(size, 0)) * size for size, n in counts.items())
        match -= sum(max(0, n - wanted.get(size, 0)) * size for size, n in counts.items())
        if best_match < match:
            best, best_match = mine, match
    return best


def _size_counts(sizes: Integers) -> dict[int, int]:
    values, counts = np.unique(sizes, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _bytes_by_stack(recording: Recording, events: Integers) -> Integers:
    """Return the live bytes of each stack (columns) at events (rows)."""
    allocations = recording.memory.allocations
    count = len(recording.snapshot.stacks)
    rows = [
        np.bincount(allocations.stacks[live], allocations.sizes[live], count)
        for live in map(allocations.live_at, events)
    ]
    return np.array(rows).astype(np.int64)
