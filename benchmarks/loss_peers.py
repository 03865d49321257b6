"""Losses as written, by hand in chunks, and with remat at the same peak, on one machine.

    python -m benchmarks.loss_peers                       # to benchmarks/results; about 20 minutes
    python -m benchmarks.loss_peers --losses grpo dpo --rounds 9

The model has two transformer layers and a head that is larger than all else. Each loss of
`tests.helpers.training.losses` runs as it is written, in eager mode; with each version in chunks of
`benchmarks.chunked_losses` that is installed; and with remat, as it is written, within the peak of
each of these, or within half of eager mode's peak if there is none. A row has the peak by the
allocator (parameters, gradients and batch included), the step time as a ratio to eager mode's of
the same rounds, and the differences of the loss and of the gradients, relative to the loss and to
the largest element of a gradient.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.helpers.training.losses import LOSSES, Batch, Loss, batch_of
from torch import Tensor

import remat
from benchmarks.chunked_losses import FURTHER_LOSSES, PEERS, Head, Peer, is_installed
from benchmarks.harness import machine, report
from benchmarks.harness.measurement import keep_freed_memory
from benchmarks.split_peers import WIDTH, LanguageModel
from remat import Plan
from remat.frontend.memory.meter import allocated_peak
from remat.limits.units import format_bytes

Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
SEQUENCES, TOKENS, WORDS = 8, 128, 16_000
ROUNDS = 5
ATTEMPTS = 4
LARGEST_DIFFERENCE = 1e-4
PACKAGES = {"TRL": "trl", "Liger": "liger-kernel"}


class Model(LanguageModel):
    """Two layers and a head, whose loss `head` computes from a batch."""

    def forward(self, ids: Tensor, **batch: Tensor) -> Any:  # type: ignore[override]
        return self.head(self.layers(self.embedding(ids)), self.weight, {"ids": ids, **batch})


def eager_head(loss: Loss) -> Head:
    """Return a head that computes all logits, and then the loss."""
    return lambda x, weight, batch: loss(F.linear(x, weight), batch)


class _ReadBatch(dict[str, Tensor]):
    """A batch that records what is read of it."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.read = {"ids"}

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)


def whole_batch() -> Batch:
    """Return a batch in which the scores of other models are close to the model's own, as in
    training: no ratio vanishes and no sigmoid is saturated."""
    batch = batch_of(shape=(SEQUENCES, TOKENS), words=WORDS, width=WIDTH)
    middle = math.log(WORDS)
    batch["old_logps"] = batch["old_logps"] + 5.5 - middle
    batch["ref_logps"] = batch["ref_logps"] + 5.5 - middle
    batch["ref_sums"] = batch["ref_sums"] / 5 + 5 - middle * batch["mask"][:, 1:].sum(-1)
    batch["teacher_head"] = 0.4 * batch["teacher_head"]
    return batch


def batch_for(loss: Loss) -> Batch:
    """Return the part of the batch that a loss reads."""
    batch = _ReadBatch(whole_batch())
    with torch.no_grad():
        loss(torch.randn(SEQUENCES, TOKENS, WORDS), batch)
    return {name: batch[name] for name in batch if name in batch.read}


