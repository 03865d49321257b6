"""Section `peers`: the models that Rockmate was measured on, run at the same peaks."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path

from benchmarks.harness.report import Row
from benchmarks.solver import jobs
from benchmarks.solver.record import ResultRecord, all_met, format_decimal, format_percent

_ROCKMATE = {
    "gpt": [(0.75, 1.018), (0.58, 1.083), (0.48, 1.119), (0.40, 1.145), (0.31, 1.167),
            (0.26, 1.272)],
    "resnet": [(0.77, 1.048), (0.58, 1.094), (0.53, 1.127), (0.40, 1.199), (0.40, 1.324)],
}  # fmt: skip
"""Rockmate's peaks and FLOPs, both relative to eager's."""

_PROTOTYPE = {
    "gpt": [(156, 1.000), (120, 1.018), (100, 1.062), (82, 1.101), (64, 1.141), (54, 1.163),
            (45, 1.198)],
    "resnet": [(124, 1.000), (94, 1.001), (85, 1.014), (65, 1.070)],
}  # fmt: skip
"""Simulated peaks in MiB and FLOPs relative to eager's of an earlier prototype, FLOPs as costs."""

_COLUMNS = (
    ("model", -6), ("method", -20), ("costs", -8), ("asked", 7), ("peak MiB", 8),
    ("peak/eager", 10), ("FLOPs/eager", 11), ("Rockmate", 8), ("prototype", 9), ("gap", 6),
    ("set-up s", 8), ("met", 3), ("note", -40),
)  # fmt: skip


def run_peers(record: ResultRecord, options: Namespace) -> None:
    """Run both models at each target peak, eager mode first."""
    record.begin_section("peers", "the peers' models, run and metered", _COLUMNS)
    for model in options.peer_models:
        targets: list[Row] = [
            {"peak_ratio": ratio, "rockmate_flops": flops} for ratio, flops in _ROCKMATE[model]
        ]
        targets += [
            {"peak_bytes": format_mib << 20, "prototype_flops": flops}
            for format_mib, flops in _PROTOTYPE[model]
        ]
        with tempfile.TemporaryDirectory() as scratch:
            cache = str(Path(scratch) / "costs.sqlite")
            record.print_progress(f"peers {model} eager")
            eager = _run(record, model, None, None, cache, options)
            for target in targets if eager else []:
                record.print_progress(f"peers {model} {target}")
                _run(record, model, eager, target, cache, options)


def _run(
    record: ResultRecord,
    model: str,
    eager: Row | None,
    target: Row | None,
    cache: str,
    options: Namespace,
) -> Row | None:
    """Run one worker process, store its rows, and return the first of them."""
    limit_s = min(options.time_limit, 60.0)
    job = {
        "model": model,
        "eager": eager,
        "targets": [target] if target else [],
        "costs": options.peer_costs,
        "cache": cache,
        "threads": options.threads,
        "gap": 0.003,
        "time_limit": limit_s,
    }
    answer = jobs.run_worker("peer_worker", job, 2 * limit_s * len(options.peer_costs))
    if "rows" not in answer:
        record.add_row("peers", answer | {"graph": model}, [model, *[None] * 11, answer["failure"]])
        return None
    for row in answer["rows"]:
        _add(record, model, row)
    return answer["rows"][0]


def _add(record: ResultRecord, model: str, row: Row) -> None:
    """Set `met` of a row, store the row, and print it."""
    rockmate, prototype = row.get("rockmate_flops"), row.get("prototype_flops")
    target = rockmate or prototype
    if target is not None:
        ratio = row.get("flops_to_eager")
        row["met"] = all_met(ratio is not None and round(ratio, 3) <= target)
    cells = (
        model, row["method"], row.get("costs"), format_decimal(_mib(row.get("asked_bytes"))),
        format_decimal(_mib(row.get("peak_bytes"))), format_decimal(row.get("peak_to_eager"), 3),
        format_decimal(row.get("flops_to_eager"), 3), format_decimal(rockmate, 3),
        format_decimal(prototype, 3),
        format_percent(row.get("gap")), format_decimal(row.get("setup_s")), row.get("met"),
        row.get("failure", ""),
    )  # fmt: skip
    record.add_row("peers", row | {"graph": model}, cells)


def _mib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / 2**20
