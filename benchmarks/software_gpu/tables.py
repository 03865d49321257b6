"""The tables of the software GPU: their cases, and the environment that a case needs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

Row = dict[str, Any]
"""One line of a table; `is_met` is True if its requirement is met."""


@dataclass(frozen=True)
class Table:
    """A table of results. Its module has `cases()`, the names of its cases, and `run_case(name)`,
    the rows of one, which is called in a process of its own.

    `has_gpu` is True if that process runs on the software GPU, `has_numbers` if kernels compute
    right numbers there, and `is_interpreted` if Triton's kernels run in its interpreter.
    """

    name: str
    title: str
    requirement: str
    module: str
    has_gpu: bool = True
    has_numbers: bool = False
    is_interpreted: bool = False
    limit_s: float = 900.0

    def cases(self) -> list[str]:
        """Return the names of the cases."""
        return import_module(self.module).cases()

    def run_case(self, case: str) -> list[Row]:
        """Return the rows of a case."""
        return import_module(self.module).run_case(case)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that a case needs besides those of the software GPU."""
        variables = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        if self.is_interpreted:
            variables["TRITON_INTERPRET"] = "1"
        return variables


_HERE = "benchmarks.software_gpu"

TABLES = {
    table.name: table
    for table in (
        Table(
            "tests",
            "the tests marked gpu",
            "all pass, except those that measure time",
            f"{_HERE}.marked_tests",
            has_numbers=True,
        ),
        Table(
            "eager-memory",
            "memory of eager plans",
            "requested bytes at most the plan's and at least 99.5% of it; allocated within the "
            "budget with expandable segments; eager mode within 0.5% of the estimate",
            f"{_HERE}.eager_memory",
        ),
        Table(
            "losses",
            "losses as their users write them",
            "the same memory as eager plans; gradients of eager mode within 1e-6",
            f"{_HERE}.losses",
            has_numbers=True,
        ),
        Table(
            "training-memory",
            "memory of training loops with an optimizer",
            "requested bytes within 2% of the prediction of remat.fit",
            f"{_HERE}.training_memory",
        ),
        Table(
            "compiled-memory",
            "memory under torch.compile",
            "requested bytes at most the verified ones, and these within the budget",
            f"{_HERE}.compiled_memory",
        ),
        Table(
            "absent-gpu",
            "traces for an absent GPU",
            "operations, sizes and workspaces of a trace on that GPU",
            f"{_HERE}.absent_gpu",
            has_numbers=True,  # models branch on the values of constants
        ),
        Table(
            "numbers",
            "loss and gradients of eager plans",
            "those of eager mode, bit for bit",
            f"{_HERE}.numbers",
            has_numbers=True,
        ),
        Table(
            "compiled-numbers",
            "loss and gradients of compiled plans",
            "those of plain Inductor, bit for bit",
            f"{_HERE}.compiled_numbers",
            has_numbers=True,
            is_interpreted=True,
        ),
        Table(
            "code",
            "Inductor's kernels of planned steps",
            "each compiles for sm_80, sm_90 and sm_100",
            f"{_HERE}.code",
            has_gpu=False,
            limit_s=2400.0,
        ),
        Table(
            "faults",
            "planted faults",
            "each is noticed",
            f"{_HERE}.faults",
            has_numbers=True,
        ),
    )
}
