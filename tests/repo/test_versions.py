"""The matrix of `make test-versions`: its rows, and how it finds and creates environments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from scripts.versions import debian
from scripts.versions.pythons import (
    ROOT,
    Environment,
    Python,
    can_make_environments,
    candidate_interpreters,
)
from scripts.versions.rows import ROWS, Suite, first_example, remove_pins
from tests.helpers.process_limit import PROCESS_LIMIT_S

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TABLE = [row for row in ROWS if isinstance(row, Suite)]
PINNED = (ROOT / "constraints.txt").read_text()
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


# -- supported versions ---------------------------------------------------------------------------


def test_every_supported_python_has_a_row() -> None:
    prefix = "Programming Language :: Python :: "
    promised = {line.removeprefix(prefix) for line in PROJECT["classifiers"] if prefix in line}
    assert promised == {row.pythons[0] for row in TABLE}


@pytest.mark.parametrize("name", ["torch", "pulp"])
def test_the_oldest_supported_version_has_a_row(name: str) -> None:
    (promised,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == name)
    (least,) = (clause.version for clause in promised.specifier if clause.operator == ">=")
    pins = [*PINNED.splitlines(), *(clause for row in TABLE for clause in row.overrides)]
    tested = [re.split("==", pin)[1] for pin in pins if pin.lower().startswith(f"{name}==")]
    oldest = min(Version(version.removesuffix(".*")) for version in tested)
    assert oldest.release[: len(Version(least).release)] == Version(least).release


def test_the_documentation_lists_the_rows() -> None:
    page = (ROOT / "docs/contributing.md").read_text()
    section = page.partition("\n## Environments\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\| `([\w.-]+)` \|", section, re.MULTILINE)
    assert table == [row.name for row in ROWS]
    assert "remat.optimize" in first_example()


def test_only_tests_below_tests_torch_import_torch() -> None:
    """They run on every version of torch; all others run without it."""
    assert {row.marks for row in TABLE} == {"", "torch", "not torch"}
    imports_torch = re.compile(r"(?m)^(import|from) (torch|transformers|remat\.frontend)\b")
    files = set((ROOT / "tests").rglob("test_*.py"))
    with_torch = set((ROOT / "tests/torch").rglob("test_*.py"))
    for file in files - with_torch:
        assert not imports_torch.search(file.read_text()), file


@pytest.mark.slow
def test_the_other_tests_are_collected_without_torch(tmp_path: Path) -> None:
    hidden = "import sys\nsys.modules.update(dict.fromkeys(['torch', 'transformers']))\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "not torch", "tests"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    completed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout[-3000:]
    assert "torch is not installed" in completed.stdout
    assert "test_solve.py" in completed.stdout
    assert "test_enable.py" not in completed.stdout


# -- environments ---------------------------------------------------------------------------------


def test_changed_versions_are_not_pinned() -> None:
    pinned = "# made by\nPuLP==3.3.2\npluggy==1.7.0\ntorch==2.13.0\ntorchvision==0.28.0\n"
    remaining = remove_pins(pinned, ("pulp==4.*", "torch==2.15.*"))
    assert remaining == "# made by\npluggy==1.7.0\ntorchvision==0.28.0\n"
    for row in TABLE:
        removed_count = len(PINNED.splitlines()) - len(
            remove_pins(PINNED, row.overrides).splitlines()
        )
        assert removed_count == len(row.overrides), f"{row.name} names what is not pinned"


def test_a_python_counts_only_if_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv puts a command for every version on the path; most of them fail."""
    shims, versions = tmp_path / "shims", tmp_path / f"versions/{HERE}.0/bin"
    for folder in (shims, versions):
        folder.mkdir(parents=True)
    name = f"python{HERE}"
    (shims / name).write_text(f"#!/bin/sh\necho 'pyenv: {name}: command not found'; exit 127\n")
    (shims / name).chmod(0o755)
    (versions / name).symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(shims))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert candidate_interpreters(HERE) == [str(shims / name), str(versions / name)]
    assert [
        can_make_environments(candidate, HERE) for candidate in candidate_interpreters(HERE)
    ] == [False, True]
    assert not can_make_environments(sys.executable, "3.0")
    assert candidate_interpreters("3.0") == []


def test_an_environment_is_rebuilt_when_its_inputs_change(tmp_path: Path) -> None:
    environment = Environment(Python("3.13", "python3.13"), tmp_path)
    assert not environment.has_inputs("a", "b")
    environment.record_inputs("a", "b")
    assert environment.has_inputs("a", "b")
    assert not environment.has_inputs("a", "c")
    assert not Environment(Python("3.13", "/opt/python3.13"), tmp_path).has_inputs("a", "b")


def test_unavailable_rows_are_skipped_with_the_reason(tmp_path: Path) -> None:
    environment = {"PATH": "/nowhere", "HOME": "/nowhere", "VERSIONS_DIR": str(tmp_path)}

    def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "scripts.versions", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    completed = ended("pinned", "newest")
    assert completed.returncode == 0, completed.stderr
    assert "pinned       skipped: there is no Python 3.11 here that can make" in completed.stdout
    assert re.search("newest +skipped: there is no Python 3.13 here, and ", completed.stdout)
    assert list(tmp_path.iterdir()) == []
    refused = ended("newst")
    assert refused.returncode == 2
    assert "there is no row 'newst'; there are pinned, newest, torch-2.11" in refused.stderr


# -- a Debian of our own --------------------------------------------------------------------------


def test_commands_in_a_root_folder_run_as_in_a_separate_system(tmp_path: Path) -> None:
    if reason := debian.cannot_enter_reason():
        pytest.skip(reason)
    root, shared = tmp_path / "root", tmp_path / "shared"
    for folder in (root / "proc", root / "run", root / "etc", shared):
        folder.mkdir(parents=True)
    system = [path for path in map(Path, ("/usr", "/bin", "/lib", "/lib64")) if path.exists()]
    script = "echo $$; pwd; echo $A; ls /; echo 1 > /etc/here; echo 2 > here; sleep 60 & exit 3"
    command = [*debian.enter_command(root, shared, [*system, shared], A="b c"), "sh", "-c", script]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_LIMIT_S)
    assert completed.returncode == 3, completed.stderr
    pid, folder, variable, *seen = completed.stdout.splitlines()
    assert int(pid) < 100, "in its own process namespace, which ends with the command"
    assert (folder, variable) == (str(shared), "b c")
    assert set(seen) >= {"dev", "proc", "usr"}
    assert "home" not in seen
    assert (root / "etc/here").read_text() == "1\n"
    assert (shared / "here").read_text() == "2\n"
    assert str(root) not in Path("/proc/mounts").read_text()


def test_pip_has_the_same_settings_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, links = tmp_path / "packages/simple", tmp_path / "wheels"
    for folder in (index, links):
        folder.mkdir(parents=True)
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nextra-index-url = file://{index}\n https://example.org/simple\n")
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    pip_config = debian.read_pip_config()
    if not pip_config:
        pytest.skip("there is no pip here")
    settings = debian.to_pip_conf(pip_config)
    assert f"extra-index-url = file://{index} https://example.org/simple\n" in settings
    assert f"find-links = {links}\n" in settings
    shared = set(debian.local_index_folders(pip_config))
    assert {index.parent, links} <= set(debian.local_index_folders(settings)) <= shared
