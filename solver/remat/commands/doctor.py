"""`remat doctor`: the state of the installation, and a remedy for each problem.

It checks Python, torch, devices, packages, solvers, cost cache, directory of offloaded tensors and
extras. No check raises: a torch that cannot be imported is a line of the report. Therefore no
module that imports torch is imported before the check that needs it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal

import typer

from remat.commands.common import files
from remat.commands.common.command_options import Json
from remat.commands.common.exits import EXIT_FAILED
from remat.commands.common.summaries import to_json_text
from remat.costs.devices import match_device
from remat.errors import RematError, one_line
from remat.frontend.costs.cost_cache import default_cache_path
from remat.limits.units import format_bytes
from remat.milp.solvers.availability import usable_backends
from remat.milp.solvers.pulp_solvers import find_family, is_highs

_MARKS = {"ok": "ok", "untested": "??", "missing": "--", "wrong": "!!"}


def doctor(as_json: Json = False) -> None:
    """Check versions, devices, solvers, cost cache and packages."""
    checks = run_checks()
    is_well = all(check.state != "wrong" for check in checks)
    if as_json:
        check_records = [asdict(check) for check in checks]
        files.print_json(to_json_text({"is_well": is_well, "checks": check_records}))
    else:
        width = max((len(check.name) for check in checks), default=0)
        columns = shutil.get_terminal_size().columns
        for check in checks:
            remedy = f"; {check.remedy}" if check.remedy else ""
            lead = f"{_MARKS[check.state]}  {check.name:<{width}}  "
            lines = textwrap.wrap(
                f"{check.text}{remedy}",
                max(columns, 80),
                initial_indent=lead,
                subsequent_indent=" " * len(lead),
                break_long_words=False,
                break_on_hyphens=False,
            )
            files.print_text("\n".join(lines))
    if not is_well:
        raise typer.Exit(EXIT_FAILED)


State = Literal["ok", "untested", "missing", "wrong"]

_REQUIREMENT = re.compile(
    r"""(?P<name>[\w.-]+) \s* (\[(?P<required_extras>.*?)\])? (?P<versions>[^;]*)
        (;.*\bextra\s*==\s*["'](?P<extra>[\w-]+)["'])?""",
    re.VERBOSE,
)
_MIN_VERSION, _BELOW_VERSION = re.compile(r">=\s*([\d.]+)"), re.compile(r"<\s*([\d.]+)")


@dataclass(frozen=True)
class Requirement:
    """A requirement of one package on another: `min_version` or newer, and below `below_version`
    unless that is "".

    `extra` is the extra of the requiring package that adds the requirement, "" for none.
    `required_extras` are the extras of the required package.
    """

    name: str
    min_version: str
    below_version: str
    extra: str
    required_extras: frozenset[str]

    @classmethod
    def parse(cls, line: str) -> Requirement | None:
        """Parse a `Requires-Dist` line of a package's metadata; None if it has another form."""
        match = _REQUIREMENT.match(line)
        if match is None:
            return None
        min_version, below_version = (
            _MIN_VERSION.search(match["versions"]),
            _BELOW_VERSION.search(match["versions"]),
        )
        return cls(
            name=match["name"],
            min_version=min_version[1] if min_version else "0",
            below_version=below_version[1] if below_version else "",
            extra=match["extra"] or "",
            required_extras=frozenset(
                part.strip() for part in (match["required_extras"] or "").split(",") if part
            ),
        )

    @property
    def install_command(self) -> str:
        """The pip command that installs a version within the requirement."""
        below_version = f",<{self.below_version}" if self.below_version else ""
        return f"pip install '{self.name}>={self.min_version}{below_version}'"

    def check_version(self, version: str) -> tuple[State, str]:
        """Return the state of an installed version ("ok", "wrong" if it is too old, "untested" if
        it is too new), and a text to append to it, such as "; remat needs 2.11"."""
        if _release_numbers(version) < _release_numbers(self.min_version):
            return "wrong", f"; remat needs {self.min_version}"
        if self.below_version and _release_numbers(version) >= _release_numbers(self.below_version):
            return (
                "untested",
                f", outside the tested range ({self.min_version} or newer, "
                f"below {self.below_version})",
            )
        return "ok", ""


def package_requirements(package: str) -> list[Requirement]:
    """Return the requirements in the package's metadata; [] if the package is not installed."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []
    return [requirement for line in lines if (requirement := Requirement.parse(line))]


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _release_numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, without zeros at the end: "2.13.0+cpu" is (2, 13),
    as is "2.13"."""
    release_match = re.match(r"[\d.]*", version)
    parts = release_match[0].split(".") if release_match else []
    numbers = [int(part) for part in parts if part]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


_WORST_FIRST: tuple[State, ...] = ("missing", "untested", "ok")
"""States of an extra."""

_PACKAGE = "remat"
_REINSTALL = "pip install --force-reinstall remat"
_NVIDIA_SMI_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Check:
    """One line of the report.

    State `untested` is a version newer than those that remat was tested with, which may work. State
    `missing` is an optional part that is not installed. `remedy` is the action to take, "" for
    none.
    """

    name: str
    state: State
    text: str
    remedy: str = ""


def run_checks() -> list[Check]:
    """Check Python, torch, devices, packages, solvers, cost cache, offloading and extras; never
    raise.

    Takes a few seconds at most, most of them to import torch.
    """
    groups: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("Python", _check_python),
        ("machine", _check_machine),
        ("torch", _check_torch),
        ("CUDA", _check_devices),
        ("packages", _check_packages),
        ("solvers", _check_solvers),
        ("cost cache", _check_cost_cache),
        ("offloading", _check_offloading),
        ("extras", _check_extras),
    ]
    return [check for name, group in groups for check in _checks_or_error(name, group)]


