"""Findings about the present step and what was there before it: second models, data on the device,
evaluation with gradients, larger batches, several forward passes, and the parts of the peak."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from remat.limits.units import format_bytes
from remat.report.report import fold_layer_numbers
from remat.snapshots.findings import Finding, Kind, Line, Place
from remat.snapshots.model import Frame, Integers
from remat.snapshots.recording import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    RECOMPUTE,
    Recording,
    script_frames,
)

_COPY_FUNCTIONS = {
    "_apply",
    "to",
    "cuda",
    "__deepcopy__",
    "deepcopy",
    "from_pretrained",
    "__init__",
}
_SMALLER_BATCH = "a smaller batch with gradient accumulation"
_CHECKPOINTS = "checkpoints of the model's blocks, or a plan of remat"

FAILED_STEP_REMEDY = (
    "Leave the except block before the next step, del the error and the tensors, and in a notebook "
    "run `import sys; sys.last_value = sys.last_traceback = None`; then gc.collect()"
)
_MIN_PASS_BYTES = 1 << 16
"""The smallest tensors of the script, outside of modules, by which forward passes are counted."""

Mask = NDArray[np.bool_]


def step_findings(recording: Recording) -> list[Finding]:
    """Return all findings of this module, the peak of the step last."""
    candidates = [
        _second_model(recording),
        _resident_data(recording),
        _evaluation(recording),
        _larger_batch(recording),
        _several_forwards(recording),
        _peak(recording),
    ]
    return [finding for finding in candidates if finding is not None]


def live_lines(recording: Recording) -> list[Line]:
    """Return the live bytes at the moment by place and phase, largest first."""
    allocations = recording.memory.allocations
    live, stacks = recording.live, allocations.stacks
    count = len(recording.snapshot.stacks)
    sizes = np.bincount(stacks[live], allocations.sizes[live], count).astype(np.int64)
    counts = np.bincount(stacks[live], minlength=count)
    totals: dict[tuple[Place, str], list[int]] = defaultdict(lambda: [0, 0])
    for stack in np.flatnonzero(counts):
        phase = PHASES[recording.phases[stack]]
        place = recording.places[stack]
        module = fold_layer_numbers(place.module) if place.module else ""
        total = totals[replace(place, module=module), phase]
        total[0] += int(sizes[stack])
        total[1] += int(counts[stack])
    lines = [Line(place, phase, *total) for (place, phase), total in totals.items()]
    return sorted(lines, key=lambda line: -line.size_bytes)


def live_parts(recording: Recording) -> dict[str, int]:
    """Return the live bytes at the moment by what they are for."""
    allocations, live = recording.memory.allocations, recording.live
    phases, sizes = recording.allocation_phases(), recording.memory.allocations.sizes
    setup = live & (allocations.starts < recording.first_step_start())
    state = live & ~setup & (phases == OPTIMIZER) & ~recording.is_transient
    transient = live & ~setup & ~state & recording.is_transient
    workspace = live & ~setup & recording.is_workspace
    older = live & ~setup & ~state & ~transient & ~workspace
    parts = {"before the first step": setup, "optimizer state": state}
    parts["cuBLAS"] = workspace
    parts["earlier backward passes"] = older & (phases == BACKWARD)
    parts["earlier steps"] = older & (phases != BACKWARD)
    for phase in (FORWARD, OTHER, RECOMPUTE, BACKWARD, OPTIMIZER):
        parts[f"this step, {PHASES[phase]}"] = transient & (phases == phase)
    return {name: int(sizes[mask].sum()) for name, mask in parts.items() if sizes[mask].sum()}


# -- before the first step ----------------------------------------------------------------------


def _second_model(recording: Recording) -> Finding | None:
    """Return a set of tensors that has the sizes of another set, both from models."""
    allocations = recording.memory.allocations
    is_model = np.array(
        [
            any(f.function in _COPY_FUNCTIONS for f in s.frames) and recording.phases[i] == OTHER
            for i, s in enumerate(recording.snapshot.stacks)
        ]
    )
    live = recording.live & is_model[allocations.stacks] & (recording.births < recording.step + 1)
    rows: dict[tuple[Frame, ...], list[int]] = defaultdict(list)
    for row in np.flatnonzero(live).tolist():
        rows[script_frames(recording.snapshot.stacks[allocations.stacks[row]])].append(row)
    groups: list[tuple[Counter[int], list[int]]] = []
    for group in sorted(rows.values()):
        counts = Counter(allocations.sizes[group].tolist())
        if len(group) < 4:
            continue
        size_bytes = int(allocations.sizes[group].sum())
        for earlier, earlier_rows in groups:
            shared = sum((earlier & counts).values())
            if shared < 0.9 * len(group) or size_bytes < 0.05 * recording.live_bytes:
                continue
            mask = np.zeros(len(live), dtype=bool)
            mask[group] = True
            first = np.zeros(len(live), dtype=bool)
            first[earlier_rows] = True
            origin = recording.place_of(first)
            return Finding(
                Kind.SECOND_MODEL,
                size_bytes,
                recording.place_of(mask),
                f"{len(group):,} tensors have the sizes of those from {origin}: a second copy of "
                "the model",
                "Keep a copy that is not trained (an EMA, a reference) on the CPU, and delete "
                "models that are no longer used",
                releases_bytes=size_bytes,
            )
        groups.append((counts, group))
    return None


def _resident_data(recording: Recording) -> Finding | None:
    """Return data that the script put on the device before the first step, by one line."""
    allocations = recording.memory.allocations
    is_data = np.array(
        [
            recording.phases[i] == OTHER
            and bool(s.frames)
            and not any(f.function in _COPY_FUNCTIONS for f in s.frames)
            for i, s in enumerate(recording.snapshot.stacks)
        ]
    )
    setup = recording.live & is_data[allocations.stacks]
    setup &= (allocations.starts < recording.first_step_start()) & (allocations.starts >= 0)
    if not recording.has_steps or (len(recording.marks) == 0 and recording.request is None):
        return None
    totals = np.bincount(allocations.stacks[setup], allocations.sizes[setup])
    if not len(totals) or totals.max() < 0.2 * recording.live_bytes:
        return None
    stack = int(totals.argmax())
    mine = setup & (allocations.stacks == stack)
    if mine.sum() < 2:
        return None
    return Finding(
        Kind.RESIDENT_DATA,
        int(totals[stack]),
        recording.places[stack],
        f"{int(mine.sum()):,} tensors that one line put on the device before the first step",
        "Keep data in the CPU's memory, and move each batch to the device when its step starts",
        releases_bytes=int(totals[stack]),
    )


# -- the present step -----------------------------------------------------------------------------


def _call_site(recording: Recording, stack: int) -> Frame | None:
    """Return the line of the script that led to a stack."""
    return recording.places[stack].script


def _evaluation(recording: Recording) -> Finding | None:
    """Return a forward pass that keeps its tensors for a backward that does not come: its line of
    the script has never been followed by a backward."""
    allocations, stacks = recording.memory.allocations, recording.memory.allocations.stacks
    is_forward = recording.allocation_phases() == FORWARD
    mine = recording.is_transient & is_forward
    if not recording.has_backward or not mine.any():
        return None
    starts = allocations.starts
    last = stacks[mine][np.argmax(starts[mine])]
    site = _call_site(recording, int(last))
    rows = np.flatnonzero(is_forward & (starts >= 0))
    rows = rows[np.argsort(starts[rows])]
    before = np.searchsorted(starts[rows], recording._backward_calls) - 1
    trained = {_call_site(recording, int(stacks[row])) for row in rows[before[before >= 0]]}
    if site is None or site in trained:
        return None
    at_site = np.array([place.script == site for place in recording.places])[stacks] & is_forward
    first = recording.troughs[-1] if len(recording.troughs) else -1
    created = at_site & (starts > first) & (starts < recording.moment)
    retained = created & recording.live
    size_bytes = int(allocations.sizes[retained].sum())
    if size_bytes < 0.6 * allocations.sizes[created].sum() or created.sum() < 4:
        return None
    return Finding(
        Kind.EVALUATION,
        size_bytes,
        Place(site, site),
        "No backward follows the forward pass of this line, but it keeps "
        f"{format_bytes(size_bytes)} for one",
        "Evaluate inside `with torch.no_grad():` (or torch.inference_mode())",
        releases_bytes=int(0.8 * size_bytes),
    )


def _larger_batch(recording: Recording) -> Finding | None:
    """Return how much larger the present step's tensors are than those of all earlier steps."""
    allocations = recording.memory.allocations
    phases = recording.allocation_phases()
    is_activation = np.isin(phases, (FORWARD, OTHER))
    mine = (recording.births == recording.step) & is_activation
    mine &= (allocations.starts < recording.moment) & (allocations.starts >= 0)
    earlier = is_activation & (recording.births >= 0) & (recording.births < recording.step)
    if recording.request is None:  # later steps may have the same size
        earlier |= is_activation & (recording.births > recording.step)
    if recording.step < 2 or not mine.any() or not earlier.any():
        return None
    count = len(recording.snapshot.stacks)
    largest = np.zeros((2, count), dtype=np.int64)
    for row, mask in enumerate((mine, earlier)):
        np.maximum.at(largest[row], allocations.stacks[mask], allocations.sizes[mask])
    both = (largest[0] > 1 << 12) & (largest[1] > 0)
    if not both.any():
        return None
    now, before = largest[0][both], largest[1][both]
    share = now[now >= 1.25 * before].sum() / now.sum()
    ratio = float(np.median(np.repeat(now / before, 1)))
    if share < 0.5 or ratio < 1.25:
        return None
    retained = mine & recording.live
    size_bytes = int(allocations.sizes[retained].sum())
    first = np.flatnonzero(mine & both[allocations.stacks])
    first = first[np.argsort(allocations.starts[first])]
    grown = [r for r in first if allocations.sizes[r] >= 1.25 * largest[1][allocations.stacks[r]]]
    place = recording.places[allocations.stacks[grown[0]]]
    return Finding(
        Kind.LARGER_BATCH,
        size_bytes,
        place,
        f"The tensors of this step are {ratio:.1f} times as large as the largest of the "
        f"{recording.step} steps before",
        f"Limit a batch to the size of the earlier ones: 1/{ratio:.1f} of this one (a limit on "
        "tokens per batch, truncation, or a split of this batch)",
        releases_bytes=int(size_bytes * (1 - 1 / ratio)),
    )


