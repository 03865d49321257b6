"""Fixtures of the tests that use torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of compiled kernels, shared by all tests: each kernel is compiled once."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"


@pytest.fixture
def empty_compile_caches(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make torch.compile forget every graph, in this process and on disk; it keeps only kernels."""
    import torch._dynamo
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kernels))
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")  # in child processes
    monkeypatch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
    torch._dynamo.reset()
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@pytest.fixture
def offload_file_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Offload to a new file in the test's folder, which no other test has written to."""
    from remat.frontend.runtime import host_file

    monkeypatch.setenv(host_file.DIRECTORY_VARIABLE, str(tmp_path))
    host_file._host_file.cache_clear()
    yield
    host_file._host_file.cache_clear()
