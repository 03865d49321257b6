"""`why`: explain a memory snapshot, or the text of an out-of-memory error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from remat.errors import RematError, wrong_type
from remat.report.fit import Fit
from remat.snapshots.error_text import parse_error_text
from remat.snapshots.explain import Explanation, explain_error, explain_snapshot
from remat.snapshots.read import read_snapshot
from remat.snapshots.unpickle import PICKLE_START

ERROR_WORDS = "out of memory"
"""Words of every such error of torch."""


def why(
    source: str | os.PathLike[str] | bytes | Mapping[str, object] | BaseException,
    *,
    error: str | BaseException | None = None,
    total_bytes: int | None = None,
    device: int | None = None,
    fit: Fit | None = None,
) -> Explanation:
    """Explain an out-of-memory error: which part of the step took the memory, and what to do.

    `source` is a file that `torch.cuda.memory._dump_snapshot` wrote, its bytes, the result of
    `torch.cuda.memory._snapshot()`, an exception, or the text of an error. Files are read as plain
    data: none can run code. `error` is the error that belongs to a snapshot: it names the memory of
    the device and of other processes. `total_bytes` is the device's memory, and `device` the number
    of the GPU to explain, by default the one whose request failed. `fit` is the result of
    `remat.fit` for the model, whose prediction and options the explanation then has.

    Raises `DocumentError` for a file that is no snapshot, and a text without such an error.
    """
    error_text = None if error is None else parse_error_text(str(error))
    if isinstance(source, BaseException) or (isinstance(source, str) and ERROR_WORDS in source):
        explanation = explain_error(parse_error_text(str(source)))
    elif (
        isinstance(source, bytes) and source[:1] != PICKLE_START and ERROR_WORDS.encode() in source
    ):
        explanation = explain_error(parse_error_text(source.decode(errors="replace")))
    elif isinstance(source, str | os.PathLike | bytes | Mapping):
        name = "snapshot"
        if isinstance(source, str | os.PathLike):
            name = Path(source).name
            if not Path(source).is_file():
                raise RematError(f"there is no file {name[:80]!r} to explain")
        explanation = explain_snapshot(
            read_snapshot(source),
            source=name,
            error=error_text,
            total_bytes=total_bytes,
            device=device,
        )
    else:
        raise wrong_type("why", "a snapshot or an error", source, "pass a file, bytes, or the text")
    return explanation if fit is None else explanation.with_fit(fit)