def _checks_or_error(name: str, group: Callable[[], Iterator[Check]]) -> list[Check]:
    """Return the checks of a group; if it raises, also a check with its error."""
    checks: list[Check] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checks.extend(group())
    except Exception as error:
        checks.append(Check(name, "wrong", one_line(error), _REINSTALL))
    return checks


def _check_python() -> Iterator[Check]:
    """Check the version of Python, and that remat is installed."""
    implementation = platform.python_implementation()
    text = f"{platform.python_version()} ({implementation}), {_path_from_home(sys.prefix)}"
    yield Check("Python", "ok", text)
    version = package_version(_PACKAGE)
    location = _path_from_home(Path(__file__).parents[1])
    if version is None:
        text = f"runs from {location}, not installed"
        yield Check("remat", "missing", text, "pip install remat")
    else:
        yield Check("remat", "ok", f"{version}, {location}")


def _check_machine() -> Iterator[Check]:
    """Report the processor and the memory."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    omp_threads = os.environ.get("OMP_NUM_THREADS")
    limits = f", {usable} of them for this process" if usable < cores else ""
    limits += f", OMP_NUM_THREADS={omp_threads}" if omp_threads else ""
    yield Check("processor", "ok", f"{cores} cores{limits} ({platform.machine()})")
    if hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield Check("memory", "ok", f"{format_bytes(total)}{_free_memory_text()}")


def _free_memory_text() -> str:
    """Return the free memory as text; "" if it is unknown or torch cannot be imported."""
    try:
        from remat.frontend.memory.device_memory import free_bytes
    except Exception:
        # torch is broken: the report has a separate line for it.
        return ""
    free = free_bytes("cpu")
    return "" if free is None else f", {format_bytes(free)} of it free"


# -- torch and its devices ------------------------------------------------------------------------


def _check_torch() -> Iterator[Check]:
    """Check that torch is installed, can be imported, and has a tested version."""
    needed = next((r for r in package_requirements(_PACKAGE) if r.name == "torch"), None)
    installed_version = package_version("torch")
    if installed_version is None:
        remedy = "pip install torch" if needed is None else needed.install_command
        yield Check("torch", "wrong", "not installed", remedy)
        return
    try:
        torch = import_module("torch")
    except Exception as error:
        text = f"{installed_version} cannot be imported: {one_line(error)}"
        yield Check("torch", "wrong", text, "pip install --force-reinstall torch")
        return
    build = "CPU build"
    if torch.version.cuda:
        build = f"built for CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"built for ROCm {torch.version.hip}"
    threads = torch.get_num_threads()
    text = f"{torch.__version__}, {build}, {threads} thread{'s' if threads > 1 else ''}"
    yield _version_check(needed, torch.__version__, text) if needed else Check("torch", "ok", text)


def _check_devices() -> Iterator[Check]:
    """Check that torch sees the GPUs; nothing if torch cannot be imported."""
    try:
        torch = import_module("torch")
    except Exception:
        # The torch check has reported it.
        return
    with warnings.catch_warnings(record=True) as cuda_warnings:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        reason = " ".join(str(w.message) for w in cuda_warnings)
        yield _no_device_check(bool(torch.version.cuda or torch.version.hip), reason)
        return
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        data_sheet = match_device(device.name)
        costs = f"roofline {data_sheet.name}" if data_sheet else "no roofline for it: measure costs"
        text = f"{device.name}, {format_bytes(device.total_memory)}, {costs}"
        yield Check(f"cuda:{number}", "ok", text)


def _no_device_check(is_gpu_build: bool, reason: str) -> Check:
    """Return the check of a machine where torch sees no GPU: fine without a GPU, otherwise with the
    remedy. `reason` is torch's warning, "" for none."""
    gpus = _nvidia_gpus()
    if not gpus:
        return Check("CUDA", "missing", "no CUDA device; remat plans and runs on the CPU")
    if not is_gpu_build:
        return Check(
            "CUDA",
            "wrong",
            f"this machine has {gpus}, but torch is a CPU build",
            "install a CUDA build of torch: https://pytorch.org/get-started/locally/",
        )
    text = f"this machine has {gpus}, but torch cannot use it"
    if reason:
        text += f": {one_line(Warning(reason)).removeprefix('Warning: ')}"
    remedy = "check CUDA_VISIBLE_DEVICES, and install a driver as new as torch's CUDA"
    return Check("CUDA", "wrong", text, remedy)


