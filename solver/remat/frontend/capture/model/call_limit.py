"""Limit of the operations that one forward may call during a capture.

A loop over tokens or time steps in Python code gives hundreds of thousands of operations. Their
capture takes minutes, and no plan of so many is found in reasonable time. So the capture ends with
an error as soon as the forward has called too many.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from remat.errors import TraceError
from remat.frontend.common.code_origin import is_framework_code

MAX_CALLS = 30_000
"""Tensor functions that one forward may call. The training step has three to four times as many
operations. GPT-2 with 96 layers calls about 3,000."""

_SAMPLED_CALLS = 1_000
"""The last calls before the limit, whose lines of code are counted: one loop has most of them."""


class CallLimit(TorchFunctionMode):
    """A mode for the forward of a model, which raises `TraceError` once it has called more than
    `MAX_CALLS` functions that return tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model_name = type(model).__name__
        self._calls = 0
        self._lines: Counter[str] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._calls += 1
            if self._calls > MAX_CALLS - _SAMPLED_CALLS:
                self._lines[_model_line(sys._getframe(1))] += 1
            if self._calls > MAX_CALLS:
                raise self._error()
        return result

    def _error(self) -> TraceError:
        line, _ = self._lines.most_common(1)[0]
        return TraceError(
            f"{self._model_name} calls more than {MAX_CALLS:,} operations in one forward, most of "
            f"them by then at {line}: a loop in Python code, as over tokens or time steps, gives "
            "a graph that is too large to plan as a whole. Use a model whose code calls one "
            "operation for the loop (install the kernel that it uses on a GPU), or shorter "
            'sequences; or plan block by block with remat.enable(model, budget, scope="blocks")'
        )


def _model_line(frame: FrameType | None) -> str:
    """Return the innermost line, from `frame` outwards, that is the model's code."""
    while frame is not None:
        if not is_framework_code(Path(frame.f_code.co_filename)):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} (in {frame.f_code.co_name})"
        frame = frame.f_back
    return "an unknown line"
