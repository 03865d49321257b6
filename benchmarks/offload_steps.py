"""Training steps on a CPU with activations in a file: peak, time, waiting and gradients.

    python -m benchmarks.offload_steps                       # to benchmarks/results
    python -m benchmarks.offload_steps --only gpt2 --budgets 50% least --rounds 3 --out DIR
    python -m benchmarks.offload_steps --only gpt2 unet elementwise --budgets   # waiting only

Each model is planned for a budget with recomputation, and with offloading. "least" is the smallest
peak that recomputation alone reaches. "below" is the smallest with offloading, if that is less:
there, recomputation has the budget "least", and its search within "below" is recorded
(`failure`). Eager mode, a plan that retains everything and both plans take turns step by step, each
from the same state of the random generator. `is_exact` compares gradients with those of the plan
that retains everything, bit for bit. `waits_s` is the measured time that the step waited for
copies, `waiting_s` the predicted one.

Plans rarely wait, so a further step, "everything", offloads every tensor of the forward that the
backward reads, frees each after its last use in the forward, whatever the wait, and recomputes
nothing. The wait of each round is predicted with the bandwidth of the copies of the round before,
and with operations that take as long as in that round: `waits_ratio` is measured over predicted,
the median of the rounds. (A virtual disk reads one file twice as fast as another, so a file of its
own would measure another bandwidth.)

One thread computes, so that copies have a core of their own; the file is in REMAT_OFFLOAD_DIR, with
REMAT_OFFLOAD_DIRECT=1 without the page cache. The link is measured by this process, which reuses
the memory that it has freed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

import remat
from benchmarks.harness import machine, report
from benchmarks.harness.measurement import keep_freed_memory
from benchmarks.harness.offloading import offload_everything
from benchmarks.models import workloads
from benchmarks.models.workloads import Workload
from remat.costs.devices import Link
from remat.frontend.memory.meter import measure_step
from remat.frontend.planning.host_limits import measured_link
from remat.frontend.runtime.host_file import FileCopy, HostFile, is_io_direct, offload_directory
from remat.passes.offload.copies import CopyTimes, copy_times

Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
MODELS = {"gpt2": workloads.gpt2, "unet": workloads.unet2d}
NAMES = (*MODELS, "elementwise")
BUDGETS = ("50%", "35%", "least", "below")
LIMIT_S, FULL_LIMIT_S = 20.0, 60.0
"""Time limits of solves, and of the search for a plan within "below" by recomputation alone."""
_MIN_BYTES = 1 << 20
"""The smallest copies that are timed: others take as long as threads take to notice them."""


@dataclass
class Side:
    """One way to run a step, and the seconds of its steps."""

    name: str
    module: Any
    seconds: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)


def rows_of(name: str, budgets: Sequence[str], rounds: int, link: Link) -> list[Row]:
    """Return a row for each budget and way to run a step."""
    torch.manual_seed(0)
    workload = MODELS[name](CPU, False)
    rows: list[Row] = []
    recomputed: int | str = "min"
    if {"least", "below"} & set(budgets):
        recomputed = plan_for(workload, "min", link, offload="off").plan.peak_bytes
    for requested in budgets:
        budget = recomputed if requested in ("least", "below") else requested
        failure = None
        if requested == "below":
            budget = plan_for(workload, "min", link, offload="auto").plan.peak_bytes
            failure = failure_of_recomputation(workload, budget, link)
            if failure is None:
                print(f"{name} below: recomputation reaches the smallest peak, too", flush=True)
                continue
            print(f"{name} below, recompute: {failure}", flush=True)
        modules = {
            "eager": copy.deepcopy(workload.model),
            "retain": plan_for(workload, "100%", link, offload="off"),
            "recompute": plan_for(workload, recomputed if failure else budget, link, offload="off"),
            "offload": plan_for(workload, budget, link, offload="auto"),
        }
        sides = [Side(n, module) for n, module in modules.items()]
        for turn in range(rounds + 1):
            for side in sides:
                run_step(side, workload, turn)
        for side in sides:
            row = {"model": name, "budget": requested}
            if failure and side.name == "recompute":
                row |= {"budget": "least", "failure": failure}
            rows.append(row | figures(side, sides[0], sides[1], workload))
            print(_line(rows[-1]), flush=True)
    return rows


def failure_of_recomputation(workload: Workload, budget_bytes: int, link: Link) -> str | None:
    """Return the error of planning within a budget by recomputation alone; None if it fits."""
    try:
        plan_for(workload, budget_bytes, link, offload="off", limit_s=FULL_LIMIT_S)
    except (remat.InfeasibleBudget, remat.SolverTimeout) as error:
        return f"{type(error).__name__}: {error}"
    return None


class Elementwise(torch.nn.Module):
    """Operations that are faster than copies of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.weight
        for _ in range(8):
            h = h.sin()
        return h.sum()


