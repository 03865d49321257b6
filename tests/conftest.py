"""Settings and fixtures of all tests, and which of them run on this machine.

Tests below `tests/torch` have the mark `torch`, and are left out where torch is not installed. All
others run without it.
"""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the tests marked gpu do not need it
    pass
else:
    # How long an example takes depends on what else the machine runs.
    settings.register_profile("remat", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("remat")

HAS_TORCH = find_spec("torch") is not None
TORCH_TESTS = Path(__file__).parent / "torch"

collect_ignore = [] if HAS_TORCH else [str(TORCH_TESTS)]


@pytest.fixture(autouse=True)
def separate_cost_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own cost cache, instead of the user's."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "remat-cache"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the setting `timeout` of pytest-timeout where that is not installed, as on a machine
    that is only there for its GPU."""
    if find_spec("pytest_timeout") is None:
        parser.addini("timeout", "of pytest-timeout, which is not installed: no limit")


def pytest_report_header() -> list[str]:
    """Report that tests are left out, where they are."""
    return [] if HAS_TORCH else ["torch is not installed: tests/torch is left out"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of `tests/torch`, and the checks of the repository."""
    if item.path.is_relative_to(TORCH_TESTS):
        item.add_marker("torch")
    if item.path.parent.name == "repo":
        item.add_marker("repo")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow cases of parametrized tests. Skip the tests marked gpu where there is no CUDA
    device, and those marked software_gpu except on the software GPU with right numbers."""
    _mark_slow_cases(items)
    if not any("::" in argument for argument in config.args):  # else some cases are not collected
        _check_case_names(items)
    skips = {}
    if not _has_gpu():
        skips["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    if os.environ.get("REMAT_SOFTWARE_GPU") != "numbers" or not _has_gpu():
        skips["software_gpu"] = pytest.mark.skip(reason="needs the software GPU")
    for item in items:
        for mark, skip in skips.items():
            if item.get_closest_marker(mark):  # not `keywords`, which has the folders' names, too
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Exclude the million objects of collected tests from later garbage collections, of which each
    would take half a second: steps are measured after a collection."""
    gc.collect()
    gc.freeze()


def _case_of(item: pytest.Item) -> str:
    """Return the name of a parametrized test's case, without brackets."""
    return item.name.partition("[")[2].removesuffix("]")


def _mark_slow_cases(items: list[pytest.Item]) -> None:
    for item in items:
        quick, slow = map(item.get_closest_marker, ("quick_cases", "slow_cases"))
        if (quick and _case_of(item) not in quick.args) or (slow and _case_of(item) in slow.args):
            item.add_marker("slow")


def _check_case_names(items: list[pytest.Item]) -> None:
    """Raise an error for a mark that names a case which the test does not have."""
    missing: dict[str, set[str]] = {}
    for item in items:
        for mark in ("quick_cases", "slow_cases"):
            if marker := item.get_closest_marker(mark):
                test = item.nodeid.partition("[")[0]
                missing.setdefault(test, {*marker.args}).discard(_case_of(item))
    if unknown := {test: sorted(names) for test, names in missing.items() if names}:
        raise pytest.UsageError(f"marked cases that their tests do not have: {unknown}")


def _has_gpu() -> bool:
    if not HAS_TORCH:
        return False
    import torch

    return torch.cuda.is_available()
