"""`modules_svg`: where in the model the recomputed time goes."""

from __future__ import annotations

from dataclasses import dataclass

from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.report.tables import starred
from remat.view.drawing import svg
from remat.view.drawing.text import plain, shorten

MAX_BARS = 24
TITLE = "Recomputed time by module"
_WIDTH, _TOP, _ROW = 960.0, 64.0, 20.0
_LETTERS = 44
_DEPTH = 8


@dataclass(slots=True)
class Share:
    """What is run again of one module: number of runs, seconds, and bytes made."""

    name: str
    runs: int = 0
    time_s: float = 0.0
    size_bytes: int = 0


def modules_svg(plan: PlanData) -> str:
    """The picture as SVG text: one bar a module, in the order of the model; bars are seconds, or
    runs where recomputation takes no time."""
    found = shares(plan)
    lengths = bars(found)
    names = [shorten(plain(share.name), _LETTERS) for share in found]
    words = [cost(share) for share in found]
    left = svg.MARGIN + svg.CHARACTER_WIDTH * max(map(len, names), default=0) + 10
    room = _WIDTH - svg.MARGIN - left - 8 - svg.CHARACTER_WIDTH * max(map(len, words), default=0)
    scale = room / max(lengths, default=1.0)
    body = svg.heading(TITLE, summary(plan))
    for row, (share, name, length) in enumerate(zip(found, names, lengths, strict=True)):
        y = _TOP + row * _ROW
        tip = f"{share.name}: {words[row]}, {format_bytes(share.size_bytes)} made again"
        body += [
            svg.text(left - 8, y + 14, name, anchor="end", tip=share.name),
            svg.rectangle(left, y + 2, max(length * scale, 1.0), _ROW - 5, "again", tip),
            svg.text(left + length * scale + 8, y + 14, words[row]),
        ]
    height = _TOP + len(found) * _ROW
    if found:
        body.append(svg.line(left, _TOP, left, height, "axis"))
    return svg.document(_WIDTH, height + 12, TITLE, summary(plan), body)


def bars(found: list[Share]) -> list[float]:
    """How long the bar of each module is: seconds, or runs where none takes time."""
    by_time = any(share.time_s > 0 for share in found)
    return [share.time_s if by_time else float(share.runs) for share in found]


def cost(share: Share) -> str:
    """Time and runs, in words."""
    return f"{format_seconds(share.time_s)}, {share.runs:,} run{'s' if share.runs != 1 else ''}"


def shares(plan: PlanData, limit: int = MAX_BARS) -> list[Share]:
    """What is recomputed of each module, in the order of the graph; at most `limit` groups.

    Modules are grouped by the longest paths that give few enough groups: whole, without the
    numbers of layers (`transformer.h.*.mlp`), or cut at some depth. Where no way gives few
    enough, the dearest are listed and the last group is the rest.
    """
    again = plan.schedule.recomputed(plan.graph)
    operations = plan.graph.operations
    paths = {op: operations[op].module for op in again}
    best: dict[int, str] = {}
    for names in _groupings(paths):
        groups = len(set(names.values()))
        if not best or (groups <= limit and groups > len(set(best.values()))):
            best = names
        elif len(set(best.values())) > limit:
            best = min(best, names, key=lambda n: abs(len(set(n.values())) - limit))
    found: dict[str, Share] = {}
    for op in sorted(again):
        share = found.setdefault(best[op], Share(best[op]))
        share.runs += again[op]
        share.time_s += again[op] * operations[op].cost_s
        share.size_bytes += again[op] * sum(
            plan.graph.values[v].size_bytes for v in operations[op].outputs
        )
    if len(found) <= limit:
        return list(found.values())
    dear = sorted(found.values(), key=lambda share: -share.time_s)
    kept = {share.name for share in dear[: limit - 1]}
    rest = Share(f"{len(found) - len(kept)} more")
    for share in dear[limit - 1 :]:
        rest.runs += share.runs
        rest.time_s += share.time_s
        rest.size_bytes += share.size_bytes
    return [share for share in found.values() if share.name in kept] + [rest]


def _groupings(paths: dict[int, str]) -> list[dict[int, str]]:
    """Names of the operations' groups, finest first."""
    whole = {op: path or "(no module)" for op, path in paths.items()}
    folded = {op: starred(path) for op, path in paths.items()}
    found = [whole, folded]
    for depth in range(_DEPTH, 0, -1):
        found += [
            {op: ".".join(path.split(".")[:depth]) for op, path in names.items()}
            for names in (whole, folded)
        ]
    return found


def summary(plan: PlanData) -> str:
    """How much is recomputed in all."""
    again = plan.schedule.recomputed(plan.graph)
    if not again:
        return "nothing is recomputed"
    extra_s = sum(plan.graph.operations[op].cost_s * times for op, times in again.items())
    return (
        f"{format_seconds(extra_s)} in {sum(again.values()):,} runs of {len(again):,} operations, "
        f"{plan.overhead:.2%} of the step without recomputation"
    )
