"""Errors of `remat`: one line on stderr, nothing on stdout, the right exit code."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.command_line import Documents, command, quick, run, write_documents
from tests.helpers.process_limit import PROCESS_LIMIT_S

import remat
from remat.strategies import Auto, Exact


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    return write_documents(tmp_path_factory.mktemp("documents"))


def forged(text: bytes) -> bytes:
    """Return a trace whose last operation also returns the storage of the first."""
    data = json.loads(text)
    makers = [node for node in data["nodes"] if node["results"] and not node["view"]]
    makers[-1]["results"][0]["storage"] = makers[0]["results"][0]["storage"]
    return json.dumps(data).encode()


def newer(text: bytes) -> bytes:
    return json.dumps({**json.loads(text), "version": 99}).encode()


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda text: text[: len(text) // 2], "complete"),
    "half a gzip": (lambda text: gzip.compress(text)[:1000], "cannot read"),
    "forged": (forged, "damaged"),
    "of another version": (newer, "version 99"),
    "empty": (lambda text: b"", "no JSON document"),
    "binary": (lambda text: bytes(range(256)) * 9, "no JSON document"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_trace_is_refused(damage: str, documents: Documents, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    change, words = BROKEN[damage]
    file.write_bytes(change(gzip.decompress(documents.trace.read_bytes())))
    ended = quick("solve", file, "--budget", "60%")
    assert ended.code == 1
    assert str(file) in ended.error
    assert words in ended.error


def test_a_forged_plan_is_refused(documents: Documents) -> None:
    data = json.loads(gzip.decompress(documents.plan.read_bytes()))
    data["peak_bytes"] -= 1
    ended = quick("explain", "-", stdin=json.dumps(data).encode())
    assert ended.code == 1
    assert "stdin: remat.plan: peak_bytes" in ended.error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("measure {plan} --roofline h200", "expected a remat.trace document, found 'remat.plan'"),
        ("sweep {plan}", "expected a remat.trace"),
        ("compare {plan}", "expected a remat.trace"),
        ("explain {trace}", "expected a remat.plan"),
        ("diff {plan} {trace}", "expected a remat.plan"),
        ("plot {trace} -o {out}.svg", "expected a remat.plan"),
        ("solve {bare} --budget 60%", "remat measure"),
        ("solve {folder} --budget 60%", "Is a directory"),
        ("solve {folder}/none.json --budget 60%", "No such file"),
        ("solve {trace} --budget 60% -o {folder}/none/plan.json", "no directory"),
        ("solve {trace} --budget 60% -o {folder}", "is a directory"),
        ("solve {trace} --budget 60% --solver Nonesuch", "no solver is called"),
    ],
)
def test_a_wrong_document_or_file_is_refused(
    arguments: str, words: str, documents: Documents, tmp_path: Path
) -> None:
    ended = quick(*filled(arguments, documents, tmp_path))
    assert ended.code == 1
    assert words in ended.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("solve {trace}", "--budget"),
        ("solve {trace} --budget 60% --option k=4", "its options are gap, time_limit"),
        ("solve {trace} --budget 60% --strategy rotor --gap 0.1", "no option 'gap'"),
        ("solve {trace} --budget 60% --strategy nonesuch", "names are auto, exact"),
        ("solve {trace} --budget 60% --gap 2", "below 1"),
        ("sweep {trace} -o {out}.txt", ".json, .csv, .svg, .html"),
        ("sweep {trace} -o {out}.svg --device nonesuch", "known are v100"),
        ("measure {bare} --roofline nonesuch", "known are v100"),
        ("measure {bare} --roofline h200 --device cpu", "not both"),
        ("measure {bare} --device h100", "--roofline h100 estimates"),
        ("measure {bare} --device nonesuch", "use cpu or cuda"),
        ("trace hf:gpt2 --device nonesuch", "or a GPU: v100"),
        ("fit hf:gpt2 --optimizer lamb", "'lamb' is not known; use one of adamw"),
        ("fit hf:gpt2 --memory 60%", "the memory '60%' is not a number of bytes"),
        ("estimate hf:gpt2 --device mi300x", "or a GPU: v100"),
        ("estimate hf:gpt2 --reserve nonsense", "the reserve 'nonsense' is not a number of bytes"),
        ("run hf:gpt2 --budget 60% --device h100", "remat trace SOURCE --device h100"),
        ("diff - -", "only one"),
        ("plot {plan} -o {out}.xyz", "does not select a kind"),
        ("plot {plan} -o {out}.py", "--trace"),
        ("trace hf:gpt2 --autocast int8", "it must be bfloat16 or float16"),
        ("nonesuch", "No such command"),
    ],
)
def test_wrong_usage_has_exit_code_2(
    arguments: str, words: str, documents: Documents, tmp_path: Path
) -> None:
    ended = quick(*filled(arguments, documents, tmp_path))
    assert ended.code == 2
    assert words in ended.error


def test_an_infeasible_budget_has_its_own_exit_code(documents: Documents) -> None:
    ended = quick("solve", documents.trace, "--budget", "5%", "--time-limit", "2")
    assert ended.code == 3
    assert "infeasible" in ended.error


@pytest.mark.slow
def test_a_time_limit_without_a_plan_has_its_own_exit_code(
    documents: Documents, tmp_path: Path
) -> None:
    output = tmp_path / "plan.json"
    limited = ("--budget", "70%", "--strategy", "lp_rounding", "--time-limit", "0.01")
    ended = quick("solve", documents.trace, *limited, "-o", output)
    assert ended.code == 4
    assert "time_limit" in ended.error
    assert not output.exists()


def test_a_traceback_is_printed_only_for_debugging(documents: Documents) -> None:
    ended = quick("--debug", "explain", documents.trace)
    assert ended.code == 1
    assert ended.out == ""
    assert "Traceback" in ended.err
    assert ended.err.splitlines()[-1].startswith("remat: ")


def test_output_that_cannot_be_written_is_an_error(documents: Documents) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("has no /dev/full")
    with Path("/dev/full").open("w") as full:
        completed = subprocess.run(
            command("explain", documents.plan), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert completed.returncode == 1
    assert completed.stderr == "remat: No space left on device\n"


@pytest.mark.slow
def test_a_missing_package_is_named(tmp_path: Path) -> None:
    """The service's commands need what its extra installs; the others do not."""
    (tmp_path / "pydantic_settings.py").write_text("raise ModuleNotFoundError(name=__name__)")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = run("serve", env=env)
    assert ended.code == 2
    assert "pip install 'remat[server]'" in ended.error
    assert run("--help", env=env).code == 0


def filled(arguments: str, documents: Documents, folder: Path) -> list[str]:
    places = {**vars(documents), "folder": folder, "out": folder / "out"}
    return [word.format(**places) for word in arguments.split()]


def test_the_package_is_the_command_line() -> None:
    command_line = [sys.executable, "-m", "remat", "--version"]
    ended = subprocess.run(command_line, capture_output=True, text=True, timeout=PROCESS_LIMIT_S)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, remat.__version__, "")


def test_a_missing_file_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "plan.json.gz").touch()
    ended = quick("explain", tmp_path / "plan.jsn.gz")
    assert ended.code == 1
    assert "No such file; near is plan.json.gz; check the path" in ended.error


def test_the_defaults_of_gap_and_time_limit_are_in_the_help() -> None:
    words = " ".join(quick("solve", "--help").out.replace("│", " ").split())
    for option in ("gap", "time_limit"):
        for strategy in (Auto(), Exact()):
            assert f"{getattr(strategy, option):g} for {strategy.name}" in words
