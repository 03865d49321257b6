"""Pictures, pages and exports of a `Plan`, as text and without torch.

A `picture` is data: `timeline` (memory over time), `schedule` (runs and live outputs), `modules`
(recomputed time by module) and `frontier` (extra time over peak memory) make one each, which `svg`
and `figures` (matplotlib) draw. `html` makes pages, `code` annotated Python code. Exports are in
`chrome` (Chrome trace events), `snapshot` (torch's memory viewer) and `tables` (CSV, Graphviz,
GraphML).
"""

from __future__ import annotations

from remat.view.chrome import chrome_trace
from remat.view.code import annotated_code
from remat.view.html import frontier_html, plan_fragment, plan_html
from remat.view.pictures import (
    frontier_figure,
    frontier_svg,
    modules_figure,
    modules_svg,
    schedule_figure,
    schedule_svg,
    timeline_figure,
    timeline_svg,
)
from remat.view.snapshot import memory_snapshot, save_snapshot
from remat.view.tables import graph_dot, graph_graphml, operations_csv

__all__ = [
    "annotated_code",
    "chrome_trace",
    "frontier_figure",
    "frontier_html",
    "frontier_svg",
    "graph_dot",
    "graph_graphml",
    "memory_snapshot",
    "modules_figure",
    "modules_svg",
    "operations_csv",
    "plan_fragment",
    "plan_html",
    "save_snapshot",
    "schedule_figure",
    "schedule_svg",
    "timeline_figure",
    "timeline_svg",
]
