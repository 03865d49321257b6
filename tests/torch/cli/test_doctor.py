"""The report on this machine, and on machines where something is broken."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tests.helpers.process_limit import PROCESS_LIMIT_S

import remat
from remat.commands import doctor
from remat.commands.doctor import Check, Requirement, run_checks
from remat.frontend.costs.cost_cache import CostCache, MeasuredCost, default_cache_path
from remat.milp.solvers.pulp_solvers import IS_PULP_4


@pytest.fixture(scope="module")
def report() -> dict[str, Check]:
    began = time.monotonic()
    checks = run_checks()
    assert time.monotonic() - began < 100  # it waits for nothing
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def test_the_report_covers_this_machine(report: dict[str, Check]) -> None:
    assert report["Python"].text.startswith(platform.python_version())
    assert report["torch"].state == "ok"
    assert report["torch"].text.startswith(torch.__version__)
    assert report["solver HiGHS"].state == "ok"
    assert report["solver HiGHS"].text == f"{metadata.version('highspy')}, the default"
    for package in ("pulp", "networkx", "pydantic", "highspy"):
        assert report[package] == Check(package, "ok", metadata.version(package))
    assert str(os.cpu_count()) in report["processor"].text
    assert "GiB" in report["memory"].text
    extras = {name.removeprefix("extra ") for name in report if name.startswith("extra ")}
    assert extras == set(metadata.metadata("remat").get_all("Provides-Extra") or ())
    assert extras >= {"cli", "client", "hf", "postgres", "ray", "server", "viz"}
    if not torch.cuda.is_available():
        assert report["CUDA"].state in ("missing", "wrong")


def test_the_directory_of_offloaded_tensors_is_checked(
    report: dict[str, Check], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "free, for steps on a CPU" in report["offloading"].text
    monkeypatch.setenv("REMAT_OFFLOAD_DIR", str(tmp_path / "absent"))
    (check,) = doctor._check_offloading()
    assert check.state == "wrong"
    assert str(tmp_path / "absent") in check.text
    assert "REMAT_OFFLOAD_DIR" in check.remedy


def test_every_failed_check_has_a_remedy(report: dict[str, Check]) -> None:
    for check in report.values():
        assert "\n" not in check.text + check.remedy
        assert check.text
        if check.state == "wrong" or (check.state == "missing" and check.name != "CUDA"):
            assert check.remedy, check
        if check.state == "ok":
            assert not check.remedy, check


def named(name: str) -> Check:
    group = {
        "cost cache": doctor._check_cost_cache,
        "torch": doctor._check_torch,
        "CUDA": doctor._check_devices,
    }
    (check,) = doctor._checks_or_error(name, group[name])
    return check


# -- the cost cache -------------------------------------------------------------------------------


def test_a_cost_cache_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "costs"))
    empty = named("cost cache")
    assert empty.state == "ok"
    assert empty.text.startswith(os.path.join("~", "costs"))
    assert not (tmp_path / "costs").exists(), "the report creates nothing"
    with CostCache() as cache:
        for number in range(3):
            cache.put(["add", number], MeasuredCost(1e-6, 0))
    check = named("cost cache")
    assert check.state == "ok"
    assert "3 entries, " in check.text
    assert "KiB" in check.text


@pytest.mark.parametrize("folder", ["costs", "./costs", "~/costs"])
def test_the_folder_of_the_cost_cache_may_be_relative(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REMAT_CACHE_DIR", folder)
    with CostCache() as cache:
        cache.put(["add", 1], MeasuredCost(1e-6, 0))
    assert list((tmp_path / "costs").iterdir()), "the file is there"
    check = named("cost cache")
    assert (check.state, check.remedy) == ("ok", "")
    assert "1 entries, " in check.text


def test_a_damaged_cost_cache_is_reported() -> None:
    path = default_cache_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nonsense" * 1000)
    check = named("cost cache")
    assert (check.state, check.remedy) == ("wrong", f"delete {path}; remat creates it when needed")


def test_a_cost_cache_that_cannot_be_created_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "file" / "below"))
    check = named("cost cache")
    assert check.state == "wrong"
    assert "REMAT_CACHE_DIR" in check.remedy


# -- broken environments --------------------------------------------------------------------------


def report_of_process(directory: Path) -> dict[str, Check]:
    """Return the report of a process that finds the modules of this directory before all others."""
    code = "from remat.commands.doctor import run_checks\nfor c in run_checks(): print(repr(c))"
    root = Path(remat.__file__).parents[1]
    path = os.pathsep.join([str(directory), str(root)])
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=PROCESS_LIMIT_S,
    )
    checks: list[Check] = [eval(line, {"Check": Check}) for line in ended.stdout.splitlines()]
    return {check.name: check for check in checks}


@pytest.mark.slow
def test_a_broken_torch_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: cannot open')")
    report = report_of_process(tmp_path)
    assert report["torch"].state == "wrong"
    assert "cannot be imported: OSError: libtorch.so: cannot open" in report["torch"].text
    assert "pip install" in report["torch"].remedy
    assert report["memory"].state == report["solver HiGHS"].state == "ok"
    assert not {name for name in report if name.lower().startswith("cuda")}


def command(directory: Path, name: str, text: str) -> None:
    directory.mkdir(exist_ok=True)
    file = directory / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.mark.skipif(os.name == "nt", reason="a shell script stands for the driver's command")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is usable here")
def test_a_gpu_that_torch_cannot_use_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    command(tmp_path, "nvidia-smi", "echo 'NVIDIA H200, 570.1'; echo 'NVIDIA L4, 570.1'")
    check = named("CUDA")
    assert check.state == "wrong"
    gpus = "NVIDIA H200 (driver 570.1) and NVIDIA L4 (driver 570.1)"
    assert check.text.startswith(f"this machine has {gpus}, but torch")
    assert check.remedy
    command(tmp_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert named("CUDA").state == "missing"


@pytest.mark.parametrize(
    ("line", "version", "state"),
    [
        ("torch<2.16,>=2.11", "2.13.0+cpu", "ok"),
        ("torch<2.16,>=2.11", "2.11", "ok"),
        ("torch<2.16,>=2.11", "2.15.9", "ok"),
        ("torch<2.16,>=2.11.0", "2.11", "ok"),
        ("torch<2.16,>=2.11", "2.11.0", "ok"),
        ("torch<2.16.0,>=2.11", "2.16", "untested"),
        ("torch<2.16,>=2.11", "2.9.1", "wrong"),
        ("torch<2.16,>=2.11", "2.16.0", "untested"),
        ("torch<2.16,>=2.11", "3.0", "untested"),
        ("pulp[cbc]<5,>=3.3.2; extra == 'cbc'", "4.2.0", "ok"),
        ("pulp[cbc]<5,>=3.3.2; extra == 'cbc'", "5.0.0a1", "untested"),
        ("rich>=13.9", "99.1", "ok"),
        ("highspy", "1.0", "ok"),
    ],
)
def test_versions_are_judged_by_their_requirements(line: str, version: str, state: str) -> None:
    requirement = Requirement.parse(line)
    assert requirement is not None
    status, words = requirement.check_version(version)
    assert status == state
    assert ("outside the tested range" in words) == (state == "untested")
    assert ("remat needs" in words) == (state == "wrong")


def test_requirements_are_read_from_metadata() -> None:
    read = Requirement.parse('pulp[a, cbc]<5,>=3.3.2; python_version > "3" and extra == "b"')
    assert read == Requirement("pulp", "3.3.2", "5", "b", frozenset({"a", "cbc"}))
    assert read.install_command == "pip install 'pulp>=3.3.2,<5'"
    assert Requirement.parse("numpy (>=1.26)") == Requirement("numpy", "1.26", "", "", frozenset())


def test_a_torch_that_is_too_old_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    check = named("torch")
    assert check.state == "wrong"
    assert check.remedy.startswith("pip install 'torch>=2.11")


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, **packages: tuple[str, ...]) -> None:
    """Install packages of these versions and requirements in front of all others."""
    for name, (version, *requires) in packages.items():
        about = folder / f"{name}-{version}.dist-info"
        about.mkdir(exist_ok=True)
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (about / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder))


def test_versions_newer_than_the_tested_ones_are_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(
        tmp_path,
        monkeypatch,
        remat=(
            "1.0",
            "torch<2.1,>=2.0",
            "pulp<5,>=3.3.2",
            "typer<1,>=0.15; extra == 'cli'",
            "rich>=1; extra == 'cli'",
        ),
        pulp=("7.1.0",),
        typer=("1.2",),
    )
    wrong_range = named("torch")
    assert wrong_range.state == "untested"
    assert wrong_range.text.endswith(", outside the tested range (2.0 or newer, below 2.1)")
    assert wrong_range.remedy == "pip install 'torch>=2.0,<2.1'"
    (pulp,) = doctor._check_packages()
    assert pulp == Check(
        "pulp",
        "untested",
        "7.1.0, outside the tested range (3.3.2 or newer, below 5)",
        "pip install 'pulp>=3.3.2,<5'",
    )
    (cli,) = doctor._check_extras()
    assert (cli.name, cli.state, cli.remedy) == (
        "extra cli",
        "untested",
        "pip install 'remat[cli]'",
    )
    assert cli.text == "typer 1.2, outside the tested range (0.15 or newer, below 1)"


def test_an_extra_includes_the_extras_of_its_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`remat[cbc]` is `pulp[cbc]`, and that is a package of another name."""
    installed(
        tmp_path,
        monkeypatch,
        remat=("1.0", "pulp[cbc]<5,>=3.3.2; extra == 'cbc'"),
        pulp=("4.2.0", "cbcthere; extra == 'cbc'", "glpk; extra == 'glpk'"),
    )
    (check,) = doctor._check_extras()
    missing = "cbcthere is not installed"
    assert check == Check("extra cbc", "missing", missing, "pip install 'remat[cbc]'")
    installed(tmp_path, monkeypatch, cbcthere=("1",))
    (check,) = doctor._check_extras()
    assert check == Check("extra cbc", "ok", "pulp 4.2.0")


def test_the_remedy_for_cbc_depends_on_the_pulp_version(report: dict[str, Check]) -> None:
    if report["solver CBC"].state == "missing":
        expected = (
            "pip install 'remat[cbc]'" if IS_PULP_4 else "install a PuLP that bundles CBC, or `cbc`"
        )
        assert report["solver CBC"].remedy == expected


@pytest.mark.gpu
def test_a_gpu_is_reported(report: dict[str, Check]) -> None:
    actual = report["cuda:0"]
    assert actual.state == "ok"
    assert torch.cuda.get_device_name(0) in actual.text
    assert "GiB" in actual.text