def _several_forwards(recording: Recording) -> Finding | None:
    """Return forward passes whose tensors are all live, because no backward ran in between. If
    earlier steps had one pass, the first of them is of a step that failed."""
    allocations, stacks = recording.memory.allocations, recording.memory.allocations.stacks
    phases, births = recording.allocation_phases(), recording.births
    mine = recording.live & ~recording.is_workspace & np.isin(phases, (FORWARD, OTHER))
    mine &= births == recording.step if recording.has_backward else births >= 0
    if not (mine & (phases == FORWARD)).any():
        return None
    if (recording.is_transient & (phases == BACKWARD)).any():
        return None  # the peak is in the backward: what it has freed since is unknown
    counts = np.bincount(stacks[mine], minlength=len(recording.snapshot.stacks))
    sizes = np.bincount(stacks[mine], allocations.sizes[mine], len(counts))
    is_forward = (recording.phases == FORWARD) & (counts > 0)
    is_in_steps = np.zeros(len(counts), dtype=bool)
    is_in_steps[stacks[mine & (allocations.starts >= recording.first_step_start())]] = True
    is_script = (recording.phases == OTHER) & (sizes >= _MIN_PASS_BYTES) & is_in_steps
    passes = int(counts[is_script].max(initial=0))
    if passes < 2 or is_forward.sum() < 2:
        return None
    # The pass that fails lacks some stacks.
    is_repeated = is_forward & (counts >= max(1, passes - 1)) & ((counts >= 2) | (passes == 2))
    if sizes[is_repeated].sum() < 0.9 * sizes[is_forward].sum() or (
        sizes[is_forward & (counts >= 2)].sum() < 0.3 * sizes[is_forward].sum()
    ):
        return None
    size_bytes = int(sizes[is_forward | is_script].sum())
    place = recording.place_of(mine & (phases == FORWARD))
    stack = int(np.argmax(np.where(is_script, counts, 0)))
    before = int(((births == recording.step - 1) & (stacks == stack)).sum())
    if recording.has_backward and recording.step > 0 and before < passes:
        return Finding(
            Kind.FAILED_STEP,
            int(size_bytes * (1 - 1 / passes)),
            Place(place.script, place.script),
            "The tensors of an earlier forward pass, which no backward followed, are still live: "
            "the traceback of an exception, or a variable, keeps them",
            FAILED_STEP_REMEDY,
            releases_bytes=int(size_bytes * (1 - 1 / passes)),
        )
    return Finding(
        Kind.SEVERAL_FORWARDS,
        size_bytes,
        Place(place.script, place.script),
        f"The tensors of {passes} forward passes are live at once: no backward ran in between",
        "Call backward() for each of the losses (divided by their number) instead of once for "
        "their sum; if this is an evaluation, run it inside torch.no_grad()",
        releases_bytes=int(size_bytes * (1 - 1 / passes)),
    )


