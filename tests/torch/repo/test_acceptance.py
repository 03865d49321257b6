"""The acceptance run without a GPU: its parts on the CPU with tiny shapes, parts that crash, and
the packages that it needs."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import marked_tests, memory, speed, verdicts
from benchmarks.gpu.device import StepPeaks
from benchmarks.gpu.runner import FINISHED, NO_TIME, run_all, run_command
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.steps import PARTS, RUN_ORDER, TIMED_STEPS, TITLES, Part
from benchmarks.gpu.verdicts import Check, Report
from scripts import gpu_wheels
from tests.helpers.paths import ROOT
from tests.helpers.process_limit import PROCESS_LIMIT_S

BY_KEY = {part.key: part for part in PARTS}
QUICK = {"01-gpt2-bf16-mask", "02-products"}
TIMED = [part for part in PARTS if part.step in TIMED_STEPS]
SAME_ON_A_CPU = (1, 3, 4, 5, 9, 10)
"""Steps that a CPU must pass as well: they are neither about seconds nor about CUDA's allocator."""

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def collected() -> tuple[Report, list[Check]]:
    lines_written: list[Check] = []
    return Report(lines_written.append), lines_written


# -- the parts ------------------------------------------------------------------------------


@pytest.mark.slow_cases("01-gpt2-bf16-mask")
@pytest.mark.parametrize(
    "key",
    [
        pytest.param(part.key, marks=[] if part.key in QUICK else pytest.mark.slow)
        for part in PARTS
        if part.step
    ],
)
def test_every_part_runs_on_a_cpu(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # restored afterwards
    part, setting = BY_KEY[key], Setting(tmp_path, dry=True)
    report, written_lines = collected()
    if key == "10-b-second-process":
        BY_KEY["10-a-first-process"].run(setting, report)
    part.run(setting, report)
    assert {line.verdict for line in written_lines} - {"info"}, "each part has an expected result"
    if part.step in SAME_ON_A_CPU:
        assert [line for line in written_lines if line.verdict == "missed"] == []
        assert any(line.verdict == "met" for line in written_lines)
    json.dumps([line.figures for line in written_lines])


def test_every_step_has_parts() -> None:
    assert list(TITLES) == list(command.STEPS) == sorted({part.step for part in PARTS})
    assert len(BY_KEY) == len(PARTS)


def test_times_come_first_and_what_the_software_gpu_proves_last() -> None:
    assert sorted(RUN_ORDER) == list(TITLES)
    proved = [part.is_proved_without_gpu for part in PARTS]
    assert proved == sorted(proved)
    needed = [part for part in PARTS if not part.is_proved_without_gpu]
    assert all(part.is_timed for part in needed[: len(TIMED)])
    assert {part.step for part in needed[: len(TIMED)]} == set(TIMED_STEPS)
    assert {part.step for part in PARTS} - {part.step for part in needed} == {2}
    assert {p.name for p in needed if p.step in (3, 4) and "expandable" in p.name} == {
        "resnet50-expandable"  # for cuDNN
    }


def test_tests_of_times_are_a_part_of_their_own() -> None:
    names = [part.name for part in PARTS if part.step == 0 and not part.is_proved_without_gpu]
    assert names == ["measure-times"]
    assert "measure" in {part.name for part in PARTS if part.is_proved_without_gpu}


def test_memory_parts_cover_both_kinds_of_segments() -> None:
    for step in (3, 4):
        for name in ("gpt2", "resnet50", "vit-bf16"):
            for kind, value in (("default", "False"), ("expandable", "True")):
                env = BY_KEY[f"{step:02d}-{name}-{kind}"].env
                assert env["PYTORCH_CUDA_ALLOC_CONF"] == f"expandable_segments:{value}"
                assert env["PYTORCH_ALLOC_CONF"] == f"expandable_segments:{value}"


def test_a_second_process_reports_a_missing_first_one(tmp_path: Path) -> None:
    report, written_lines = collected()
    BY_KEY["10-b-second-process"].run(Setting(tmp_path, dry=True), report)
    assert [(line.verdict, line.observed) for line in written_lines] == [
        ("skipped", "no cost cache: its first part did not finish")
    ]


# -- expectations ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allocated", "is_expandable", "verdict"),
    [(100, True, "met"), (101, True, "missed"), (101, False, "info")],
)
def test_allocated_bytes_are_within_the_budget_with_expandable_segments(
    allocated: int, is_expandable: bool, verdict: str
) -> None:
    report, written_lines = collected()
    plan_fields: dict[str, object] = {
        "budget_bytes": 100,
        "stats": {"allocated_peak_bytes": 7, "expandable_reserved_peak_bytes": 9},
    }
    memory._judge_allocated(
        report, "60%", plan_fields, StepPeaks(90, allocated, 200, 3), is_expandable
    )
    assert written_lines[0].verdict == verdict
    assert "3 retries" in written_lines[0].observed
    predicted_text = "9 B reserved predicted" if is_expandable else "7 B allocated predicted"
    assert written_lines[0].observed.endswith(predicted_text)


