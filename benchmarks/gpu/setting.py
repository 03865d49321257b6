"""Setting of the acceptance run: a GPU with full sizes, or a CPU with tiny sizes (dry run)."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.gpu.device import free_unused_memory
from benchmarks.gpu.verdicts import Report
from benchmarks.models.workloads import Workload

T = TypeVar("T")


_is_locked = False
"""True while this process has the lock of the GPU."""


@dataclass(frozen=True)
class Setting:
    """Device and sizes of the run.

    `folder` holds files that one part writes and another one reads; `part` names the running part.
    `is_timed` is True if the part measures time. Such parts run only next to one another, and use
    the GPU in turns (`gpu`).
    """

    folder: Path
    dry: bool = False
    part: str = ""
    is_timed: bool = True

    @contextlib.contextmanager
    def gpu(self) -> Iterator[None]:
        """Use the GPU while no other part does: parts that measure time take turns.

        They import, build their models and trace at the same time, and solve where no operation is
        split. At the end, the cached blocks of the allocator are freed for the others.
        """
        global _is_locked
        if not self.is_timed or _is_locked:
            yield
            return
        with (self.folder / "gpu.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _is_locked = True
            try:
                yield
            finally:
                _is_locked = False
                free_unused_memory(self.device)

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


def without_turns(run: PartFunction) -> PartFunction:
    """Return the part with the lock of the GPU from beginning to end."""

    def run_with_gpu(setting: Setting, report: Report) -> None:
        with setting.gpu():
            run(setting, report)

    return run_with_gpu