def _peak(recording: Recording) -> Finding | None:
    """Return the part of the present step that takes the most."""
    allocations = recording.memory.allocations
    phases, sizes = recording.allocation_phases(), allocations.sizes
    mine = recording.is_transient if recording.step or recording.marks.size else recording.live
    request = recording.request
    requested = request.size_bytes if request is not None else 0
    by_phase = np.bincount(phases[mine], sizes[mine], OTHER + 1).astype(np.int64)
    request_phase = int(recording.phases[request.stack]) if request is not None else OTHER
    by_phase[request_phase] += requested
    total = int(by_phase.sum())
    if not total:
        return None
    if request_phase == OPTIMIZER or (
        request is None and by_phase[OPTIMIZER] >= 0.1 * recording.live_bytes
    ):
        return _optimizer_peak(recording, mine, requested)
    if by_phase[RECOMPUTE] > 0.4 * total:
        recomputed = mine & (phases == RECOMPUTE)
        return Finding(
            Kind.RECOMPUTATION,
            int(by_phase[RECOMPUTE]),
            recording.common_place(recomputed),
            "The backward of one checkpoint recomputes a region, and needs all its tensors at once",
            "Checkpoint smaller regions: each block instead of several",
        )
    return _line_peak(recording, mine, total, requested)


def _optimizer_peak(recording: Recording, mine: Mask, requested: int) -> Finding:
    """Return the finding about the optimizer's step, for its state or its temporary tensors."""
    request = recording.request
    stacks = recording.snapshot.stacks
    optimizer_rows = mine & (recording.allocation_phases() == OPTIMIZER)
    is_state = np.array([any(f.function == "_init_group" for f in s.frames) for s in stacks])
    size_bytes = int(recording.memory.allocations.sizes[optimizer_rows].sum()) + requested
    place = (
        recording.place_of(optimizer_rows) if request is None else recording.places[request.stack]
    )
    if request is not None and is_state[request.stack]:
        return Finding(
            Kind.OPTIMIZER_STATE,
            size_bytes,
            place,
            "The first step creates the optimizer's state",
            "Use an optimizer with less state: SGD with momentum has half of Adam's, Adafactor and "
            "8-bit Adam less",
        )
    used = {int(i) for i in np.unique(recording.memory.allocations.stacks[optimizer_rows])}
    used |= {request.stack} if request is not None else set()
    is_foreach = any("_multi_tensor" in f.function for i in used for f in stacks[i].frames)
    temporary = optimizer_rows & ~is_state[recording.memory.allocations.stacks]
    size_bytes = int(recording.memory.allocations.sizes[temporary].sum()) + requested
    return Finding(
        Kind.OPTIMIZER_STEP,
        size_bytes,
        place,
        f"The optimizer's step creates {format_bytes(size_bytes)} of temporary tensors"
        + (", for all parameters at once (foreach)" if is_foreach else ""),
        "Create the optimizer with foreach=False, or fused=True: both need no such tensors"
        if is_foreach
        else "Use an optimizer with fused=True, or one with smaller temporary tensors",
        releases_bytes=size_bytes if is_foreach else 0,
    )


