"""Where the run takes place: on a GPU at full size, or on a CPU with tiny sizes, to see that it
works."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """A device and sizes: all in which a dry run differs. `folder` is for what parts leave for
    others; `part` names the part that runs."""

    folder: Path
    dry: bool = False
    part: str = ""

    @property
    def device(self) -> torch.device:
        """The first GPU; in a dry run the CPU."""
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    @property
    def costs(self) -> str:
        """A cost cache for all parts, beside their results."""
        return str(self.folder / "costs.sqlite")

    def sized(self, full: T, dry: T) -> T:
        """Of two sizes the one that fits the device."""
        return dry if self.dry else full

    def solve_s(self, full: float) -> float:
        """A time limit for a solve."""
        return self.sized(full, 2.0)