class LossRows:
    """The rows of one loss: eager mode, losses in chunks, remat."""

    def __init__(self, name: str, loss: Loss, state: dict[str, Tensor]) -> None:
        self.name, self.loss, self.state = name, loss, state
        self.batch = batch_for(loss)
        self.rows: list[Row] = []
        self.steps: dict[str, Callable[[], Tensor]] = {}
        self.expected: tuple[Tensor, list[Tensor]] | None = None

    def measure(self, rounds: int) -> list[Row]:
        """Measure all methods, and return their rows."""
        eager = self.add("eager", eager_head(self.loss))
        budgets: list[tuple[str, int]] = []
        for peer in PEERS.get(self.name, []):
            if is_installed(peer.library):
                row = self.add(peer.name, peer.head, peer)
                if not row["failure"]:
                    budgets.append((peer.name, row["peak_bytes"]))
        for budget_of, budget_bytes in budgets or [("half of eager", eager["peak_bytes"] // 2)]:
            self.add_remat(budget_of, budget_bytes)
        self.measure_times(rounds)
        for row in self.rows:
            _explain(row, self.rows)
            print(_line(row), flush=True)
        return self.rows

    def add_remat(self, budget_of: str, budget_bytes: int) -> None:
        """Add a row of remat, within the peak of another method.

        A budget is for the storages that operations return. Where kernels allocate more while they
        run, the step is replanned, with half of the first excess subtracted from the budget (the
        next plan may not need it at its peak), and with all of the next ones.
        """
        method, excesses_bytes = f"remat at the peak of {budget_of}", list[int]()
        for _ in range(ATTEMPTS):
            planned_bytes = budget_bytes - sum(excesses_bytes) + sum(excesses_bytes[:1]) // 2

            def optimized(model: Model, planned_bytes: int = planned_bytes) -> Any:
                return remat.optimize(model, planned_bytes, (), self.batch, progress=False)

            row = self.add(method, eager_head(self.loss), None, optimized)
            row |= {
                "budget_of": budget_of,
                "budget_bytes": budget_bytes,
                "excesses_bytes": excesses_bytes,
                "is_within": row.get("peak_bytes", 0) <= budget_bytes,
            }
            if row["is_within"] or row["failure"]:
                return
            excesses_bytes = [*excesses_bytes, row["peak_bytes"] - budget_bytes]
            if len(excesses_bytes) < ATTEMPTS:
                self.rows.remove(row)

    def add(
        self,
        method: str,
        head: Head,
        peer: Peer | None = None,
        make: Callable[[Model], Any] = lambda model: model,
    ) -> Row:
        """Measure the peak of a method and compare its results with eager mode's."""
        row: Row = {"loss": self.name, "method": method, "failure": ""}
        self.rows.append(row)
        if peer is not None:
            row |= {"library": peer.library, "logits_once": peer.logits_once}
        model = Model(head)
        model.load_state_dict(self.state)
        began_s = time.perf_counter()
        try:
            run = make(model)

            def step() -> Tensor:
                model.zero_grad(set_to_none=True)
                result = run(**self.batch)
                value: Tensor = result[0] if isinstance(result, tuple) else result
                value.backward()
                return value.detach()

            row["planning_s"] = round(time.perf_counter() - began_s, 2)
            step()
            value = step()
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            return row
        self.steps[method] = step
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if self.expected is None:
            self.expected = value, [copy.deepcopy(g) for g in gradients]
        row |= _differences(self.expected, (value, gradients))
        del gradients
        model.zero_grad(set_to_none=True)
        constants = [*model.parameters(), *self.batch.values()]
        row["peak_bytes"] = allocated_peak(step) + sum(t.nbytes for t in constants)
        model.zero_grad(set_to_none=True)
        plan = getattr(run, "plan", None)
        if isinstance(plan, Plan):
            row |= _plan_figures(plan)
        return row

    def measure_times(self, rounds: int) -> None:
        """Run all methods in turn, and set the median of the time ratios to eager mode."""
        seconds: dict[str, list[float]] = {name: [] for name in self.steps}
        for _ in range(rounds):
            for name, step in self.steps.items():
                began_s = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - began_s)
        for row in self.rows:
            if row["method"] not in seconds:
                continue
            times = seconds[row["method"]]
            row["step_s_median"] = round(statistics.median(times), 4)
            row["time_ratio_median"] = _median_ratio(times, seconds["eager"])
            if (peer := row.get("budget_of")) in seconds:
                row["time_ratio_to_peer_median"] = _median_ratio(times, seconds[peer])


def _median_ratio(times: list[float], others: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(times, others, strict=True)), 3)


def _differences(
    expected: tuple[Tensor, list[Tensor]], got: tuple[Tensor, list[Tensor]]
) -> dict[str, float]:
    pairs = zip(expected[1], got[1], strict=True)
    return {
        "loss_difference": ((got[0] - expected[0]).abs() / expected[0].abs()).item(),
        "gradient_difference": max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs),
        "smallest_gradient": min(g.abs().max().item() for g in expected[1]),
    }


