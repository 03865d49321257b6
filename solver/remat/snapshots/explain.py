"""`Explanation`: which part of a training step took the memory, why, and what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from textwrap import wrap

import numpy as np

from remat.errors import DocumentError
from remat.limits.units import format_bytes
from remat.report.fit import Fit
from remat.report.report import Described, Fact, Report, Table, facts_of_lines, facts_of_parts
from remat.snapshots.allocator_findings import (
    allocator_findings,
    other_process,
    reserved_memory,
)
from remat.snapshots.error_text import ErrorText
from remat.snapshots.findings import Finding, Kind, Line, Place
from remat.snapshots.growth import growth_findings
from remat.snapshots.model import NEVER, DeviceMemory, Snapshot
from remat.snapshots.recording import PHASES, Recording
from remat.snapshots.step_findings import live_lines, live_parts, step_findings
from remat.view.html import html_page, preformatted_html
from remat.view.picture import Area, LegendEntry, Mark, Panel, Picture, Rule, Scale, Unit, byte_unit
from remat.view.svg import picture_svg
from remat.view.text import plain_text

_MAX_LINES, _MAX_COLUMNS, _TEXT_WIDTH = 8, 400, 88
_PEAK_KINDS = list(Kind)[list(Kind).index(Kind.OPTIMIZER_STEP) :]
_ROLES = {
    "before the first step": "constant",
    "script": "on-host",
    "forward": "activations",
    "backward": "activation-gradients",
    "recomputation": "recomputed",
    "optimizer": "results",
}


@dataclass(frozen=True)
class Explanation(Described):
    """Why a request for memory failed, or what the peak of a recording consists of.

    `requested_bytes` is the request that failed, 0 without one, and `place` where it was made.
    `live_bytes`, `reserved_bytes` and `device_free_bytes` are those of that moment, or of the peak;
    None where the input does not say. `device` is the GPU's number, -1 for the CPU. `findings` are
    the causes, the most probable one first. `parts` are the live bytes by what they are for,
    `lines` by the line of code that allocated them. `steps` is the number of steps that the
    recording shows. `timeline` has the live bytes of each phase over the recording, in columns.
    `fit` is the prediction for the model, if one was passed.
    """

    source: str
    device: int
    requested_bytes: int
    place: Place
    live_bytes: int | None
    reserved_bytes: int | None
    device_free_bytes: int | None
    total_bytes: int | None
    findings: tuple[Finding, ...]
    parts: dict[str, int]
    lines: tuple[Line, ...] = ()
    steps: int = 0
    notes: tuple[str, ...] = ()
    timeline: Mapping[str, tuple[int, ...]] | None = None
    moment: float = 1.0
    fit: Fit | None = None

    @property
    def cause(self) -> Finding | None:
        """The most probable cause; None if nothing was found."""
        return self.findings[0] if self.findings else None

    def report(self) -> Report:
        """Return the request, the causes, the parts of the live memory, and what to do."""
        facts = [Fact("input", self.source), *self._size_facts()]
        if self.cause is not None:
            cause = self.cause
            facts.append(Fact("cause", f"{cause.kind}, {format_bytes(cause.size_bytes)}"))
            facts += _wrapped("", cause.text, *self._place_lines(cause))
            facts += _wrapped("remedy", cause.remedy)
        for finding in self.findings[1:4]:
            size = format_bytes(finding.size_bytes)
            text = f"{finding.kind}, {size}: {finding.text}"
            facts += _wrapped("also", text, *self._place_lines(finding))
        for note in self.notes:
            facts += _wrapped("note", note)
        parts: list[list[Fact] | Table | str] = [facts]
        if self.parts:
            moment = "when the request failed" if self.requested_bytes else "at the peak"
            total = sum(self.parts.values())
            head = Fact("live", f"{format_bytes(total)} {moment}; of this")
            width = max(map(len, self.parts))
            rows = {name.ljust(max(20, width)): size for name, size in self.parts.items()}
            parts.append([head, *facts_of_parts(rows, total)])
        if self.lines:
            parts.append(_lines_table(self.lines))
        if self.fit is not None:
            parts.append("PREDICTION FOR THE MODEL\n" + self.fit.describe())
        return Report(*parts)

    def _size_facts(self) -> list[Fact]:
        facts: list[Fact] = []
        if self.requested_bytes:
            where = f", in {self.place}" if str(self.place) else ""
            facts += _wrapped("request", f"{format_bytes(self.requested_bytes)} failed{where}")
        sizes = {
            "allocated": self.live_bytes,
            "reserved": self.reserved_bytes,
            "free on the device": self.device_free_bytes,
            "in all": self.total_bytes,
        }
        texts = [f"{format_bytes(n)} {name}" for name, n in sizes.items() if n is not None]
        facts.append(Fact("CPU" if self.device < 0 else f"GPU {self.device}", ", ".join(texts)))
        if self.steps:
            facts.append(Fact("steps", f"{self.steps:,} in the recording"))
        if self.fit is not None and self.live_bytes is not None:
            predicted = self.fit.memory.peak_bytes
            other = format_bytes(max(0, self.live_bytes - predicted))
            facts += _wrapped(
                "predicted",
                f"{format_bytes(predicted)} for the model's step with {self.fit.optimizer}; "
                f"{other} of the live memory are not of this step",
            )
        return facts

    def _place_lines(self, finding: Finding) -> list[str]:
        return [f"in {finding.place}"] if str(finding.place) else []

    def with_fit(self, fit: Fit) -> Explanation:
        """Return the explanation with the prediction for the model of the loop."""
        return replace(self, fit=fit)

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self), indent=2)

    def html(self) -> str:
        """Return a self-contained page: the report, and the picture of the memory over time."""
        title = "Why the memory ran out" if self.requested_bytes else "What takes the memory"
        picture = "" if self.timeline is None else picture_svg(self._picture())
        return html_page(title, f"<h1>{title}</h1>{picture}{preformatted_html(self.report())}")

    def _repr_html_(self) -> str:
        return self.html()

    def _picture(self) -> Picture:
        """Return the picture of the live bytes over the recording, by phase."""
        assert self.timeline is not None
        columns = {name: self.timeline[name] for name in _ROLES if any(self.timeline.get(name, ()))}
        count = max(map(len, self.timeline.values()), default=0)
        tops = [0] * count
        areas: list[Area] = []
        for name, sizes in columns.items():
            tops = [a + b for a, b in zip(tops, sizes, strict=True)]
            staircase = [(i / count, (i + 1) / count, float(top)) for i, top in enumerate(tops)]
            areas.append(Area(_ROLES[name], staircase, f"{name}: up to {format_bytes(max(sizes))}"))
        highest = float(max(tops, default=1))
        at = self.moment
        label = "request failed" if self.requested_bytes else "peak"
        items: list[object] = [*areas[::-1], Rule("mark", "x", at, label)]
        items.append(Mark(at, float(self.live_bytes or 0), 3.5, label, "mark"))
        if self.reserved_bytes and self.reserved_bytes < 2 * highest:
            text = f"reserved {format_bytes(self.reserved_bytes)}"
            items.append(Rule("budget", "y", self.reserved_bytes, text))
            highest = max(highest, float(self.reserved_bytes))
        unit = byte_unit(highest)
        return Picture(
            "Live memory over the recording",
            f"{format_bytes(self.live_bytes or 0)} live: {label}",
            x=Scale(0, 1, Unit("% of the events", 0.01), "events of the recording (%)"),
            panels=[Panel(Scale(0, highest * 1.08, unit, f"memory ({unit.name})"), 320, items)],  # type: ignore[arg-type]
            legend=[LegendEntry(name, _ROLES[name]) for name in columns],
            min_left=68.0,
        )


def explain_snapshot(
    snapshot: Snapshot,
    *,
    source: str = "snapshot",
    error: ErrorText | None = None,
    total_bytes: int | None = None,
    device: int | None = None,
) -> Explanation:
    """Return the explanation of a snapshot. `error` is the text of its error, `total_bytes` the
    memory of the device. Explains the device whose request failed last, or else the one with the
    most memory. Raises `DocumentError` for a snapshot without memory."""
    memory = _device(snapshot, device)
    recording = Recording(snapshot, memory)
    reserved = reserved_memory(recording)
    request = recording.request
    if error is not None:
        total_bytes = error.total_bytes or total_bytes
    others = [] if error is None else _other_processes(error)
    findings = [
        *growth_findings(recording),
        *step_findings(recording),
        *allocator_findings(recording, reserved, total_bytes, others[0] if others else None),
    ]
    missing_bytes = 0 if request is None else max(0, request.size_bytes - request.device_free_bytes)
    return Explanation(
        plain_text(source),
        -1 if snapshot.is_cpu else memory.device,
        0 if request is None else request.size_bytes,
        Place() if request is None else recording.places[request.stack],
        recording.live_bytes,
        None if snapshot.is_cpu else reserved.size_bytes,
        None if request is None else request.device_free_bytes,
        total_bytes,
        tuple(sorted(findings, key=lambda f: _rank(f, missing_bytes, recording.live_bytes))),
        live_parts(recording),
        tuple(live_lines(recording)[:_MAX_LINES]),
        len(recording.marks),
        tuple(_notes(snapshot, recording)),
        _timeline(recording),
        recording.moment / max(1, memory.event_count),
    )


def explain_error(error: ErrorText, source: str = "error text") -> Explanation:
    """Return what the text of an error alone says: other processes, fragments, or the peak."""
    allocated, unallocated = error.allocated_bytes, error.unallocated_bytes
    findings = _other_processes(error)
    limit = error.allowed_bytes
    if unallocated and unallocated + (error.free_bytes or 0) >= error.requested_bytes:
        findings.append(
            Finding(
                Kind.FRAGMENTS,
                unallocated,
                Place(),
                f"{format_bytes(unallocated)} are reserved and free, but no range of them has "
                f"{format_bytes(error.requested_bytes)}",
                "Set PYTORCH_ALLOC_CONF=expandable_segments:True, or pad batches to a few lengths",
                releases_bytes=unallocated,
            )
        )
    if error.private_pool_bytes and error.private_pool_bytes >= error.requested_bytes:
        findings.append(
            Finding(
                Kind.OTHER_POOL,
                error.private_pool_bytes,
                Place(),
                f"{format_bytes(error.private_pool_bytes)} are in private pools, such as those of "
                "CUDA graphs",
                "Delete the graphs and pools that are no longer used, or let graphs share a pool",
            )
        )
    if allocated is not None:
        findings.append(
            Finding(
                Kind.STEP,
                allocated,
                Place(),
                f"Tensors take {format_bytes(allocated)}; the text does not say which",
                "Run once more inside `with remat.watch(model):`, which records who allocated what",
            )
        )
    missing_bytes = max(0, error.requested_bytes - (error.free_bytes or 0))
    notes: list[str] = []
    if limit:
        notes = [f"this process may use {format_bytes(limit)} (set_per_process_memory_fraction)"]
    return Explanation(
        plain_text(source),
        error.device,
        error.requested_bytes,
        Place(),
        allocated,
        None if allocated is None else allocated + (unallocated or 0),
        error.free_bytes,
        error.total_bytes,
        tuple(sorted(findings, key=lambda f: _rank(f, missing_bytes, allocated or 0))),
        {},
        notes=tuple(notes),
    )


def _device(snapshot: Snapshot, number: int | None) -> DeviceMemory:
    devices = [d for d in snapshot.devices if number is None or d.device == number]
    if not devices:
        present = ", ".join(str(d.device) for d in snapshot.devices) or "none"
        raise DocumentError(
            f"the snapshot has no memory of {'a GPU' if number is None else f'GPU {number}'} "
            f"(it has: {present}): was it taken before the first tensor was created?"
        )

    def importance(memory: DeviceMemory) -> tuple[int, int]:
        reserved = sum(s.size_bytes for s in memory.segments if s.end == NEVER)
        return len(memory.failed), reserved

    return max(devices, key=importance)


def _rank(finding: Finding, missing_bytes: int, live_bytes: int) -> tuple[int, int, int]:
    """Return the sort key of a finding: leaks first, then what would release enough (memory that
    no step needs before memory that the allocator or the device withholds), then parts of the step,
    then the rest; each by size."""
    if finding.kind.is_leak and finding.size_bytes >= min(missing_bytes, 0.05 * live_bytes):
        return 0, 0, -finding.size_bytes
    enough = missing_bytes if missing_bytes else 0.05 * live_bytes
    if finding.releases_bytes >= max(1, enough):
        order = list(Kind).index(finding.kind)
        group = sum(order >= list(Kind).index(k) for k in (Kind.FRAGMENTS, Kind.OPTIMIZER_STEP))
        return 1, group, -finding.releases_bytes
    return (2 if finding.kind in _PEAK_KINDS else 3), 0, -finding.size_bytes


def _other_processes(error: ErrorText) -> list[Finding]:
    if not error.total_bytes or not error.processes:
        return []
    who = " and ".join(f"process {pid}" for pid, _ in error.processes[:3]).capitalize()
    return other_process(error.other_bytes, error.total_bytes, who)


def _notes(snapshot: Snapshot, recording: Recording) -> list[str]:
    notes: list[str] = []
    memory = recording.memory
    if not memory.event_count:
        notes.append(
            "the snapshot has no events, only the blocks at its end: leaks and peaks cannot be "
            "seen. Call torch.cuda.memory._record_memory_history() before the loop"
        )
    elif memory.is_cut:
        notes.append(
            "the recording is cut: events before its start are missing (max_entries, or recording "
            "began late)"
        )
    if not snapshot.has_frames:
        notes.append("the snapshot has no stacks: record with context='all' to see lines of code")
    if memory.event_count and recording.request is None:
        notes.append("no request failed in the recording: this explains its peak")
    return notes


def _timeline(recording: Recording) -> dict[str, tuple[int, ...]] | None:
    """Return the live bytes of each phase over the recording. A column has those of the event with
    the most live bytes."""
    count = recording.memory.event_count
    if not count:
        return None
    borders = np.linspace(0, count + 1, min(_MAX_COLUMNS, count) + 1).astype(int)
    peaks = [a + int(np.argmax(recording.curve[a:b])) for a, b in pairwise(borders)]
    allocations = recording.memory.allocations
    keys = recording.allocation_phases() + 1
    keys[allocations.starts < recording.first_step_start()] = 0
    changes = np.zeros((len(PHASES) + 1, count + 2), dtype=np.int64)
    np.add.at(changes, (keys, allocations.starts + 1), allocations.sizes)
    ended = allocations.ends != NEVER
    np.subtract.at(changes, (keys[ended], allocations.ends[ended] + 1), allocations.sizes[ended])
    curves = np.cumsum(changes, axis=1)
    names = ("before the first step", *PHASES)
    return {
        name: tuple(curve[peaks].tolist())
        for name, curve in zip(names, curves, strict=True)
        if curve.any()
    }


def _wrapped(label: str, *texts: str) -> list[Fact]:
    """Return facts with the lines of texts, none too long for one screen."""
    lines = [line for text in texts for line in wrap(text, _TEXT_WIDTH)]
    return facts_of_lines(label, lines)


def _lines_table(lines: tuple[Line, ...]) -> Table:
    rows = [("live memory by line", "phase", "bytes", "blocks")]
    for line in lines:
        text = str(line.place) or "(no Python frames)"
        if len(text) > _TEXT_WIDTH - 20:
            text = text[: _TEXT_WIDTH - 23] + "..."
        rows.append((text, line.phase, format_bytes(line.size_bytes), f"{line.count:,}"))
    return Table(rows, "llr")