def test_ratios_compare_times_of_the_same_round() -> None:
    times = {"eager": [1.0, 2.0, 4.0], "remat": [1.5, 2.0, 8.0]}
    assert speed.time_ratio(times, "remat", "eager") == 1.5


# -- processes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("pass", FINISHED),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("raise SystemExit('the card is on fire')", "exit code 1: the card is on fire"),
        ("raise SystemExit(4)", "exit code 4: no output"),
    ],
)
def test_the_end_of_a_process_is_a_result(code: str, ended: str, tmp_path: Path) -> None:
    assert run_command([sys.executable, "-c", code], 60.0, tmp_path / "log") == ended


def test_a_hanging_part_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"sleep 600 & echo $! > {pid}; wait"
    for limit_s in (1.0, 10.0, 100.0):  # a busy machine may not have started it in one
        ended = run_command(["sh", "-c", code], limit_s, tmp_path / "log")
        assert ended == f"killed: not done within {limit_s:.0f} s"
        if pid.is_file() and pid.read_text().endswith("\n"):
            break
    assert _is_gone(int(pid.read_text()), within_s=PROCESS_LIMIT_S)


def _is_gone(pid: int, within_s: float) -> bool:
    """True if that process ends: a killed one may still run for a moment."""
    until = time.monotonic() + within_s
    while _is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_environment_reaches_the_process(tmp_path: Path) -> None:
    code = "import os; print(os.environ['PYTORCH_ALLOC_CONF'])"
    log = tmp_path / "log"
    env = BY_KEY["03-gpt2-expandable"].env
    assert run_command([sys.executable, "-c", code], 60.0, log, env) == FINISHED
    assert log.read_text() == "expandable_segments:True\n"


def test_lines_before_a_crash_are_kept(tmp_path: Path) -> None:
    report = verdicts.json_lines_report(tmp_path / "lines")
    report.judge("bytes", "few", "many", False, size=3)
    report.info("model", "small")
    with (tmp_path / "lines").open("a") as file:
        file.write('{"subject": "cut o')
    assert verdicts.read_checks(tmp_path / "lines") == [
        Check("bytes", "few", "many", "missed", {"size": 3}),
        Check("model", "", "small", "info"),
    ]
    assert verdicts.read_checks(tmp_path / "nothing") == []


@pytest.mark.slow
def test_a_failed_part_is_a_row_and_is_not_stored(tmp_path: Path) -> None:
    part = Part(2, "unknown", lambda setting, report: None)  # the child knows no such part
    (result,) = run_all([part], tmp_path, 60.0, dry=True)
    assert result.ended.startswith("exit code 1: ValueError")
    (row,) = result.rows()
    assert (row.subject, row.verdict) == ("the process", "missed")
    assert json.loads((tmp_path / "02-unknown.json").read_text())["ended"] == result.ended
    (second_end,) = run_all([part], tmp_path, 0.0, dry=True)
    assert second_end.ended == NO_TIME, "it was not stored"


@pytest.mark.slow
def test_finished_parts_are_stored_and_written_to_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept"
    options = ["--dry", "--steps", "2", "--folder", str(folder), "--out", str(tmp_path / "out")]
    assert command.main(options) == 0
    shown = capsys.readouterr().out
    assert "2. library workspaces: products" in shown
    assert "skipped  bytes left by a matmul in forward, and in backward: a CPU's" in shown
    (path,) = (tmp_path / "out").glob("*-gpu-dry.json")
    written = json.loads(path.read_text())
    (step,) = written["steps"]
    assert step["parts"][0]["ended"] == FINISHED
    assert written["skipped"] == 1
    assert written["machine"]["torch"] == torch.__version__

    parts = [part for part in PARTS if part.step == 2]
    (stored_end,) = run_all(parts, folder / "dry", 0.0, dry=True)  # there is no time for a process
    assert stored_end.ended == FINISHED
    assert stored_end.rows()
    (repeated_end,) = run_all(parts, folder / "dry", 0.0, dry=True, repeat=True)
    assert repeated_end.ended == NO_TIME
    assert [row.verdict for row in repeated_end.rows()] == ["skipped"]
    assert run_all(parts, folder / "dry", 0.0, dry=True) == [stored_end], (
        "running out of time is no result"
    )