def _plan_figures(plan: Plan) -> Row:
    """Return the pieces of a plan, and the parts of its predicted extra time."""
    operations, runs = plan.graph.operations, Counter(map(int, plan.schedule.runs))
    extra_s = {True: 0.0, False: 0.0}
    for op, count in runs.items():
        extra_s[bool(operations[op].piece_of)] += (count - 1) * operations[op].cost_s
    parts_s = {
        "overhead_of_smaller_operations": plan.graph.total_cost_s - plan.baseline_time_s,
        "overhead_of_recomputed_pieces": extra_s[True],
        "overhead_of_recomputed_layers": extra_s[False],
    }
    return {
        "splits": [[s.module, s.pieces] for s in plan.graph.splits],
        "planned_peak_bytes": plan.peak_bytes,
        "overhead": round(plan.overhead, 4),
        **{name: round(part_s / plan.baseline_time_s, 4) for name, part_s in parts_s.items()},
        "description": plan.describe(),
    }


def _explain(row: Row, rows: list[Row]) -> None:
    """Say why remat is slower than the loss in chunks, from the parts of its extra time."""
    if row.get("time_ratio_to_peer_median", 0.0) <= 1.0:
        return
    peer = next(other for other in rows if other["method"] == row["budget_of"])
    reasons = {
        "operations on pieces are slower": row["overhead_of_smaller_operations"],
        "logits of pieces are recomputed": row["overhead_of_recomputed_pieces"],
        "layers are recomputed": row["overhead_of_recomputed_layers"],
    }
    parts = [f"{text} (+{share:.0%})" for text, share in reasons.items() if share >= 0.01]
    by_hand = (
        "by hand, gradients are computed in the forward, from the only logits of a chunk"
        if peer["logits_once"]
        else "by hand, logits are recomputed, too, but by formulas with fewer passes over them"
    )
    row["why_slower"] = "; ".join([*(parts or ["remat recomputes nothing"]), by_hand])


def _line(row: Row) -> str:
    """Return a row as a row of a table in Markdown."""
    if row["failure"]:
        return f"| {row['loss']} | {row['method']} | {row['failure']} |"
    pieces = ", ".join(f"x {number}" for _, number in row.get("splits", ()))
    cells = (
        row["loss"], row["method"], format_bytes(row["peak_bytes"]),
        f"{row['time_ratio_median']:.2f}", f"{row['loss_difference']:.0e}",
        f"{row['gradient_difference']:.0e}", pieces,
        f"{row['planning_s']:.1f} s" if "budget_of" in row else "", row.get("why_slower", ""),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def versions() -> dict[str, str]:
    """Return the versions of the libraries that have losses in chunks, "" if not installed."""
    installed = {name: package for name, package in PACKAGES.items() if is_installed(name)}
    numbers = {name: importlib.metadata.version(package) for name, package in installed.items()}
    return {name: numbers.get(name, "") for name in PACKAGES}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and write its result."""
    losses = {**LOSSES, **FURTHER_LOSSES}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", nargs="+", choices=losses, default=list(losses))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    state = Model(eager_head(losses["cross_entropy"])).state_dict()
    result: dict[str, Any] = {
        "benchmark": "loss-peers",
        "machine": machine.describe(torch.device("cpu")),
        "keeps_freed_memory": keep_freed_memory(),
        "versions": versions(),
        "sizes": {"batch": SEQUENCES, "tokens": TOKENS, "width": WIDTH, "words": WORDS},
        "rows": [],
    }
    for library, version in result["versions"].items():
        if not version:
            print(f"{library} is not installed: without its losses")
    for name in options.losses:
        result["rows"] += LossRows(name, losses[name], state).measure(options.rounds)
    for row in result["rows"]:
        if row["failure"] or not row.get("is_within", True):
            print("failed or above its budget:", row["loss"], row["method"], row["failure"])
        elif row["gradient_difference"] > LARGEST_DIFFERENCE:
            print("gradients differ:", row["loss"], row["method"], row["gradient_difference"])
    print("written:", report.write_result(options.out, "loss-peers-cpu", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
