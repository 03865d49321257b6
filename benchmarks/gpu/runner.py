"""Runs parts, each in a process that may crash, hang or run out of memory: that is a result.

What a part found is kept in a folder as soon as it ends, and a part that has finished is not run
again: a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu import lines
from benchmarks.gpu.lines import Line
from benchmarks.gpu.steps import Part

ROOT = Path(__file__).parents[2]

FINISHED = "finished"
NO_TIME = "not run: no time is left"

LEAST_S = 10.0
"""With less time than this no process is begun."""


@dataclass(frozen=True)
class Result:
    """What a part found, and how its process ended."""

    step: int
    name: str
    ended: str
    seconds: float
    lines: tuple[Line, ...]

    def rows(self) -> list[Line]:
        """Its lines, and one for a process that did not finish."""
        if self.ended == FINISHED:
            return list(self.lines)
        kind = "skipped" if self.ended == NO_TIME else "missed"
        return [*self.lines, Line("the process", "finishes", self.ended, kind)]


def run_all(
    parts: Iterable[Part],
    folder: Path,
    limit_s: float,
    *,
    dry: bool = False,
    again: bool = False,
    tell: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run parts one after the other until `limit_s` seconds are over. `again` repeats what has
    finished before."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s
    results = []
    for part in parts:
        result = None if again else _kept(folder / f"{part.key}.json")
        if result is None:
            left_s = deadline - time.monotonic()
            result = _run(part, folder, left_s, dry)
            if result.ended != NO_TIME:
                (folder / f"{part.key}.json").write_text(json.dumps(asdict(result), indent=1))
        tell(result)
        results.append(result)
    return results


def _kept(path: Path) -> Result | None:
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    if found["ended"] != FINISHED:
        return None
    return Result(**found | {"lines": tuple(Line(**line) for line in found["lines"])})


def _run(part: Part, folder: Path, left_s: float, dry: bool) -> Result:
    if left_s < LEAST_S:
        return Result(part.step, part.name, NO_TIME, 0.0, ())
    found = folder / f"{part.key}.jsonl"
    found.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.child", part.key, str(folder.resolve())]
    start = time.monotonic()
    limit_s = min(part.limit_s, left_s)
    log = folder / f"{part.key}.log"
    ended = end_of(command + ["--dry"] * dry, limit_s, log, part.env)
    if ended != FINISHED and limit_s < part.limit_s and time.monotonic() - start >= limit_s:
        ended = NO_TIME
    seconds = round(time.monotonic() - start, 1)
    return Result(part.step, part.name, ended, seconds, tuple(lines.read(found)))


def end_of(
    command: Sequence[str], limit_s: float, log: Path, env: Mapping[str, str] | None = None
) -> str:
    """Run a command with its output in a file, and say how it ended. After `limit_s` seconds it is
    killed, with what it has started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"killed: not done within {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return FINISHED
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit code {code}: {said[-1][:300] if said else 'it said nothing'}"
