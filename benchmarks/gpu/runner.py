"""Runner of the acceptance run: each part in a process, whose crash or timeout is a result.

The checks of a part are stored in a folder as soon as it ends. A part that has finished is not
repeated, so that an interrupted run resumes where it stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.steps import PARTS, Part
from benchmarks.gpu.verdicts import Check, Verdict, read_checks

ROOT = Path(__file__).parents[2]

FINISHED = "finished"
NO_TIME = "not run: no time is left"

MIN_PART_S = 10.0
"""Remaining seconds below which no further process is started."""


@dataclass(frozen=True)
class Result:
    """The checks of one part, and how its process ended."""

    step: int
    name: str
    ended: str
    seconds: float
    checks: tuple[Check, ...]

    def rows(self) -> list[Check]:
        """Return the part's checks, and one more if its process did not finish."""
        if self.ended == FINISHED:
            return list(self.checks)
        verdict: Verdict = "skipped" if self.ended == NO_TIME else "missed"
        return [*self.checks, Check("the process", "finishes", self.ended, verdict)]


def run_all(
    parts: Iterable[Part],
    folder: Path,
    limit_s: float,
    *,
    dry: bool = False,
    repeat: bool = False,
    jobs: int = 1,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run parts until `limit_s` seconds are over, `jobs` at a time: first those that measure time,
    which use the GPU in turns, then the others.

    A part that finished in an earlier run is read from `folder`, unless `repeat` is set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s

    def result_of(part: Part) -> Result:
        path = folder / f"{part.key}.json"
        result = None if repeat else _read_finished(path)
        if result is None:
            result = _run(part, folder, deadline - time.monotonic(), dry, jobs)
            if result.ended != NO_TIME:
                path.write_text(json.dumps(asdict(result), indent=1))
        return result

    results: list[Result] = []

    def add(result: Result) -> None:
        on_result(result)
        results.append(result)

    timed: list[list[Part]] = []  # lists of parts that run one after the other
    others: list[list[Part]] = []
    for part in parts:
        if part.is_timed:
            timed.append([part])
        elif part.follows and others:
            others[-1].append(part)
        else:
            others.append([part])
    for groups in (timed, others):
        with ThreadPoolExecutor(jobs) as pool:
            running = [
                pool.submit(lambda group=group: [result_of(part) for part in group])
                for group in groups
            ]
            try:
                for finished in as_completed(running):  # shown at once: a run may be interrupted
                    for result in finished.result():
                        add(result)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    order = {part.key: index for index, part in enumerate(PARTS)}
    return sorted(results, key=lambda r: order.get(f"{r.step:02d}-{r.name}", 0))


def _read_finished(path: Path) -> Result | None:
    """Return the stored result of a part; None if there is none, or the part did not finish."""
    if not path.exists():
        return None
    fields = json.loads(path.read_text())
    if fields["ended"] != FINISHED or "checks" not in fields:  # "lines" in earlier versions
        return None
    return Result(**fields | {"checks": tuple(Check(**check) for check in fields["checks"])})


def _run(part: Part, folder: Path, remaining_s: float, dry: bool, jobs: int) -> Result:
    """Run one part in a process of its own, within the remaining seconds. It may wait for the GPU
    as long as `jobs` - 1 others use it."""
    if remaining_s < MIN_PART_S:
        return Result(part.step, part.name, NO_TIME, 0.0, ())
    checks_path = folder / f"{part.key}.jsonl"
    checks_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.child", part.key, str(folder.resolve())]
    start = time.monotonic()
    part_limit_s = part.limit_s * (jobs if part.is_timed else 1)
    limit_s = min(part_limit_s, remaining_s)
    log = folder / f"{part.key}.log"
    ended = run_command(command + ["--dry"] * dry, limit_s, log, part.env)
    if ended != FINISHED and limit_s < part_limit_s and time.monotonic() - start >= limit_s:
        ended = NO_TIME
    seconds = round(time.monotonic() - start, 1)
    return Result(part.step, part.name, ended, seconds, tuple(read_checks(checks_path)))


def run_command(
    command: Sequence[str], limit_s: float, log: Path, env: Mapping[str, str] | None = None
) -> str:
    """Run a command with its output in `log`, and return in words how it ended.

    After `limit_s` seconds the command and its child processes are killed.
    """
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
    output_lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit code {code}: {output_lines[-1][:300] if output_lines else 'no output'}"