def _nvidia_gpus() -> str:
    """Return the GPUs that `nvidia-smi` reports; "" if it is not installed or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        completed = subprocess.run(
            query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    rows = [line.rpartition(",") for line in completed.stdout.splitlines() if "," in line]
    return " and ".join(f"{name.strip()} (driver {version.strip()})" for name, _, version in rows)


# -- packages and solvers -------------------------------------------------------------------------


def _check_packages() -> Iterator[Check]:
    """Check the packages that remat requires, except torch."""
    for requirement in package_requirements(_PACKAGE):
        if requirement.extra or requirement.name == "torch":
            continue
        if (installed_version := package_version(requirement.name)) is None:
            yield Check(requirement.name, "wrong", "not installed", requirement.install_command)
        else:
            yield _version_check(requirement, installed_version, installed_version)


def _version_check(needed: Requirement, version: str, text: str) -> Check:
    """Return the check of an installed version of a required package; `text` describes the
    version."""
    state, note = needed.check_version(version)
    return Check(needed.name, state, text + note, "" if state == "ok" else needed.install_command)


def _check_solvers() -> Iterator[Check]:
    """Check which solvers of integer programs can be used."""
    for fact in usable_backends():
        remedy = find_family(fact.name).remedy
        name = f"solver {fact.name}"
        if fact.usable:
            role = "the default" if is_highs(fact.name) else ""
            text = ", ".join(part for part in (fact.version, role, fact.reason) if part)
            yield Check(name, "ok", text or "works")
        else:
            yield Check(name, "missing", fact.reason.removesuffix(f" ({remedy})"), remedy)


def _check_offloading() -> Iterator[Check]:
    """Check that files for offloaded tensors can be created; nothing if torch cannot be
    imported."""
    try:
        from remat.frontend.runtime.host_file import (
            DIRECT_VARIABLE,
            DIRECTORY_VARIABLE,
            new_host_file,
            offload_directory,
        )
    except Exception:
        return  # torch is broken: the report has a separate line for it
    directory = offload_directory()
    try:
        new_host_file().close()
    except RematError as error:
        remedy = f"set {DIRECTORY_VARIABLE} to a directory on a local disk"
        if os.environ.get(DIRECT_VARIABLE):
            remedy += f", or unset {DIRECT_VARIABLE}"
        yield Check("offloading", "wrong", one_line(error), remedy)
        return
    free = format_bytes(shutil.disk_usage(directory).free)
    yield Check(
        "offloading", "ok", f"{_path_from_home(directory)}, {free} free, for steps on a CPU"
    )


def _check_extras() -> Iterator[Check]:
    """Check the packages of each extra, which `pip install 'remat[...]'` adds."""
    by_extra: dict[str, list[Requirement]] = {}
    for requirement in package_requirements(_PACKAGE):
        if requirement.extra:
            by_extra.setdefault(requirement.extra, []).append(requirement)
    for extra, extra_requirements in by_extra.items():
        texts: dict[State, list[str]] = {"ok": [], "untested": [], "missing": []}
        for requirement in extra_requirements:
            requirement_state, text = _extra_package_state(requirement)
            texts[requirement_state].append(text)
        state: State = next(candidate for candidate in _WORST_FIRST if texts[candidate])
        remedy = "" if state == "ok" else f"pip install '{_PACKAGE}[{extra}]'"
        yield Check(f"extra {extra}", state, ", ".join(texts[state]), remedy)


def _extra_package_state(requirement: Requirement) -> tuple[State, str]:
    """Return the state of a package that an extra of remat requires, and a text about it. It is
    "missing" if the package is absent or too old, or lacks a package of its own required extras."""
    version = package_version(requirement.name)
    if version is None:
        return "missing", f"{requirement.name} is not installed"
    state, note = requirement.check_version(version)
    if state == "wrong":
        return "missing", f"{requirement.name} {version} is older than {requirement.min_version}"
    for part in package_requirements(requirement.name):
        if part.extra in requirement.required_extras and package_version(part.name) is None:
            return "missing", f"{part.name} is not installed"
    return state, f"{requirement.name} {version}{note}"


# -- the cost cache -------------------------------------------------------------------------------


def _check_cost_cache() -> Iterator[Check]:
    """Check that the cost cache can be written and read."""
    path = default_cache_path()
    shown, name = _path_from_home(path), "cost cache"
    existing = next(p for p in (path, *path.parents) if p.exists())
    needed_access = os.W_OK if existing == path else os.W_OK | os.X_OK
    if not os.access(existing, needed_access) or not (existing == path or existing.is_dir()):
        text = f"{shown} cannot be written, so every run measures all costs"
        yield Check(name, "wrong", text, "set REMAT_CACHE_DIR to a directory that can be written")
        return
    if existing != path:
        yield Check(name, "ok", f"{shown}, created when costs are first measured")
        return
    try:
        # Read-only, so that a report changes nothing.
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=0.5)) as db:
            (entries,) = db.execute("SELECT COUNT(*) FROM costs").fetchone()
    except sqlite3.Error as error:
        text = f"{shown} cannot be read: {one_line(error)}"
        yield Check(name, "wrong", text, f"delete {shown}; remat creates it when needed")
        return
    size = format_bytes(sum(p.stat().st_size for p in path.parent.glob(f"{path.name}*")))
    yield Check(name, "ok", f"{shown}, {entries:,} entries, {size}")


def _path_from_home(path: str | Path) -> str:
    """Return the path with the home directory written as "~"."""
    home = Path.home()
    path = Path(path)
    return f"~{os.sep}{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
