"""Benchmark of the CPU seconds to build the MILP over slots, and to pass it to HiGHS.

    python -m benchmarks.models.traced --models resnet152 --cache traces
    python -m benchmarks.building traces/resnet152.trace.json

The budget is half of the peak without recomputation. Needs no torch.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import highspy

from remat.documents.trace import Trace
from remat.graph import Graph
from remat.heuristics import local_search
from remat.milp.backends import start_values
from remat.milp.model import MilpModel
from remat.milp.slots import Slots
from remat.milp.solvers.highs import load_program
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.strategies import Auto


def load_problem(path: Path) -> tuple[Graph, Slots, int, Schedule]:
    """Return a trace's graph, the slots of `Auto`, a budget, and a schedule within the budget."""
    graph = Trace.load(path).graph()
    budget_bytes = peak_and_time(graph, Schedule.keep_all(graph))[0] // 2
    candidates = local_search.schedules_within_budget(graph, budget_bytes, max_runs=1)
    incumbent = candidates[0].schedule
    return graph, Auto()._build_slots(graph, [incumbent], math.inf, 1), budget_bytes, incumbent


def quiet_highs() -> highspy.Highs:
    """Return a HiGHS solver that prints nothing."""
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    return highs


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line with the median times of each trace."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.building", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(argv)
    print(f"CPU seconds, medians of {options.repeat}")
    for path in options.traces:
        graph, slots, budget_bytes, incumbent = load_problem(path)
        model = MilpModel(graph, slots, budget_bytes)
        times: dict[str, list[float]] = {"build": [], "pass": [], "start": []}
        for _ in range(options.repeat):
            gc.collect()
            clock = [time.process_time()]
            model = MilpModel(graph, slots, budget_bytes)
            clock.append(time.process_time())
            load_program(quiet_highs(), model.arrays)
            clock.append(time.process_time())
            start_values(model, incumbent)
            clock.append(time.process_time())
            for name, before, after in zip(times, clock, clock[1:], strict=False):
                times[name].append(after - before)
        medians = ", ".join(f"{name} {statistics.median(s):.2f}" for name, s in times.items())
        print(
            f"{path.name}: {len(graph):,} operations, {len(model.program.rows):,} rows, "
            f"{len(model.program.columns):,} columns, {len(model.arrays.indices):,} entries: "
            f"{medians}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
