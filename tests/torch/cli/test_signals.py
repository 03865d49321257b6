"""Ctrl-C, SIGTERM, and the output on a terminal: `remat solve` of a GPT-2 that takes long."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.helpers.command_line import command, interrupts_enabled, trace
from tests.helpers.killed_solvers import at_once, killing_cbc
from tests.helpers.process_limit import PROCESS_LIMIT_S
from tests.helpers.service.server import wait_for
from tests.helpers.solvers import needs_cbc

import remat
from remat.plan import Plan, Status

LONG = (
    "--budget",
    "45%",
    "--gap",
    "0",
    "--time-limit",
    "60",
    "--option",
    "stall=60",
    "--option",
    "threads=1",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents") / "trace.json.gz"
    remat.measure(trace(), remat.Roofline("cpu")).save(path)
    return path


class Terminal:
    """A terminal that shows a command's stderr."""

    def __init__(self, *arguments: object) -> None:
        self._ours, expected = pty.openpty()
        self.shown = ""
        with interrupts_enabled():
            self.process = subprocess.Popen(
                command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=expected,
                start_new_session=True,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"},
            )
        os.close(expected)
        os.set_blocking(self._ours, False)

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        """Read until a text appears."""
        until = time.monotonic() + PROCESS_LIMIT_S
        while not is_there():
            assert time.monotonic() < until, self.shown[-2000:]
            self.read()
            time.sleep(0.02)

    def read(self) -> None:
        """Return what the terminal shows now."""
        try:
            while data := os.read(self._ours, 1 << 16):
                self.shown += data.decode(errors="replace")
        except OSError:  # no output yet, or no more output
            pass

    def end(self) -> tuple[int, str]:
        """Return the exit code and the output."""
        out, _ = self.process.communicate(timeout=PROCESS_LIMIT_S)
        self.read()
        os.close(self._ours)
        return self.process.returncode, out.decode()


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(*arguments: object) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield open_one
    for open_terminal in opened:
        if open_terminal.process.poll() is None:
            os.killpg(open_terminal.process.pid, signal.SIGKILL)
            open_terminal.end()


def members(group: int) -> set[int]:
    """The processes of a process group that have not ended."""
    pids: set[int] = set()
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            pids.add(int(entry.name))
    return pids


needs_procfs = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="has no /proc")


@pytest.mark.slow
@needs_procfs
@pytest.mark.parametrize(
    ("signum", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "terminated", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_solve_writes_the_incumbent(
    signum: int, code: int, word: str, file: Path, tmp_path: Path, terminal
) -> None:
    output = tmp_path / "plan.json.gz"
    shown = terminal("solve", file, *LONG, "-o", output)
    shown.wait_for(lambda: "extra time +" in shown.shown)
    assert "\x1b[3" not in shown.shown  # NO_COLOR
    shown.process.send_signal(signum)
    ended, printed = shown.end()
    assert ended == code
    assert f"remat: {word}: this is the best plan so far, within " in shown.shown
    plan = Plan.load(output)
    assert plan.status is Status.FEASIBLE
    assert 0 < plan.peak_bytes <= plan.budget_bytes
    assert printed == f"{plan.describe()}\n"
    assert not members(shown.process.pid)
    assert sorted(tmp_path.iterdir()) == [output]


@needs_procfs
@needs_cbc
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.slow
def test_an_interrupted_solve_ends_the_solvers_process(
    times: int, file: Path, tmp_path: Path, terminal
) -> None:
    output = tmp_path / "plan.json"
    shown = terminal("solve", file, *LONG, "--solver", "CBC", "-o", output)
    group = shown.process.pid
    shown.wait_for(lambda: len(members(group)) > 1)
    shown.process.send_signal(signal.SIGINT)
    if times == 2:  # ends at once, without a plan
        shown.wait_for(lambda: "interrupt once more" in shown.shown)
        shown.process.send_signal(signal.SIGINT)
    ended, printed = shown.end()
    assert ended == 130
    assert not members(group)
    if times == 1:
        plan = Plan.load(output)
        assert plan.stats["solver"] == "CBC"
        assert plan.peak_bytes <= plan.budget_bytes
        assert printed
    else:
        assert printed == ""
        assert not output.exists()
        assert "\x1b[?25h" in shown.shown  # the cursor is back


@pytest.mark.slow
@needs_procfs
@needs_cbc
def test_a_crashed_solver_is_one_line_and_the_plan_is_written(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    process = subprocess.Popen(
        command("solve", file, *LONG, "--solver", "CBC", "-o", output),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with killing_cbc(at_once, process.pid) as kills:
        out, err = process.communicate(timeout=PROCESS_LIMIT_S)
    assert len(kills.pids) == 1
    assert process.returncode == 0, err
    plan = Plan.load(output)
    assert plan.status is Status.FEASIBLE
    assert err == f"remat: {plan.stats['solver_error']}. The plan is the best found without it\n"
    assert err.startswith("remat: CBC (")
    assert out == f"{plan.describe()}\n"


def catches(pid: int, signum: int) -> bool:
    """True if a process has a handler for a signal; Python has none for SIGTERM by default."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signum - 1) & 1)


@pytest.mark.slow
@needs_procfs
def test_no_progress_is_printed_without_a_terminal(file: Path, tmp_path: Path) -> None:
    with interrupts_enabled():
        process = subprocess.Popen(
            command("sweep", file, *LONG, "-o", tmp_path / "sweep.json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    wait_for(lambda: catches(process.pid, signal.SIGTERM), timeout_s=PROCESS_LIMIT_S)
    time.sleep(1)  # by then it mostly solves; earlier, it ends in the same way
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PROCESS_LIMIT_S)
    assert process.returncode == 130, err
    assert err.count("\n") == 1
    assert err.startswith("remat: interrupted")
    assert "\x1b" not in out