def waits_for_everything(name: str, rounds: int) -> Row:
    """Return the predicted and the measured time that a step waits for copies if all tensors of the
    forward that the backward reads are offloaded, and freed after their last use there."""
    torch.manual_seed(0)
    if name == "elementwise":
        workload = Workload("", Elementwise(), {"x": torch.randn(16384, 1024)}, lambda model: [])
    else:
        workload = MODELS[name](CPU, False)
    model = workload.model
    trace = remat.measure(remat.trace(model, (), workload.batch))
    trace = offload_everything(trace, link_now())
    graph = trace.graph()
    program = remat.rewrite(trace, remat.Schedule.keep_all(graph))
    side = Side("everything", remat.lower(program, model))
    predicted: list[CopyTimes] = []
    links: list[Link] = []
    for turn in range(rounds + 2):  # the first step allocates, the second measures the link
        with _TimedCopies() as copies:
            run_step(side, workload, max(0, turn - 1))
        links.append(copies.link())
        if turn < 2:
            continue
        slower = (side.seconds[-1] - side.waits_s[-1]) / graph.total_cost_s
        operations = tuple(replace(o, cost_s=slower * o.cost_s) for o in graph.operations)
        in_round = replace(graph, operations=operations)
        predicted.append(copy_times(in_round, range(len(graph)), links[-2]))
    waiting_s = [times.waiting_s for times in predicted]
    ratios = [a / b for a, b in zip(side.waits_s, waiting_s, strict=True)]
    row: Row = {
        "model": name,
        "step_s": statistics.median(side.seconds),
        "predicted_step_s": statistics.median(times.step_s for times in predicted),
        "waits_s": statistics.median(side.waits_s),
        "waiting_s": statistics.median(waiting_s),
        "waits_ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "waits_s_of_rounds": side.waits_s,
        "waiting_s_of_rounds": waiting_s,
        "links": [[link.to_host_bytes_per_s, link.to_device_bytes_per_s] for link in links],
        "copies_s": statistics.median(times.copying_s for times in predicted),
        "host_bytes": predicted[0].largest_host_bytes,
    }
    print(
        f"{name} everything: waits {row['waits_s']:.3f} s of {row['waiting_s']:.3f} predicted, "
        f"ratio {row['waits_ratio']} ({', '.join(map(str, row['ratios']))})",
        flush=True,
    )
    return row


def link_now() -> Link:
    """Return the bandwidth of the file, measured now."""
    with tempfile.TemporaryDirectory() as folder:
        return measured_link(CPU, Path(folder) / "costs.sqlite")


def plan_for(
    workload: Workload,
    budget: int | str,
    link: Link,
    *,
    offload: str,
    limit_s: float = LIMIT_S,
) -> Any:
    """Return a copy of the model that is planned within a budget."""
    return remat.optimize(
        copy.deepcopy(workload.model),
        budget,
        (),
        workload.batch,
        outputs="dropped",
        split="off",
        offload=offload,
        link=link if offload == "auto" else None,
        strategy=remat.Auto(time_limit=limit_s),
    )


def run_step(side: Side, workload: Workload, turn: int) -> None:
    """Run a step, and record its time and its gradients."""
    side.module.zero_grad(set_to_none=True)
    torch.manual_seed(turn)
    waits: list[float] = []
    with _TimedWaits(waits):
        start_s = time.perf_counter()
        _loss(side.module, workload).backward()
        seconds = time.perf_counter() - start_s
    if turn:  # the first step allocates
        side.seconds.append(seconds)
        side.waits_s.append(sum(waits))
    side.gradients = [p.grad for p in side.module.parameters() if p.grad is not None]


def _loss(module: Any, workload: Workload) -> torch.Tensor:
    output = module(**workload.batch)
    return output if isinstance(output, torch.Tensor) else output.loss


