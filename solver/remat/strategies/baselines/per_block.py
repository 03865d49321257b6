"""One checkpoint per block: what a training script does with torch.utils.checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from remat.errors import RematError
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.module_blocks import find_blocks
from remat.strategies.baselines.schedule_builder import checkpoint_segments, select_cheapest
from remat.strategies.option_types import Checked


@dataclass(frozen=True)
class PerBlock(Checked):
    """torch.utils.checkpoint (non-reentrant, with early stop) around each repeated block.

    Blocks come from the operations' module paths (see `module_blocks`). Values that cross a block's
    border are retained, and so is everything outside blocks. Equivalent to
    `model.activation_checkpointing_enable()` of transformers.
    """

    name = "per_block"

    def run(self, task: Task) -> Solution:
        """Return the single schedule. Raises `RematError` for a graph without numbered modules."""
        blocks = find_blocks(task.graph)
        if not blocks:
            raise RematError(
                "per_block needs repeated blocks, but no operation has a module path with a "
                'number, such as "layers.0": use EveryK, or ChenSqrt'
            )
        candidates = [(f"{len(blocks)} blocks", checkpoint_segments(task.graph, blocks))]
        return select_cheapest(task, candidates, strategy=self.name)
