"""Solves on a Ray cluster of logical nodes on this machine: cancellation, and the loss of a
node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.service import server as servers
from tests.helpers.service.server import (
    HARD,
    Server,
    chain,
    finished,
    post,
    solving_processes,
    wait_for,
)

pytest.importorskip("ray", reason="ray is not installed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    ray_cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield ray_cluster
    ray_cluster.shutdown()


@pytest.fixture(scope="module")
def server(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {
        "REMAT_PLACEMENT": "ray",
        "REMAT_RAY_ADDRESS": cluster.address,
        "REMAT_CONCURRENT_SOLVES": "1",
    }
    with servers.running(tmp_path_factory.mktemp("ray"), **settings) as running:
        yield running


@pytest.mark.slow
def test_a_cluster_solves_cancels_and_survives_the_loss_of_a_node(
    cluster: Any, server: Server
) -> None:
    first = cluster.add_node(num_cpus=1)
    with server.http() as http:
        finished_job = finished(http, post(http, budget="70%").json()["id"], 120)
        assert finished_job["status"] == "succeeded"

        hard = {"graph": chain(60), "budget": "22%", "options": {"strategy": HARD}}
        job = post(http, **hard).json()
        began = wait_for(lambda: solving_processes("ray::"))
        http.delete(f"/jobs/{job['id']}")
        cancelled = time.monotonic()
        wait_for(lambda: not began & solving_processes("ray::"))
        assert time.monotonic() - cancelled < 1.5

        limited = {**hard, "options": {"strategy": {**HARD, "time_limit": 6.0}}}
        job = post(http, **limited).json()
        before = wait_for(lambda: solving_processes("ray::"))
        cluster.add_node(num_cpus=1)
        cluster.remove_node(first, allow_graceful=False)
        finished_job = finished(http, job["id"], 120)
        assert finished_job["status"] == "succeeded"
        assert not before & solving_processes("ray::")
    assert "queued again" in server.log.read_text()


def test_a_missing_cluster_is_an_error(tmp_path: Path) -> None:
    from remat.errors import ServiceError
    from remat_server.work.placements.on_ray import RayPlacement

    with pytest.raises(ServiceError, match="cannot be joined"):
        RayPlacement("127.0.0.1:1")
