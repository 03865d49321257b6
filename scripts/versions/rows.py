"""Table of the supported environments, and the commands that run in each."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from scripts.versions.images import Image
from scripts.versions.pythons import ROOT, Environment, RowSkipped, find_python

_ROOM_BYTES = 12 << 30
"""Disk space that creating an environment may need."""


class Row(Protocol):
    """One environment. `run` raises `RowSkipped` or `RowFailed`."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """A short description for the user."""
        ...

    @property
    def by_default(self) -> bool:
        """True if it runs when no row is named."""
        ...

    def run(self, versions: Path, options: argparse.Namespace) -> None: ...


@dataclass(frozen=True)
class Suite:
    """The repository's tests on the first of `pythons` that exists.

    Package versions are those of constraints.txt, except for the requirements in `overrides`.
    """

    name: str
    description: str
    pythons: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    marks: str = ""
    """An expression of pytest's marks that selects tests; "" selects all."""
    has_torch: bool = True
    by_default: bool = True

    def run(self, versions: Path, options: argparse.Namespace) -> None:
        environment = self.prepare(versions, options)
        environment.run("scripts/system_packages.sh")
        if self.has_torch:
            environment.run("python", "-m", "pip", "check")
        marks = ["not gpu", *(["not slow"] if options.quick else []), *filter(None, [self.marks])]
        processes = ["-n", os.environ.get("JOBS", "2"), "--dist", "worksteal"]
        tests = ["python", "-m", "pytest", "-q", *processes, "-m", " and ".join(marks)]
        environment.run(*tests, OMP_NUM_THREADS="1")

    def prepare(self, versions: Path, options: argparse.Namespace) -> Environment:
        """Return the environment with all packages, created if necessary."""
        environment = find_environment(self.name, self.pythons, versions, options)
        inputs = [*read_files("pyproject.toml", "constraints.txt"), repr(self)]
        if options.fresh or not environment.has_inputs(*inputs):
            environment.recreate()
            self._install(environment)
            environment.record_inputs(*inputs)
        environment.run(*_PIP, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        return environment

    def _install(self, environment: Environment) -> None:
        constraints = environment.folder / "constraints.txt"
        (pinned,) = read_files("constraints.txt")
        constraints.write_text(remove_pins(pinned, self.overrides))
        with_constraints = ["--constraint", str(constraints)]
        environment.run(*_PIP, "--upgrade", *with_constraints, "pip")
        torch = next((text for text in self.overrides if normalized_name(text) == "torch"), "torch")
        if self.has_torch and (index := os.environ.get("TORCH_INDEX")):
            environment.run(*_PIP, *with_constraints, "--index-url", index, torch)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        requirements = runpy.run_path(str(ROOT / "docker/requirements.py"))["requirements"]
        extras = list(project["optional-dependencies"])
        wanted = requirements(extras, [] if self.has_torch else ["torch"])
        environment.run(*_PIP, *with_constraints, "--group", "dev", *wanted, *self.overrides)


@dataclass(frozen=True)
class SoftwareGpu(Suite):
    """The tables of `benchmarks.software_gpu`, with a CUDA build of torch on the software GPU.

    The environment variable ARGS has arguments of that command.
    """

    def run(self, versions: Path, options: argparse.Namespace) -> None:
        """Run the tables. Raises `RowSkipped` without a C compiler."""
        if shutil.which("cc") is None:
            raise RowSkipped("the software GPU is built with a C compiler, and there is none")
        if not (versions / self.name).exists():
            print(f"A CUDA build of torch is installed into {versions}: 5.5 GB", flush=True)
        environment = self.prepare(versions, options)
        arguments = shlex.split(os.environ.get("ARGS", ""))
        environment.run("python", "-m", "benchmarks.software_gpu", *arguments)


@dataclass(frozen=True)
class NewUser:
    """The experience of a new user: `pip install .` with the newest versions of all dependencies.

    It runs the first example of README.md.
    """

    name: str
    description: str
    pythons: tuple[str, ...]
    by_default: bool = True

    def run(self, versions: Path, options: argparse.Namespace) -> None:
        environment = find_environment(self.name, self.pythons, versions, options)
        inputs = [*read_files("pyproject.toml"), repr(self)]
        empty = environment.folder / "empty"
        settings = {"HF_HUB_OFFLINE": "1", "REMAT_CACHE_DIR": str(environment.folder / "costs")}
        if options.fresh or not environment.has_inputs(*inputs):
            environment.recreate()
            empty.mkdir()
            if index := os.environ.get("TORCH_INDEX"):
                environment.run(*_PIP, "--index-url", index, "torch")
            environment.run(*_PIP, ROOT)
            environment.run("python", "-m", "pip", "check")
            environment.run("python", "-c", _WITHOUT_EXTRAS, folder=empty, **settings)
            environment.run(*_PIP, f"{ROOT}[cli,hf,server]")
            environment.record_inputs(*inputs)
        environment.run(*_PIP, "--no-deps", "--force-reinstall", ROOT)
        environment.run("python", "-m", "pip", "check")
        (empty / "first.py").write_text(first_example())
        environment.run("python", "first.py", folder=empty, **settings)
        environment.run("remat", "doctor", folder=empty, **settings)


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


def find_environment(
    name: str, pythons: Sequence[str], versions: Path, options: argparse.Namespace
) -> Environment:
    """Return the environment of a row, which may not exist yet.

    Raises `RowSkipped` without a Python or without enough disk space.
    """
    versions.mkdir(parents=True, exist_ok=True)
    python = find_python(pythons, versions / "debian", options.debian)
    folder = versions / (name if python.root is None else f"{name}-debian")
    free_bytes = shutil.disk_usage(versions).free
    if free_bytes < _ROOM_BYTES and not folder.exists():
        free = f"{free_bytes / 2**30:.1f} GiB are free in {versions}"
        raise RowSkipped(f"{free}, and an environment may take {_ROOM_BYTES >> 30} GiB")
    return Environment(python, folder)


def read_files(*names: str) -> list[str]:
    """Return the texts of files of the repository."""
    return [(ROOT / name).read_text() for name in names]


def normalized_name(requirement: str) -> str:
    """Return the package name of a requirement in pip's normalized form."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*", requirement)[0]).lower()  # pyright: ignore


def remove_pins(constraints: str, overrides: Sequence[str]) -> str:
    """Return the text of constraints.txt without the packages in `overrides`."""
    names = {normalized_name(requirement) for requirement in overrides}
    return "".join(
        line for line in constraints.splitlines(keepends=True) if normalized_name(line) not in names
    )


def first_example() -> str:
    """Return the first Python example of README.md."""
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
        overrides=("pulp==4.*", "torch==2.15.*", "triton==3.9.*; sys_platform == 'linux'"),
    ),
    Suite(
        "torch-2.11",
        "Python 3.12, torch 2.11: the tests that use torch",
        ("3.12", "3.13", "3.11"),
        overrides=("torch==2.11.*", "triton==3.6.*; sys_platform == 'linux'", "setuptools"),
        marks="torch",
    ),
    SoftwareGpu(
        "software-gpu",
        "Python 3.11, a CUDA build of torch 2.14: the tests marked gpu, and memory, code and "
        "numbers of CUDA, without a GPU",
        ("3.11", "3.12", "3.13"),
        overrides=("torch==2.14.*", "triton", "setuptools"),
    ),
    Suite(
        "pulp-3",
        "Python 3.13, PuLP 3.3, without torch: all other tests",
        ("3.13",),
        marks="not torch",
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