class _TimedWaits:
    """Add the seconds of each wait for a copy to a list."""

    def __init__(self, waits: list[float]) -> None:
        self._waits = waits
        self._wait = FileCopy.wait

    def __enter__(self) -> None:
        def wait(copy: FileCopy) -> None:
            start_s = time.perf_counter()
            self._wait(copy)
            self._waits.append(time.perf_counter() - start_s)

        setattr(FileCopy, "wait", wait)  # noqa: B010  # the type of a method is not assignable

    def __exit__(self, *error: object) -> None:
        setattr(FileCopy, "wait", self._wait)  # noqa: B010


class _TimedCopies:
    """Measure the bandwidth of copies between memory and the file, in both directions: the median
    of the copies of a mebibyte and more."""

    def __init__(self) -> None:
        self._rates: dict[str, list[float]] = {"write": [], "read": []}
        self._copy = HostFile._copy

    def link(self) -> Link:
        """Return the bandwidth of the copies so far. Some have to have been made."""
        return Link(*(statistics.median(self._rates[name]) for name in ("write", "read")))

    def __enter__(self) -> Self:
        def timed(file: HostFile, copy: Callable[..., None], *arguments: int) -> None:
            start_s = time.perf_counter()
            self._copy(file, copy, *arguments)
            size_bytes, seconds = arguments[1], time.perf_counter() - start_s
            if size_bytes >= _MIN_BYTES:
                self._rates[copy.__name__].append(size_bytes / seconds)

        setattr(HostFile, "_copy", timed)  # noqa: B010  # the type of a method is not assignable
        return self

    def __exit__(self, *error: object) -> None:
        setattr(HostFile, "_copy", self._copy)  # noqa: B010


def figures(side: Side, eager: Side, retained: Side, workload: Workload) -> Row:
    """Return the figures of one way to run a step, next to those of eager mode."""
    constants = [*side.module.parameters(), *side.module.buffers(), *workload.batch.values()]
    side.module.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    usage = measure_step(lambda: _loss(side.module, workload).backward(), constants)
    ratios = [a / b for a, b in zip(side.seconds, eager.seconds, strict=True)]
    row: Row = {
        "method": side.name,
        "peak_bytes": usage.peak_bytes,
        "step_s": statistics.median(side.seconds),
        "overhead": round(statistics.median(ratios) - 1, 4),
        "is_exact": all(map(torch.equal, side.gradients, retained.gradients)),
    }
    if side.name == "eager":
        return row
    plan = side.module.plan
    return row | {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_overhead": round(plan.overhead, 4),
        "waits_s": statistics.median(side.waits_s),
        "waiting_s": plan.stats.get("waiting_s", 0.0),
        "copies_s": plan.stats.get("copies_s", 0.0),
        "host_bytes": plan.host_bytes,
    }


def _line(row: Row) -> str:
    text = (
        f"{row['model']} {row['budget']} {row['method']}: peak {row['peak_bytes']:,}, "
        f"{row['step_s']:.3f} s ({row['overhead']:+.1%}), exact {row['is_exact']}"
    )
    if row["method"] == "eager":
        return text
    return (
        f"{text}; predicted {row['predicted_peak_bytes']:,}, {row['predicted_overhead']:+.1%}, "
        f"waits {row['waits_s']:.3f} s of {row['waiting_s']:.3f} predicted"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and write its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=NAMES, default=NAMES, metavar="MODEL", help=", ".join(NAMES))
    add("--budgets", nargs="*", default=BUDGETS, help="percentages of the peak, least or below")
    add("--rounds", type=int, default=5, help="timed steps of each way")
    add("--out", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(argv)
    keep_freed_memory()
    torch.set_num_threads(1)
    link = link_now()
    result = {
        "benchmark": "offload-steps",
        "machine": machine.describe(CPU),
        "link": [link.to_host_bytes_per_s, link.to_device_bytes_per_s],
        "directory": offload_directory(),
        "is_direct": is_io_direct(),
        "everything": [waits_for_everything(name, options.rounds) for name in options.only],
        "rows": [
            row
            for name in options.only
            if name in MODELS
            for row in rows_of(name, options.budgets, options.rounds, link)
        ],
    }
    name = "offload-steps-direct-cpu" if is_io_direct() else "offload-steps-cpu"
    print("written:", report.write_result(options.out, name, result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
