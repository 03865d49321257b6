"""The matrix: environments, and what is run in each."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from scripts.versions.images import Image
from scripts.versions.pythons import ROOT, Environment, Skipped, find

_ROOM_BYTES = 12 << 30
"""What a row may take on the disk while it is made."""


class Row(Protocol):
    """A line of the matrix. `run` raises `Skipped`, or `Failed`."""

    @property
    def name(self) -> str: ...

    @property
    def what(self) -> str:
        """In a few words, for people."""
        ...

    @property
    def by_default(self) -> bool:
        """Whether it runs where no row is named."""
        ...

    def run(self, versions: Path, options: argparse.Namespace) -> None: ...


@dataclass(frozen=True)
class Suite:
    """Tests of the repository in an environment of `pythons`, the first of them that is here, with
    the versions of constraints.txt but for those that `instead` names."""

    name: str
    what: str
    pythons: tuple[str, ...]
    instead: tuple[str, ...] = ()
    side: str = ""
    """An expression of pytest's marks; "" is all tests."""
    has_torch: bool = True
    by_default: bool = True

    def run(self, versions: Path, options: argparse.Namespace) -> None:
        found = prepared(self.name, self.pythons, versions, options)
        inputs = [*read("pyproject.toml", "constraints.txt"), repr(self)]
        if options.fresh or not found.is_made_from(*inputs):
            found.empty()
            self._install(found)
            found.made_from(*inputs)
        found.run("scripts/system_packages.sh")
        found.run(*_PIP, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        if self.has_torch:
            found.run("python", "-m", "pip", "check")
        marks = ["not gpu", *(["not slow"] if options.quick else []), *filter(None, [self.side])]
        processes = ["-n", os.environ.get("JOBS", "2"), "--dist", "worksteal"]
        tests = ["python", "-m", "pytest", "-q", *processes, "-m", " and ".join(marks)]
        found.run(*tests, OMP_NUM_THREADS="1")

    def _install(self, found: Environment) -> None:
        constraints = found.folder / "constraints.txt"
        (pinned,) = read("constraints.txt")
        constraints.write_text(without_pins(pinned, self.instead))
        with_constraints = ["--constraint", str(constraints)]
        found.run(*_PIP, "--upgrade", *with_constraints, "pip")
        torch = next((each for each in self.instead if name_of(each) == "torch"), "torch")
        if self.has_torch and (index := os.environ.get("TORCH_INDEX")):
            found.run(*_PIP, *with_constraints, "--index-url", index, torch)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        requirements = runpy.run_path(str(ROOT / "docker/requirements.py"))["requirements"]
        extras = list(project["optional-dependencies"])
        wanted = requirements(extras, [] if self.has_torch else ["torch"])
        found.run(*_PIP, *with_constraints, "--group", "dev", *wanted, *self.instead)


@dataclass(frozen=True)
class NewUser:
    """What somebody gets who has nothing of ours but the repository: `pip install .`, the newest of
    everything, and the first example of README.md."""

    name: str
    what: str
    pythons: tuple[str, ...]
    by_default: bool = True

    def run(self, versions: Path, options: argparse.Namespace) -> None:
        found = prepared(self.name, self.pythons, versions, options)
        inputs = [*read("pyproject.toml"), repr(self)]
        empty = found.folder / "empty"
        settings = {"HF_HUB_OFFLINE": "1", "REMAT_CACHE_DIR": str(found.folder / "costs")}
        if options.fresh or not found.is_made_from(*inputs):
            found.empty()
            empty.mkdir()
            if index := os.environ.get("TORCH_INDEX"):
                found.run(*_PIP, "--index-url", index, "torch")
            found.run(*_PIP, ROOT)
            found.run("python", "-m", "pip", "check")
            found.run("python", "-c", _WITHOUT_EXTRAS, folder=empty, **settings)
            found.run(*_PIP, f"{ROOT}[cli,hf,server]")
            found.made_from(*inputs)
        found.run(*_PIP, "--no-deps", "--force-reinstall", ROOT)
        found.run("python", "-m", "pip", "check")
        (empty / "first.py").write_text(first_example())
        found.run("python", "first.py", folder=empty, **settings)
        found.run("remat", "doctor", folder=empty, **settings)


_PIP = ("python", "-m", "pip", "install", "--quiet", "--no-cache-dir")

_WITHOUT_EXTRAS = """
import torch, remat
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
                              for _ in range(6)))
x = torch.randn(256, 64)
fast = remat.optimize(model, "80%", example_inputs=(x,), differentiate="all")
fast(x).sum().backward()
assert fast.plan.peak_bytes <= fast.plan.budget_bytes
print(fast.plan)
"""


def prepared(
    name: str, pythons: Sequence[str], versions: Path, options: argparse.Namespace
) -> Environment:
    """The environment of a row, which may not be made yet."""
    versions.mkdir(parents=True, exist_ok=True)
    python = find(pythons, versions / "debian", options.debian)
    folder = versions / (name if python.root is None else f"{name}-debian")
    free_bytes = shutil.disk_usage(versions).free
    if free_bytes < _ROOM_BYTES and not folder.exists():
        free = f"{free_bytes / 2**30:.1f} GiB are free in {versions}"
        raise Skipped(f"{free}, and an environment may take {_ROOM_BYTES >> 30} GiB")
    return Environment(python, folder)


def read(*names: str) -> list[str]:
    """Files of the repository."""
    return [(ROOT / name).read_text() for name in names]


def name_of(requirement: str) -> str:
    """The name in a requirement, as pip compares it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*", requirement)[0]).lower()  # pyright: ignore


def without_pins(constraints: str, instead: Sequence[str]) -> str:
    """constraints.txt without what is to have another version."""
    others = {name_of(each) for each in instead}
    return "".join(
        line for line in constraints.splitlines(keepends=True) if name_of(line) not in others
    )


def first_example() -> str:
    """The first Python of README.md."""
    from tests.helpers.doc_snippets import blocks

    return next(block.text for block in blocks(ROOT / "README.md") if block.language == "python")


ROWS: tuple[Row, ...] = (
    Suite(
        "pinned",
        "Python 3.11 and the versions of constraints.txt: all tests, as `make test-all`",
        ("3.11",),
        by_default=False,
    ),
    Suite(
        "newest",
        "Python 3.13, PuLP 4, torch 2.15: all tests",
        ("3.13",),
        instead=("pulp==4.*", "torch==2.15.*"),
    ),
    Suite(
        "torch-2.11",
        "Python 3.12, torch 2.11: the tests that use torch",
        ("3.12", "3.13", "3.11"),
        instead=("torch==2.11.*", "setuptools"),
        side="torch",
    ),
    Suite(
        "pulp-3",
        "Python 3.13, PuLP 3.3, without torch: all other tests",
        ("3.13",),
        side="not torch",
        has_torch=False,
    ),
    NewUser(
        "new-user",
        "Python 3.13, `pip install .` and the newest of everything: README's first example",
        ("3.13",),
    ),
    Image("server-image", "docker/: the server and compose.yaml, built and run", "server", 4 << 30),
    Image(
        "worker-image", "docker/: the worker, built and run without a GPU", "worker-gpu", 20 << 30
    ),
)
