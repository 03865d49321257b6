"""`ModelResult`: the versioned document of a model's rows, one for each GPU, budget and method."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

import remat
from benchmarks.atlas.graph_file import AtlasGraph
from remat.documents.base import Document, Natural, Record, Size
from remat.limits.budget import Budget
from remat.schedule import Schedule
from remat.simulate import simulate

RESULTS = Path(__file__).parents[2] / "docs" / "atlas" / "results"
"""The folder of the published results."""

AT_BLOCKS = "per block"
"""The budget that is the peak of per-block checkpointing, and the name of that policy."""

BUDGETS = ("80%", "60%", "50%", "40%", "30%", "20%", "10%", AT_BLOCKS, "min")
"""Percentages of the peak without recomputation, the peak of per-block checkpointing, and the
smallest peak that a method reaches."""

GPUS = ("h100", "a100", "h200", "b200")

POLICIES = (AT_BLOCKS, "every k", "sqrt(n)", "knapsack", "selective")
RECOMPUTE, SPLIT, OFFLOAD = "recompute", "+ split", "+ offload"
METHODS = (*POLICIES, RECOMPUTE, SPLIT, OFFLOAD)
"""The names of the rows: policies, and plans that may recompute, also split operations, and also
offload tensors."""

_Seconds = Annotated[float, Field(ge=0)]

Machine = dict[str, str | int | float | None]
"""The result of `benchmarks.harness.machine.describe`; values that differ between several machines
are joined by semicolons."""


def joined_machines(first: Machine, second: Machine) -> Machine:
    """Return the description of two machines; of their load, the larger one."""
    joined: Machine = {name: _joined(first.get(name), second.get(name)) for name in second}
    loads = [load for m in (first, second) if isinstance(load := m.get("load_1min"), float)]
    return first | joined | ({"load_1min": max(loads)} if loads else {})


def _joined(first: str | float | None, second: str | float | None) -> str | float | None:
    """Return a value if both are the same, or the text of the distinct ones."""
    if first == second:
        return first
    return "; ".join(dict.fromkeys([*str(first).split("; "), str(second)]))


@dataclass(frozen=True)
class Cell:
    """A model, GPU and budget, whose methods are solved together."""

    model: str
    gpu: str
    budget: str

    def __str__(self) -> str:
        return f"{self.model} on {self.gpu} at {self.budget}"


class Row(Record):
    """A method at one budget. `peak_bytes` is None if it has no plan; `note` says why.

    `overhead` and `bound` are relative to the time without recomputation: what the plan takes in
    addition, and what every plan of the same order of operations takes at least.
    """

    gpu: str
    budget: str
    method: str
    peak_bytes: Size | None = None
    overhead: float | None = None
    bound: float | None = None
    host_bytes: Size = 0
    pieces: Natural = 0
    wall_s: _Seconds = 0.0
    processor_s: _Seconds = 0.0
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """The cell of the row."""
        return self.gpu, self.budget, self.method


class ModelResult(Document):
    """The rows of a model, and the graph that they are of."""

    FORMAT: ClassVar[str] = "remat.atlas.result"
    VERSION: ClassVar[int] = 1

    model: str
    title: str
    graph: str
    """The digest of the graph's file."""
    date: str
    remat: str
    machine: Machine
    operations: Natural
    baseline_peak_bytes: Size
    constant_bytes: Size
    library_bytes: Size
    step_s: dict[str, _Seconds]
    """Seconds of a step without recomputation, by GPU."""
    rows: tuple[Row, ...] = ()

    def budget_bytes(self, gpu: str, budget: str) -> int | None:
        """Return a budget in bytes; None for "min", and for per-block checkpointing without
        blocks. Costs decide between sets of blocks, so that its peak may depend on the GPU."""
        if budget == AT_BLOCKS:
            peaks = (r.peak_bytes for r in self.rows if r.key == (gpu, AT_BLOCKS, AT_BLOCKS))
            return next(peaks, None)
        return Budget.parse(budget).in_bytes(self.baseline_peak_bytes, self.library_bytes)

    def with_rows(self, rows: list[Row], machine: Machine) -> ModelResult:
        """Return the result with more rows, which replace those of the same cells, and which this
        version computed on a machine. `remat` and `machine` name all that rows come from."""
        by_key = {row.key: row for row in (*self.rows, *rows)}
        update = {
            "rows": tuple(by_key.values()),
            "date": datetime.date.today().isoformat(),
            "remat": _joined(self.remat, remat.__version__) if self.rows else remat.__version__,
            "machine": joined_machines(self.machine, machine) if self.rows else machine,
        }
        return self.model_copy(update=update)


class SolverResult(Document):
    """The rows of a solver, by model. `graphs` are the digests of the graphs' files."""

    FORMAT: ClassVar[str] = "remat.atlas.solver"
    VERSION: ClassVar[int] = 1

    solver: Annotated[str, Field(max_length=100)]
    command: str
    files: str = ""
    """The digest of the files that the command names, such as the solver's program."""
    date: str
    machine: Machine
    graphs: dict[str, str] = Field(default_factory=dict)
    rows: dict[str, tuple[Row, ...]] = Field(default_factory=dict)


@dataclass(frozen=True)
class ResultFolder:
    """The folder of results, a file for each model."""

    folder: Path = RESULTS

    def path(self, model: str) -> Path:
        """Return the path of a model's result."""
        return self.folder / f"{model}.json.gz"

    def load(self, graph: AtlasGraph, machine: Machine) -> ModelResult:
        """Return the stored result of a graph, or one without rows if there is none."""
        path = self.path(graph.name)
        if path.exists():
            stored = ModelResult.load(path)
            if stored.graph == graph.digest:
                return stored
        plain = graph.graph.to_graph()
        return ModelResult(
            model=graph.name,
            title=graph.title,
            graph=graph.digest,
            date=datetime.date.today().isoformat(),
            remat=remat.__version__,
            machine=machine,
            operations=len(plain),
            baseline_peak_bytes=simulate(plain, Schedule.keep_all(plain)).peak_bytes,
            constant_bytes=plain.constant_bytes,
            library_bytes=plain.library_bytes,
            step_s={gpu: sum(costs_s) for gpu, costs_s in graph.costs_s.items()},
        )

    def save(self, result: ModelResult) -> None:
        """Write a result to its file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        result.save(self.path(result.model))