# -- machines without a GPU, or without other packages --------------------------------------


@pytest.mark.slow
@without_gpu
def test_without_a_gpu_the_command_says_so() -> None:
    completed = subprocess.run(
        [ROOT / "scripts" / "gpu.sh"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == command.NO_DEVICE == 3
    assert completed.stderr == ""
    (line,) = completed.stdout.splitlines()
    assert re.match(r"no acceptance run: torch \S+ sees no CUDA device; python -m .* --dry", line)


def test_tests_marked_gpu_need_only_packages_of_the_gpu_machine() -> None:
    """A machine for its GPU has torch, transformers and pytest; the rest comes with the wheels."""
    files = marked_tests.marked_files()
    assert ROOT / "tests/torch/laws/test_gpu.py" in files
    assert Path(__file__) not in files
    allowed = {"torch", "transformers", "pytest", "_pytest", "remat", "tests", "benchmarks"}
    settings = [ROOT / "tests/conftest.py", ROOT / "tests/torch/conftest.py"]
    all_files = [*files, *(ROOT / "benchmarks" / "gpu").glob("*.py"), *settings]
    for file in _with_imported(all_files):
        foreign = {name.partition(".")[0] for name in _imports(file)}
        assert foreign <= allowed | sys.stdlib_module_names, file.name


def _imports(file: Path) -> list[str]:
    """Return the imports at the top level of a file: not those of its functions and `try`
    blocks."""
    names = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def _with_imported(files: list[Path]) -> set[Path]:
    """Return files with the files of the repository that they import."""
    seen: set[Path] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in _imports(file):
            parts = name.split(".")
            if parts[0] in ("tests", "benchmarks"):
                paths = [ROOT.joinpath(*parts[:n]).with_suffix(".py") for n in (2, 3, 4)]
                waiting += [path for path in paths if path.exists()]
    return seen


@pytest.mark.slow
def test_tests_marked_gpu_are_collected_without_pytest_timeout() -> None:
    """Its setting in pyproject.toml must not be an unknown one."""
    code = (
        "import sys; sys.modules['pytest_timeout'] = None; import pytest;"
        "sys.exit(pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', '-m', 'gpu',"
        "'tests/torch/runtime/test_rng_state.py']))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "test_a_step_with_recomputation_is_captured" in completed.stdout


# -- wheels ---------------------------------------------------------------------------------


def _named(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0].lower().replace("_", "-")


@pytest.mark.skipif(
    metadata.version("pulp").partition(".")[0] != "3", reason="constraints.txt has PuLP 3.3"
)
def test_the_wheels_are_everything_that_remat_needs_except_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [_named(text) for text in project["dependencies"]]
    with_torch = {"torch", "networkx", "numpy", "typing-extensions"}
    needed: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in with_torch or name in needed:
            continue
        needed.add(name)
        for text in metadata.requires(name) or ():
            if "extra ==" not in text:
                waiting.append(_named(text))
    needed = {name for name in needed if name != "tzdata"}  # pydantic's, on Windows
    assert needed == set(gpu_wheels.NEEDED)
    pins = gpu_wheels.pins((ROOT / "constraints.txt").read_text(), gpu_wheels.NEEDED)
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", pin) for pin in pins)


def test_a_wheel_that_is_not_pinned_is_named() -> None:
    text = "# numpy==1\nPuLP==3.3.2\npydantic_core==2.50.4\n"
    assert gpu_wheels.pins(text, ("pydantic-core", "pulp")) == [
        "pydantic_core==2.50.4",
        "PuLP==3.3.2",
    ]
    with pytest.raises(SystemExit, match=r"constraints\.txt has no numpy, nothing"):
        gpu_wheels.pins(text, ("pulp", "numpy", "nothing"))


def test_cbc_is_left_out(tmp_path: Path) -> None:
    wheel = tmp_path / "pulp-3.3.2-py3-none-any.whl"
    names = ["pulp/__init__.py", "pulp/solverdir/cbc/linux/i64/cbc", "pulp/solverdir/x.py"]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    gpu_wheels.lighten(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.namelist() == [names[0], names[2]]
        assert archive.read(names[2]) == names[2].encode()
    assert list(tmp_path.iterdir()) == [wheel]
