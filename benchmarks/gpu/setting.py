"""Setting of the acceptance run: a GPU with full sizes, or a CPU with tiny sizes (dry run)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.gpu.verdicts import Report
from benchmarks.models.workloads import Workload

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """Device and sizes of the run.

    `folder` holds files that one part writes and another one reads; `part` names the running part.
    `is_timed` is True if no other part runs at the same time.
    """

    folder: Path
    dry: bool = False
    part: str = ""
    is_timed: bool = True

    @property
    def device(self) -> torch.device:
        """The first GPU, or the CPU in a dry run."""
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    @property
    def costs(self) -> str:
        """The path of a cost cache: parts that measure time share one, all others another. Costs
        that are measured while other processes use the GPU are wrong by factors."""
        return str(self.folder / ("costs.sqlite" if self.is_timed else "costs-concurrent.sqlite"))

    def sized(self, full: T, dry: T) -> T:
        """Return `full` on a GPU, and `dry` in a dry run."""
        return dry if self.dry else full

    def solve_limit_s(self, full: float) -> float:
        """Return the time limit of a solve: `full` seconds, or 2 in a dry run."""
        return self.sized(full, 2.0)


WorkloadBuilder = Callable[[Setting], Workload]
PartFunction = Callable[[Setting, Report], None]
"""The work of a part: make checks in a setting, and report them."""
