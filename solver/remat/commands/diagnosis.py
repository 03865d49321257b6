"""`examine`: what is here, what is missing, what is wrong, and what to do about it.

Nothing raises: a torch that cannot be imported is a line of the report. So nothing here imports
torch, or anything that does, before the check that needs it.
"""

from __future__ import annotations

import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from remat.commands.requirements import Requirement, State, requirements, version_of
from remat.costs.devices import match_device
from remat.errors import one_line
from remat.frontend.costs.cost_cache import default_cache_path
from remat.limits.units import format_bytes
from remat.milp.solvers.availability import usable_backends
from remat.milp.solvers.pulp_solvers import find_family, is_highs

_GRAVEST: tuple[State, ...] = ("missing", "untested", "ok")

_PACKAGE = "remat"
_REINSTALL = "pip install --force-reinstall remat"
_NVIDIA_PATIENCE_S = 3.0


@dataclass(frozen=True)
class Check:
    """One line of the report. `untested` is newer than what remat was tested with, and may well
    work; `missing` is what works can do without; `remedy` is what to do, "" where there is nothing
    to do."""

    name: str
    state: State
    text: str
    remedy: str = ""


def examine() -> list[Check]:
    """Everything that remat's working depends on: Python, torch, devices, packages, solvers, the
    cost cache, extras. Takes a few seconds at most, most of them to import torch; never raises."""
    groups: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("Python", _python),
        ("machine", _machine),
        ("torch", _torch),
        ("CUDA", _devices),
        ("packages", _packages),
        ("solvers", _solvers),
        ("cost cache", _cost_cache),
        ("extras", _extras),
    ]
    return [check for name, group in groups for check in _guarded(name, group)]


def _guarded(name: str, group: Callable[[], Iterator[Check]]) -> list[Check]:
    found: list[Check] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.extend(group())
    except Exception as error:
        found.append(Check(name, "wrong", one_line(error), _REINSTALL))
    return found


def _python() -> Iterator[Check]:
    text = f"{platform.python_version()} ({platform.python_implementation()}), {_home(sys.prefix)}"
    yield Check("Python", "ok", text)
    version = version_of(_PACKAGE)
    where = _home(Path(__file__).parents[1])
    if version is None:
        yield Check("remat", "missing", f"runs from {where}, not installed", "pip install remat")
    else:
        yield Check("remat", "ok", f"{version}, {where}")


def _machine() -> Iterator[Check]:
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    asked = os.environ.get("OMP_NUM_THREADS")
    limits = f", {usable} of them for this process" if usable < cores else ""
    limits += f", OMP_NUM_THREADS={asked}" if asked else ""
    yield Check("processor", "ok", f"{cores} cores{limits} ({platform.machine()})")
    if hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield Check("memory", "ok", f"{format_bytes(total)}{_free()}")


def _free() -> str:
    try:
        from remat.frontend.memory.device_memory import free_bytes
    except Exception:
        # torch is broken, which has a line of its own.
        return ""
    free = free_bytes("cpu")
    return "" if free is None else f", {format_bytes(free)} of it free"


# -- torch and its devices ------------------------------------------------------------------------


def _torch() -> Iterator[Check]:
    needed = next((r for r in requirements(_PACKAGE) if r.name == "torch"), None)
    found = version_of("torch")
    if found is None:
        remedy = "pip install torch" if needed is None else needed.install
        yield Check("torch", "wrong", "not installed", remedy)
        return
    try:
        torch = import_module("torch")
    except Exception as error:
        text = f"{found} cannot be imported: {one_line(error)}"
        yield Check("torch", "wrong", text, "pip install --force-reinstall torch")
        return
    build = "CPU build"
    if torch.version.cuda:
        build = f"built for CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"built for ROCm {torch.version.hip}"
    threads = torch.get_num_threads()
    text = f"{torch.__version__}, {build}, {threads} thread{'s' if threads > 1 else ''}"
    yield _judged(needed, torch.__version__, text) if needed else Check("torch", "ok", text)


def _devices() -> Iterator[Check]:
    try:
        torch = import_module("torch")
    except Exception:
        # Said already.
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        why = " ".join(str(w.message) for w in said)
        yield _no_device(bool(torch.version.cuda or torch.version.hip), why)
        return
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        known = match_device(device.name)
        costs = f"roofline {known.name}" if known else "no roofline of this name, so measure costs"
        text = f"{device.name}, {format_bytes(device.total_memory)}, {costs}"
        yield Check(f"cuda:{number}", "ok", text)


