"""Tests with right results on the software GPU: `pytest -p scripts.software_gpu.pytest_plugin`.

Processes that tests start have them, too, if they inherit the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from scripts.software_gpu.environment import SITE

_exit_status = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Replace the kernels of CUDA tensors before any test is imported."""
    import torch

    os.environ["REMAT_SOFTWARE_GPU"] = "numbers"
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(SITE) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), *paths]))
    if torch.version.cuda is None:
        raise pytest.UsageError("the software GPU needs a CUDA build of torch")
    from scripts.software_gpu.numbers import enable

    enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of a GPU's times."""
    skip = pytest.mark.skip(reason="the software GPU has no times")
    for item in items:
        if item.get_closest_marker("device_times"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def costs_are_measured_without_results() -> Iterator[None]:
    """Measure operations as the software GPU runs them alone: their results are not used, and how
    long the CPU takes for them says nothing."""
    from scripts.software_gpu.numbers.replacement import nothing_computed

    from remat.frontend.costs.operation_benchmark import OperationBenchmark

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OperationBenchmark, "measure", nothing_computed()(OperationBenchmark.measure))
        yield


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remember the exit status."""
    session.config.stash[_exit_status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process at once: threads of torch may wait for a device that does not exist."""
    if hasattr(config, "workerinput"):  # a process of pytest-xdist, which reports to another
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash.get(_exit_status, 1))
