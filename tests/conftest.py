"""What all tests share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests import sides

if TYPE_CHECKING:
    from remat_server.store.database import Database

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # tests of the GPU do without it
    pass
else:
    # How long an example takes only says how busy the machine is.
    settings.register_profile("remat", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("remat")


@pytest.fixture(autouse=True)
def cache_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cost cache."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "remat-cache"))


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all tests: compiled once, however many graphs have them."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"


@pytest.fixture
def compiled_anew(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile knows no graph, in this process or on disk; only kernels."""
    import torch._dynamo
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kernels))
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")  # in processes of their own
    monkeypatch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
    torch._dynamo.reset()
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real PostgreSQL, started for the first test that asks; each test process has its own."""
    from tests import postgres  # needs a driver, which tests of the GPU may not have

    if reason := postgres.why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="remat-postgres-") as directory:
        Path(directory).chmod(0o755)
        with postgres.running(Path(directory)) as url:
            yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty store, on SQLite and on PostgreSQL."""
    from tests import postgres

    with ExitStack() as stack:
        if request.param == "sqlite":
            yield f"sqlite:///{tmp_path / 'jobs.sqlite'}"
        else:
            server = request.getfixturevalue("postgres_url")
            yield stack.enter_context(postgres.fresh_database(server))


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """A store with its tables."""
    from remat_server.store.database import Database

    found = Database(url)
    found.migrate()
    yield found
    found.close()


collect_ignore = [
    str(file)
    for file in sides.FOLDER.glob("test_*.py")
    if not sides.TORCH_IS_HERE and sides.imports_torch(file)
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """pytest-timeout's setting is known where that is not installed, as on a machine that is there
    for its GPU only."""
    if find_spec("pytest_timeout") is None:
        parser.addini("timeout", "of pytest-timeout, which is not installed: no limit")


def pytest_report_header() -> list[str]:
    """Says so where tests are left out."""
    if sides.TORCH_IS_HERE:
        return []
    return [f"torch is not installed: {len(collect_ignore)} test files that import it are left out"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what uses torch."""
    if sides.imports_torch(item.path):
        item.add_marker("torch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if _has_gpu():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _has_gpu() -> bool:
    try:
        import torch
    except ModuleNotFoundError:  # the solver does without it, and so do its tests
        return False
    return torch.cuda.is_available()
