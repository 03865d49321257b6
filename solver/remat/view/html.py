"""`plan_html`: a plan as one page; `plan_fragment`: what a notebook shows of it.

No scripts and nothing from elsewhere; the page's policy forbids both. It is well-formed XML as well
as HTML, and light or dark as the reader's system is.
"""

from __future__ import annotations

from remat.allocator.prediction import AllocatorPrediction
from remat.documents.program import Program
from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.report.comparison import Compared
from remat.report.describe import describe
from remat.view.code import annotated_code
from remat.view.drawing.text import escape, escape_lines, shorten
from remat.view.frontier import comparison_svg
from remat.view.modules import modules_svg
from remat.view.schedule import schedule_svg
from remat.view.timeline import timeline_svg

_ROWS = 40
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = """
.remat-plan{color-scheme:light dark;color:#1a1a1a;background:#ffffff;max-width:960px;
font:14px/1.5 system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}
.remat-plan h2{font-size:16px;margin:28px 0 8px}
.remat-plan pre{font:12px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-x:auto;
white-space:pre-wrap;background:#f5f5f5;color:inherit;padding:12px;border-radius:4px}
.remat-plan pre.remat-code{white-space:pre}
.remat-plan table{border-collapse:collapse;font-size:13px;width:100%}
.remat-plan th{text-align:left;border-bottom:2px solid #bbbbbb;padding:3px 10px 3px 0}
.remat-plan td{text-align:left;border-bottom:1px solid #dddddd;padding:3px 10px 3px 0;
overflow-wrap:anywhere}
.remat-plan th.n,.remat-plan td.n{text-align:right;white-space:nowrap}
.remat-figures{display:flex;flex-wrap:wrap;gap:10px;margin:12px 0}
.remat-figure{flex:1 1 190px;border:1px solid #dddddd;border-radius:4px;padding:8px 12px}
.remat-figure b{display:block;font-size:21px;line-height:1.3}
.remat-figure span{display:block;color:#555555;font-size:12px}
.remat-plan summary{cursor:pointer;margin:8px 0}
@media screen and (prefers-color-scheme:dark){
.remat-plan{color:#e8e8e8;background:#16181c}
.remat-plan pre{background:#202329}
.remat-plan th{border-color:#565b63}.remat-plan td,.remat-figure{border-color:#33373d}
.remat-figure span{color:#b4b8bf}
}
@media print{.remat-plan{max-width:none}.remat-plan svg,.remat-plan tr{break-inside:avoid}}
""".replace("\n", "")

_PAGE_STYLE = (
    "body{margin:0 auto;padding:24px;max-width:960px;background:#ffffff}"
    "h1{font-size:20px;margin:0 0 4px}"
    "@media screen and (prefers-color-scheme:dark){body{background:#16181c}}"
)


def plan_html(plan: PlanData, program: Program | None = None) -> str:
    """A self-contained page: figures, `describe()`, timeline, schedule, modules, the operations
    recomputed most and, with a `program` (as from `remat.rewrite`), its annotated code."""
    again = sum(plan.schedule.recomputed(plan.graph).values())
    parts = [
        "<h1>Rematerialization plan</h1>",
        _figures(plan),
        f"<pre>{escape_lines(describe(plan))}</pre>",
        timeline_svg(plan),
        schedule_svg(plan),
    ]
    if again:
        parts += [modules_svg(plan), "<h2>Recomputed most</h2>", _table(plan)]
    if program is not None:
        code = f'<pre class="remat-code">{escape_lines(annotated_code(program, plan))}</pre>'
        parts.append(f"<h2>Program</h2><details><summary>code</summary>{code}</details>")
    return page("Rematerialization plan", "".join(parts))


def page(title: str, body: str) -> str:
    """A whole page around a body of markup; `title` is text."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}{_STYLE}</style></head>"
        f'<body><main class="remat-plan">{body}</main></body></html>\n'
    )


def plan_fragment(plan: PlanData) -> str:
    """Figures and timeline, with the table of `describe()` to unfold: for notebooks."""
    return (
        f'<div class="remat-plan"><style>{_STYLE}</style>{_figures(plan)}{timeline_svg(plan)}'
        f"<details><summary>details</summary><pre>{escape_lines(describe(plan))}</pre></details>"
        "</div>"
    )


def comparison_fragment(comparison: Compared) -> str:
    """The frontier, with the table of `describe()` to unfold: for notebooks."""
    table = f"<pre>{escape_lines(comparison.describe())}</pre>"
    return (
        f'<div class="remat-plan"><style>{_STYLE}</style>{comparison_svg(comparison)}'
        f"<details><summary>table</summary>{table}</details></div>"
    )


def _reserved(plan: PlanData) -> str:
    """What torch's allocator makes of the peak on CUDA."""
    found = AllocatorPrediction.of_plan(plan)
    if found is None:
        return ""
    return (
        f"; predicted: {format_bytes(found.allocated_bytes)} allocated, "
        f"{format_bytes(found.reserved_bytes)} reserved"
    )


def _figures(plan: PlanData) -> str:
    """Four figures, each with what it is relative to."""
    again = plan.schedule.recomputed(plan.graph)
    bound, gap = "none", "no bound is proved"
    if plan.lower_bound is not None and plan.gap is not None:
        bound = f"{plan.lower_bound:+.2%}"
        gap = f"lower bound of the extra time; gap {plan.gap:.2%}"
    figures = [
        (
            format_bytes(plan.peak_bytes),
            f"peak, {plan.share:.1%} of {format_bytes(plan.baseline_peak_bytes)}; "
            f"budget {format_bytes(plan.budget_bytes)}{_reserved(plan)}",
        ),
        (
            f"{plan.overhead:+.2%}",
            f"extra time: {format_seconds(plan.time_s)} instead of "
            f"{format_seconds(plan.baseline_time_s)}",
        ),
        (bound, gap),
        (
            f"{sum(again.values()):,}",
            f"recomputations of {len(again):,} of {len(plan.graph):,} operations",
        ),
    ]
    cells = (
        f'<div class="remat-figure"><b>{escape(figure)}</b><span>{escape(words)}</span></div>'
        for figure, words in figures
    )
    return f'<div class="remat-figures">{"".join(cells)}</div>'


def _table(plan: PlanData) -> str:
    """The operations on which recomputation spends the most time."""
    graph = plan.graph
    again = plan.schedule.recomputed(graph)
    order = sorted(again, key=lambda op: (-again[op] * graph.operations[op].cost_s, op))
    head = (
        "<tr><th>operation</th><th>module</th>"
        + "".join(f'<th class="n">{name}</th>' for name in ("runs", "output", "time", "extra time"))
        + "</tr>"
    )
    rows: list[str] = []
    for op in order[:_ROWS]:
        operation = graph.operations[op]
        size = sum(graph.values[v].size_bytes for v in operation.outputs)
        numbers = (
            f"{again[op] + 1:,}",
            format_bytes(size),
            format_seconds(operation.cost_s),
            format_seconds(again[op] * operation.cost_s),
        )
        rows.append(
            f"<tr><td>{escape(shorten(operation.name, 80))}</td>"
            f"<td>{escape(shorten(operation.module, 120))}</td>"
            + "".join(f'<td class="n">{escape(text)}</td>' for text in numbers)
            + "</tr>"
        )
    more = len(order) - _ROWS
    note = f"<p>and {more:,} more operations</p>" if more > 0 else ""
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>{note}"
