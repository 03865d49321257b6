"""HTML pages of plans and frontiers, and the fragments that notebooks display.

Pages have no scripts and load nothing; their content security policy forbids both. They are
well-formed XML as well as HTML, and follow the reader's light or dark colour scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remat.documents.program import Program
from remat.limits.units import format_bytes, format_seconds
from remat.passes.offload.copies import count_without_offload_copies
from remat.plan_data import PlanData
from remat.report.comparison import ComparisonData, ComparisonRow
from remat.report.plan_report import candidates_table, plan_report
from remat.report.report import Report
from remat.view.code import annotated_code
from remat.view.frontier import TITLE as FRONTIER_TITLE
from remat.view.pictures import (
    comparison_svg,
    frontier_svg,
    modules_svg,
    schedule_svg,
    timeline_svg,
)
from remat.view.text import escape_markup, escape_markup_lines, shorten_name

_MAX_ROWS = 40
_CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

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
    """Return a self-contained page about a plan: its figures, `describe()`, the pictures of its
    timeline and schedule, and its candidates if there are any. If it recomputes, the page has the
    picture of its modules and the operations that are recomputed most; with a `program` (as from
    `remat.rewrite`), its annotated code."""
    parts = [
        "<h1>Rematerialization plan</h1>",
        _key_numbers_html(plan),
        preformatted_html(plan_report(plan)),
        timeline_svg(plan),
        schedule_svg(plan),
    ]
    if table := candidates_table(plan):
        parts += ["<h2>Candidates</h2>", preformatted_html(Report(table))]
    if plan.schedule.recomputed(plan.graph):
        parts += [modules_svg(plan), "<h2>Recomputed most</h2>", _recomputed_table_html(plan)]
    if program is not None:
        code = preformatted_html(annotated_code(program, plan), "remat-code")
        parts.append(f"<h2>Program</h2><details><summary>code</summary>{code}</details>")
    return html_page("Rematerialization plan", "".join(parts))


def frontier_html(
    plans: Sequence[PlanData],
    rows: Iterable[ComparisonRow] = (),
    *,
    text: str,
    device: str | None = None,
) -> str:
    """Return a self-contained page about a frontier or a comparison of strategies: the picture of
    `frontier_svg` for the same arguments, and preformatted `text`."""
    parts = [
        f"<h1>{FRONTIER_TITLE}</h1>",
        frontier_svg(plans, rows, device=device),
        preformatted_html(text, "remat-code"),
    ]
    return html_page(FRONTIER_TITLE, "".join(parts))


def html_page(title: str, body: str) -> str:
    """Return a complete HTML page. `title` is plain text, `body` is markup."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{escape_markup(_CONTENT_POLICY)}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape_markup(title)}</title><style>{_PAGE_STYLE}{_STYLE}</style></head>"
        f'<body><main class="remat-plan">{body}</main></body></html>\n'
    )


def plan_fragment(plan: PlanData) -> str:
    """Return what a notebook displays of a plan: its figures, the timeline, and `describe()` in a
    collapsed section."""
    return (
        f'<div class="remat-plan"><style>{_STYLE}</style>{_key_numbers_html(plan)}'
        f"{timeline_svg(plan)}"
        f"<details><summary>details</summary>{preformatted_html(plan_report(plan))}</details></div>"
    )


def comparison_fragment(comparison: ComparisonData) -> str:
    """Return what a notebook displays of a comparison: the picture of its frontier, and its table
    in a collapsed section."""
    table = preformatted_html(comparison.report())
    return (
        f'<div class="remat-plan"><style>{_STYLE}</style>{comparison_svg(comparison)}'
        f"<details><summary>table</summary>{table}</details></div>"
    )


def preformatted_html(text: object, css_class: str | None = None) -> str:
    """Return a report or other text as preformatted HTML."""
    attribute = "" if css_class is None else f' class="{css_class}"'
    return f"<pre{attribute}>{escape_markup_lines(str(text))}</pre>"


def _allocator_caption(plan: PlanData) -> str:
    """Return the peak that is predicted for torch's CUDA allocator, as text; "" if there is no
    prediction."""
    prediction = plan.allocator
    if prediction is None:
        return ""
    return (
        f"; predicted: {format_bytes(prediction.allocated_peak_bytes)} allocated, "
        f"{format_bytes(prediction.reserved_peak_bytes)} reserved"
    )


def _key_numbers_html(plan: PlanData) -> str:
    """Return four boxes with the peak, extra time, lower bound and recomputations of a plan."""
    recomputed = plan.schedule.recomputed(plan.graph)
    operation_count = count_without_offload_copies(plan.graph)
    bound, gap = "none", "no bound is proved"
    if plan.lower_bound is not None and plan.gap is not None:
        bound = f"{plan.lower_bound:+.2%}"
        gap = f"lower bound of the extra time; gap {plan.gap:.2%}"
    figures = [
        (
            format_bytes(plan.peak_bytes),
            f"peak, {plan.share:.1%} of {format_bytes(plan.baseline_peak_bytes)}; "
            f"budget {format_bytes(plan.budget_bytes)}{_allocator_caption(plan)}",
        ),
        (
            f"{plan.overhead:+.2%}",
            f"extra time: {format_seconds(plan.time_s)} instead of "
            f"{format_seconds(plan.baseline_time_s)}",
        ),
        (bound, gap),
        (
            f"{sum(recomputed.values()):,}",
            f"recomputations of {len(recomputed):,} of {operation_count:,} operations",
        ),
    ]
    boxes = (
        f'<div class="remat-figure"><b>{escape_markup(figure)}</b>'
        f"<span>{escape_markup(caption)}</span></div>"
        for figure, caption in figures
    )
    return f'<div class="remat-figures">{"".join(boxes)}</div>'


def _recomputed_table_html(plan: PlanData) -> str:
    """Return a table of the operations whose recomputation takes the most time, up to 40, with the
    number of the others."""
    graph = plan.graph
    counts = plan.schedule.recomputed(graph)
    order = sorted(counts, key=lambda op: (-counts[op] * graph.operations[op].cost_s, op))
    head = (
        "<tr><th>operation</th><th>module</th>"
        + "".join(f'<th class="n">{name}</th>' for name in ("runs", "output", "time", "extra time"))
        + "</tr>"
    )
    rows: list[str] = []
    for op in order[:_MAX_ROWS]:
        operation = graph.operations[op]
        size = sum(graph.values[v].size_bytes for v in operation.outputs)
        numbers = (
            f"{counts[op] + 1:,}",
            format_bytes(size),
            format_seconds(operation.cost_s),
            format_seconds(counts[op] * operation.cost_s),
        )
        rows.append(
            f"<tr><td>{escape_markup(shorten_name(operation.name, 80))}</td>"
            f"<td>{escape_markup(shorten_name(operation.module, 120))}</td>"
            + "".join(f'<td class="n">{escape_markup(text)}</td>' for text in numbers)
            + "</tr>"
        )
    others = len(order) - _MAX_ROWS
    note = f"<p>and {others:,} more operations</p>" if others > 0 else ""
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>{note}"
