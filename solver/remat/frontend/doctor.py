"""`examine`: what is here, what is missing, what is wrong, and what to do about it.

Nothing raises: a torch that cannot be imported is a line of the report. So nothing here imports
torch, or anything that does, before the check that needs it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal

from remat.budget import format_bytes
from remat.devices import match_device
from remat.errors import one_line
from remat.frontend.cost_cache import default_cache_path
from remat.milp.backend_facts import usable_backends
from remat.milp.pulp_solvers import family, is_highs

State = Literal["ok", "missing", "wrong"]

_PACKAGE = "remat"
_REINSTALL = "pip install --force-reinstall remat"
_NVIDIA_PATIENCE_S = 3.0
_REQUIREMENT = re.compile(
    r"""(?P<name>[\w.-]+) (\[.*?\])? \s* (>=\s*(?P<least>[\d.]+))? [^;]*
        (;.*\bextra\s*==\s*["'](?P<extra>[\w-]+)["'])?""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Check:
    """One line of the report. `missing` is what works can do without; `remedy` is what to do, ""
    where there is nothing to do."""

    name: str
    state: State
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class _Requirement:
    name: str
    least: str
    extra: str


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
    version = _version(_PACKAGE)
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
        from remat.frontend.memory import free_bytes
    except Exception:
        # torch is broken, which has a line of its own.
        return ""
    free = free_bytes("cpu")
    return "" if free is None else f", {format_bytes(free)} of it free"


# -- torch and its devices ------------------------------------------------------------------------


def _torch() -> Iterator[Check]:
    least = next((r.least for r in _requirements() if r.name == "torch"), "")
    found = _version("torch")
    if found is None:
        yield Check("torch", "wrong", "not installed", "pip install torch")
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
    if _older(torch.__version__, least):
        text += f"; remat needs {least}"
        yield Check("torch", "wrong", text, f"pip install 'torch>={least}'")
    else:
        yield Check("torch", "ok", text)


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
    for requirement in _requirements():
        if requirement.extra or requirement.name == "torch":
            continue
        name = requirement.name
        found = _version(name)
        remedy = f"pip install '{name}>={requirement.least}'"
        if found is None:
            yield Check(name, "wrong", "not installed", remedy)
        elif _older(found, requirement.least):
            yield Check(name, "wrong", f"{found}; remat needs {requirement.least}", remedy)
        else:
            yield Check(name, "ok", found)


def _solvers() -> Iterator[Check]:
    for fact in usable_backends():
        remedy = family(fact.name).remedy
        name = f"solver {fact.name}"
        if fact.usable:
            role = "the default" if is_highs(fact.name) else ""
            text = ", ".join(part for part in (fact.version, role, fact.reason) if part)
            yield Check(name, "ok", text or "works")
        else:
            yield Check(name, "missing", fact.reason.removesuffix(f" ({remedy})"), remedy)


def _extras() -> Iterator[Check]:
    """What `pip install 'remat[...]'` adds."""
    by_extra: dict[str, list[_Requirement]] = {}
    for requirement in _requirements():
        if requirement.extra:
            by_extra.setdefault(requirement.extra, []).append(requirement)
    for extra, wanted in by_extra.items():
        found: list[str] = []
        lacking: list[str] = []
        for requirement in wanted:
            version = _version(requirement.name)
            if version is None:
                lacking.append(f"{requirement.name} is not installed")
            elif _older(version, requirement.least):
                lacking.append(f"{requirement.name} {version} is older than {requirement.least}")
            else:
                found.append(f"{requirement.name} {version}")
        name, remedy = f"extra {extra}", f"pip install '{_PACKAGE}[{extra}]'"
        if lacking:
            yield Check(name, "missing", ", ".join(lacking), remedy)
        else:
            yield Check(name, "ok", ", ".join(found))


def _requirements() -> list[_Requirement]:
    """As remat's own package says; of a source tree that is not installed, nothing is known."""
    try:
        lines = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return []
    found = [match for line in lines if (match := _REQUIREMENT.match(line))]
    return [_Requirement(m["name"], m["least"] or "0", m["extra"] or "") for m in found]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _older(version: str, least: str) -> bool:
    return _numbers(version) < _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    """Of a release: "2.13.0+cpu" is (2, 13, 0)."""
    release = re.match(r"[\d.]*", version)
    return tuple(int(part) for part in release[0].split(".") if part) if release else ()


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