def _no_device(torch_could: bool, why: str) -> Check:
    present = _nvidia()
    if not present:
        return Check("CUDA", "missing", "no CUDA device; plans are made and run on the CPU")
    if not torch_could:
        return Check(
            "CUDA",
            "wrong",
            f"{present} is here, and torch is a CPU build",
            "install a CUDA build of torch: https://pytorch.org/get-started/locally/",
        )
    text = f"{present} is here, and torch cannot use it"
    if why:
        text += f": {one_line(Warning(why)).removeprefix('Warning: ')}"
    remedy = "look at CUDA_VISIBLE_DEVICES, and install a driver as new as torch's CUDA"
    return Check("CUDA", "wrong", text, remedy)


def _nvidia() -> str:
    """The devices that NVIDIA's driver tells of, "" if it is not here."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(
            query, capture_output=True, text=True, timeout=_NVIDIA_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    rows = [line.rpartition(",") for line in told.stdout.splitlines() if "," in line]
    return " and ".join(f"{name.strip()} (driver {version.strip()})" for name, _, version in rows)


# -- packages and solvers -------------------------------------------------------------------------


def _packages() -> Iterator[Check]:
    for requirement in requirements(_PACKAGE):
        if requirement.extra or requirement.name == "torch":
            continue
        if (found := version_of(requirement.name)) is None:
            yield Check(requirement.name, "wrong", "not installed", requirement.install)
        else:
            yield _judged(requirement, found, found)


def _judged(needed: Requirement, version: str, text: str) -> Check:
    """The line on a package in this version."""
    state, words = needed.judge(version)
    return Check(needed.name, state, text + words, "" if state == "ok" else needed.install)


def _solvers() -> Iterator[Check]:
    for fact in usable_backends():
        remedy = find_family(fact.name).remedy
        name = f"solver {fact.name}"
        if fact.usable:
            role = "the default" if is_highs(fact.name) else ""
            text = ", ".join(part for part in (fact.version, role, fact.reason) if part)
            yield Check(name, "ok", text or "works")
        else:
            yield Check(name, "missing", fact.reason.removesuffix(f" ({remedy})"), remedy)


def _extras() -> Iterator[Check]:
    """What `pip install 'remat[...]'` adds."""
    by_extra: dict[str, list[Requirement]] = {}
    for requirement in requirements(_PACKAGE):
        if requirement.extra:
            by_extra.setdefault(requirement.extra, []).append(requirement)
    for extra, wanted in by_extra.items():
        told: dict[State, list[str]] = {"ok": [], "untested": [], "missing": []}
        for requirement in wanted:
            found, words = _installed(requirement)
            told[found].append(words)
        state: State = next(each for each in _GRAVEST if told[each])
        remedy = "" if state == "ok" else f"pip install '{_PACKAGE}[{extra}]'"
        yield Check(f"extra {extra}", state, ", ".join(told[state]), remedy)


def _installed(requirement: Requirement) -> tuple[State, str]:
    """Whether a package of an extra is there, with its own extras."""
    version = version_of(requirement.name)
    if version is None:
        return "missing", f"{requirement.name} is not installed"
    state, words = requirement.judge(version)
    if state == "wrong":
        return "missing", f"{requirement.name} {version} is older than {requirement.least}"
    for part in requirements(requirement.name):
        if part.extra in requirement.parts and version_of(part.name) is None:
            return "missing", f"{part.name} is not installed"
    return state, f"{requirement.name} {version}{words}"


# -- the cost cache -------------------------------------------------------------------------------


def _cost_cache() -> Iterator[Check]:
    path = default_cache_path()
    shown, name = _home(path), "cost cache"
    existing = next(p for p in (path, *path.parents) if p.exists())
    rights = os.W_OK if existing == path else os.W_OK | os.X_OK
    if not os.access(existing, rights) or not (existing == path or existing.is_dir()):
        text = f"{shown} cannot be written, so every run measures anew"
        yield Check(name, "wrong", text, "set REMAT_CACHE_DIR to a directory that can be written")
        return
    if existing != path:
        yield Check(name, "ok", f"{shown}, made when costs are first measured")
        return
    try:
        # Read-only, so that a report changes nothing.
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=0.5)) as db:
            (entries,) = db.execute("SELECT COUNT(*) FROM costs").fetchone()
    except sqlite3.Error as error:
        text = f"{shown} cannot be read: {one_line(error)}"
        yield Check(name, "wrong", text, f"delete {shown}; it is made anew")
        return
    size = format_bytes(sum(p.stat().st_size for p in path.parent.glob(f"{path.name}*")))
    yield Check(name, "ok", f"{shown}, {entries:,} entries, {size}")


def _home(path: str | Path) -> str:
    """The path with the home directory as ~."""
    home = Path.home()
    path = Path(path)
    return f"~{os.sep}{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