def _line_peak(recording: Recording, mine: Mask, total: int, requested: int) -> Finding:
    """Return the line of code with the most bytes of the step, the failed request included."""
    allocations = recording.memory.allocations
    stacks, request = allocations.stacks, recording.request
    totals: Counter[Place] = Counter()
    by_stack = np.bincount(stacks[mine], allocations.sizes[mine], len(recording.places))
    for stack in np.flatnonzero(by_stack):
        if recording.phases[stack] != BACKWARD:
            totals[recording.places[stack]] += int(by_stack[stack])
    if request is not None and recording.phases[request.stack] != BACKWARD:
        totals[recording.places[request.stack]] += requested
    _add_gradients(recording, mine, totals)
    place, size_bytes = (totals or Counter({Place(): total})).most_common(1)[0]
    is_loss = np.array(
        [
            any(f.function in ("cross_entropy", "log_softmax", "nll_loss") for f in s.frames)
            for s in recording.snapshot.stacks
        ]
    )
    loss_bytes = int(by_stack[is_loss].sum())
    if request is not None and is_loss[request.stack]:
        loss_bytes += requested
    head_bytes = _bytes_of_size(allocations.sizes[mine], loss_bytes)
    if loss_bytes >= 0.15 * total and loss_bytes + head_bytes >= 0.4 * total:
        loss = [i for i in np.flatnonzero(is_loss) if by_stack[i]]
        at = request.stack if request is not None and is_loss[request.stack] else loss[0]
        return Finding(
            Kind.LOSS,
            loss_bytes + head_bytes,
            recording.places[int(at)],
            "The loss and the logits, which it converts and differentiates, are most of the step",
            "Compute the loss in chunks of tokens, each with torch.utils.checkpoint, or with a "
            "fused linear cross entropy",
        )
    if size_bytes >= 0.5 * total and len(totals) > 2:
        return Finding(
            Kind.ONE_LINE,
            size_bytes,
            place,
            f"One line takes {size_bytes / total:.0%} of what the step needs",
            f"Compute this line in pieces, each with torch.utils.checkpoint; or {_SMALLER_BATCH}",
        )
    if place.module:
        place = Place(place.frame, place.script, recording.common_place(mine).module)
    return Finding(
        Kind.STEP,
        total,
        place,
        f"The step itself needs {format_bytes(total)}, the most in this line: "
        f"{format_bytes(size_bytes)}",
        f"{_SMALLER_BATCH.capitalize()}, {_CHECKPOINTS}: pass --model, and remat says what fits",
    )


