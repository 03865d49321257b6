"""The cost cache stores its entries, and its failures never stop a step."""

from __future__ import annotations

import gc
import logging
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.helpers.process_limit import PROCESS_LIMIT_S

import remat
from remat.frontend.costs import cost_cache, cost_key
from remat.frontend.costs.cost_cache import FILE_NAME, CostCache, MeasuredCost, default_cache_path

KEY = {"op": "aten.mm.default", "args": [["float32", [2, 3]]]}
COST = MeasuredCost(1.25e-6, 512, (1024,), 3e-6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sub" / FILE_NAME


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    class Messages(list[str]):
        def __len__(self) -> int:
            return len(caplog.messages)

        def __getitem__(self, index: object) -> str:  # type: ignore[override]
            return caplog.messages[index]  # type: ignore[index]

    with caplog.at_level(logging.INFO, logger="remat"):
        yield Messages()


def test_costs_survive_the_process(path: Path, warnings: list[str]) -> None:
    CostCache(path).put(KEY, COST)
    reopened = CostCache(path)
    assert reopened.get(KEY) == COST
    assert reopened.get({**KEY, "op": "aten.bmm.default"}) is None
    assert reopened.get(dict(reversed(KEY.items()))) == COST, (
        "the order of a key's parts is irrelevant"
    )
    assert len(warnings) == 0


@pytest.mark.parametrize(
    ("load_when_stored", "load_when_read", "is_reused"),
    [(0.5, 0.5, True), (0.5, 4.0, True), (4.0, 4.0, True), (4.0, 1.2, True), (4.0, 0.5, False)],
)
def test_costs_of_a_busy_machine_are_not_used_on_an_idle_one(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load_when_stored: float,
    load_when_read: float,
    is_reused: bool,
) -> None:
    monkeypatch.setattr(cost_cache, "load_per_core", lambda: load_when_stored)
    cache = CostCache(path)
    cache.put(KEY, COST)
    monkeypatch.setattr(cost_cache, "load_per_core", lambda: load_when_read)
    assert cache.get(KEY) == COST, "measured in this process"
    assert CostCache(path).get(KEY) == (COST if is_reused else None)


def test_a_later_cost_of_an_idle_machine_replaces_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_cache, "load_per_core", lambda: 4.0)
    CostCache(path).put(KEY, MeasuredCost(8e-3, 0))
    monkeypatch.setattr(cost_cache, "load_per_core", lambda: 0.2)
    assert CostCache(path).get(KEY) is None
    CostCache(path).put(KEY, COST)
    assert CostCache(path).get(KEY) == COST


def test_keys_are_readable_text_in_the_file(path: Path) -> None:
    cache = CostCache(path)
    cache.put(KEY, COST)
    cache.close()
    with closing(sqlite3.connect(path)) as db:
        (text,) = db.execute("SELECT key FROM costs").fetchone()
    assert "aten.mm.default" in text


def test_dropping_a_cache_closes_its_file(path: Path) -> None:
    cache = CostCache(path)
    cache.put(KEY, COST)
    connection = cache._connection
    assert connection is not None
    del cache
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
    assert CostCache(path).get(KEY) == COST


def test_the_environment_variable_sets_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    assert default_cache_path() == tmp_path / FILE_NAME
    monkeypatch.delenv("REMAT_CACHE_DIR")
    monkeypatch.setattr(cost_cache.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_path() == tmp_path / "xdg" / "remat" / FILE_NAME
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_path() == tmp_path / ".cache" / "remat" / FILE_NAME


def test_a_corrupt_file_is_set_aside(path: Path, warnings: list[str]) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database at all, but long enough to be taken for one" * 50)
    cache = CostCache(path)
    assert cache.get(KEY) is None
    cache.put(KEY, COST)
    assert CostCache(path).get(KEY) == COST
    assert path.with_name(path.name + ".corrupt").read_bytes().startswith(b"no database")
    assert len(warnings) == 1
    assert "damaged" in warnings[0]


def test_damage_inside_a_real_database_is_set_aside(path: Path, warnings: list[str]) -> None:
    cache = CostCache(path)
    for i in range(2000):
        cache.put({**KEY, "i": i}, COST)
    cache.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    cache = CostCache(path)
    assert cache.get({**KEY, "i": 5}) is None
    cache.put(KEY, COST)
    assert CostCache(path).get(KEY) == COST
    assert len(warnings) == 1


def test_a_locked_file_is_left_alone(
    path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_cache, "BUSY_TIMEOUT_S", 0.05)
    CostCache(path).put(KEY, COST)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    cache = CostCache(path)
    cache.put({"new": 1}, COST)
    cache.put({"new": 2}, COST)
    assert cache.get({"new": 1}) == COST, "this run's own measurements are not lost"
    assert len(warnings) == 1
    assert "locked" in warnings[0]
    other.execute("ROLLBACK")
    other.close()
    assert not path.with_name(path.name + ".corrupt").exists()
    assert CostCache(path).get(KEY) == COST


def test_an_unusable_folder_is_reported_once(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "file").write_text("")
    cache = CostCache(tmp_path / "file" / "below" / FILE_NAME)
    assert cache.get(KEY) is None
    cache.put(KEY, COST)
    assert cache.get(KEY) == COST
    cache.close()
    assert len(warnings) == 1
    assert "REMAT_CACHE_DIR" in warnings[0]


def test_a_directory_in_place_of_the_file_is_reported(path: Path, warnings: list[str]) -> None:
    path.mkdir(parents=True)
    cache = CostCache(path)
    cache.put(KEY, COST)
    assert cache.get(KEY) == COST
    assert path.is_dir()
    assert len(warnings) == 1


def test_a_read_only_database_still_answers(path: Path, warnings: list[str]) -> None:
    CostCache(path).put(KEY, COST)
    cache = CostCache(path)
    assert cache.get(KEY) == COST
    assert cache._connection is not None
    cache._connection.execute("PRAGMA query_only = ON")
    cache.put({"new": 1}, COST)
    assert cache.get({"new": 1}) == COST
    assert len(warnings) == 1
    assert "readonly" in warnings[0]


WRITER = """
import sys
from remat.frontend.costs.cost_cache import CostCache, MeasuredCost
cache = CostCache(sys.argv[1])
for i in range(200):
    cache.put({"writer": int(sys.argv[2]), "i": i}, MeasuredCost(i * 1e-6, i))
assert not cache._disabled
"""


@pytest.mark.slow
def test_processes_write_concurrently(path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)]) for n in range(3)
    ]
    assert [writer.wait(PROCESS_LIMIT_S) for writer in writers] == [0, 0, 0]
    cache = CostCache(path)
    for n in range(3):
        for i in (0, 99, 199):
            assert cache.get({"writer": n, "i": i}) == MeasuredCost(i * 1e-6, i)


def test_costs_of_another_measurement_version_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = remat.trace(torch.nn.Linear(4, 4), torch.randn(2, 4))
    path = tmp_path / "costs.sqlite"
    sizes = []
    for version in (1, cost_key.MEASUREMENT_VERSION, cost_key.MEASUREMENT_VERSION):
        monkeypatch.setattr(cost_key, "MEASUREMENT_VERSION", version)
        remat.measure(trace, cache=path)
        with closing(sqlite3.connect(path)) as connection:
            sizes += connection.execute("SELECT count(*) FROM costs").fetchone()
    assert sizes == [sizes[0], 2 * sizes[0], 2 * sizes[0]]
