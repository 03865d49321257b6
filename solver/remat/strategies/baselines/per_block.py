"""One checkpoint per block: what a training script does with torch.utils.checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from remat.errors import RematError
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.schedule_builder import select_cheapest, checkpoint_segments
from remat.strategies.baselines.module_blocks import find_blocks
from remat.strategies.options import Checked


@dataclass(frozen=True)
class PerBlock(Checked):
    """torch.utils.checkpoint (non-reentrant, with early stop) around each repeated block.

    Blocks come from the operations' module paths (see `module_blocks`). What crosses a
    block's border is kept, and so is all that belongs to no block. Equivalent to
    `model.gradient_checkpointing_enable()` of transformers.
    """

    name = "per_block"

    def run(self, task: Task) -> Solution:
        """The one schedule there is. Raises `RematError` for a graph without numbered modules."""
        found = find_blocks(task.graph)
        if not found:
            raise RematError(
                "per_block needs repeated blocks, but no operation has a module path with a "
                'number, such as "layers.0": use EveryK, or ChenSqrt'
            )
        candidates = [(f"{len(found)} blocks", checkpoint_segments(task.graph, found))]
        return select_cheapest(task, candidates, strategy=self.name)