def _add_gradients(recording: Recording, mine: Mask, totals: Counter[Place]) -> None:
    """Add the bytes of the backward to the line of the forward pass that created the only tensors
    of the same size: their gradients have it, too."""
    allocations, phases = recording.memory.allocations, recording.allocation_phases()
    forward = (phases == FORWARD) & (recording.births == recording.step)
    forward &= (allocations.starts >= 0) & ~recording.is_workspace
    places: dict[int, set[Place]] = defaultdict(set)
    pairs = np.stack((allocations.sizes[forward], allocations.stacks[forward]), axis=1)
    for size, stack in np.unique(pairs, axis=0).tolist():
        places[size].add(recording.places[stack])
    sizes = allocations.sizes[mine & (phases == BACKWARD)].tolist()
    request = recording.request
    if request is not None and recording.phases[request.stack] == BACKWARD:
        sizes.append(request.size_bytes)
    for size in sizes:
        if len(places.get(size, ())) == 1:
            totals[next(iter(places[size]))] += size


def _bytes_of_size(sizes: Integers, loss_bytes: int) -> int:
    """Return the bytes of tensors that are as large as the loss's largest, or half as large."""
    if not loss_bytes or not len(sizes):
        return 0
    largest = int(sizes.max())
    return int(sizes[(sizes == largest) | (2 * sizes == largest)].sum()) - loss_bytes
