"""`watch`: record the allocations of a loop, and explain an out-of-memory error where it occurs."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from remat.documents.base import write_atomically
from remat.errors import RematError, wrong_type
from remat.frontend.memory.allocation_recorder import CpuRecorder, CudaRecorder, ModuleMarks
from remat.snapshots.explain import Explanation
from remat.snapshots.why import why

_MAX_ENTRIES = 200_000
"""Events of a recording: some hundred bytes each, and enough for a step of any model."""


class Watch:
    """A recording in progress. `explanation` is that of the error that ended it, None without
    one."""

    def __init__(self, recorder: CudaRecorder | CpuRecorder, marks: ModuleMarks) -> None:
        self._recorder, self._marks = recorder, marks
        self.explanation: Explanation | None = None

    def add(self, model: nn.Module) -> None:
        """Record the modules of a model that was created after the recording began."""
        if not isinstance(model, nn.Module):
            raise wrong_type("watch", "a torch.nn.Module", model, "pass the model, or nothing")
        self._marks.add(model)

    def explain(self, error: BaseException | None = None) -> Explanation:
        """Explain the memory so far: the error, or the peak."""
        total_bytes = None
        if isinstance(self._recorder, CudaRecorder):
            total_bytes = torch.cuda.mem_get_info()[1]
        return why(
            self._recorder.snapshot(),
            error=error if error is not None and "Tried to allocate" in str(error) else None,
            total_bytes=total_bytes,
        )

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the recording so far, in the format of `torch.cuda.memory._dump_snapshot`."""
        write_atomically(Path(file), pickle.dumps(self._recorder.snapshot(), protocol=4))


@contextmanager
def watch(
    model: nn.Module | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    max_entries: int = _MAX_ENTRIES,
) -> Iterator[Watch]:
    """Record allocations inside of this context, and explain an out-of-memory error.

    At a `torch.OutOfMemoryError` the explanation is printed on stderr, the snapshot is written to
    `file` if that is passed, and the error is raised unchanged. Blocks have the module that
    allocated them if a `model` is passed, or added later with `Watch.add`. Enter the context before
    the model is moved to the GPU, so that its parameters have a line of code, too. The newest
    `max_entries` events are recorded, which takes some microseconds for each.

    Without a GPU, the tensors that operations create on the CPU are recorded, which is slow; a
    process that the system ends for its memory is not explained: call `Watch.explain` before.
    """
    if isinstance(max_entries, bool) or not isinstance(max_entries, int) or max_entries < 1:
        raise RematError(
            f"max_entries is {str(max_entries)[:80]!r}; pass the number of events to record, such "
            f"as {_MAX_ENTRIES:,}"
        )
    marks = ModuleMarks()
    recorder_type = CudaRecorder if torch.cuda.is_available() else CpuRecorder
    recorder = recorder_type(marks, max_entries)
    current = Watch(recorder, marks)
    if model is not None:
        current.add(model)
    try:
        with recorder.recording():
            try:
                yield current
            except torch.OutOfMemoryError as error:
                _explain_error(current, error, file)
                raise
    finally:
        marks.remove()


def _explain_error(
    current: Watch, error: BaseException, file: str | os.PathLike[str] | None
) -> None:
    """Print the explanation of an error, and save its snapshot. A failure of the explanation is
    printed: it must not replace the error."""
    try:
        if file is not None:
            current.save(file)
        current.explanation = current.explain(error)
        print(current.explanation.describe(), file=sys.stderr)
    except (RematError, RuntimeError, OSError, MemoryError) as failure:
        print(f"remat.watch could not explain the error: {failure}", file=sys.stderr)
