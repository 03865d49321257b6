"""Prometheus metrics. Metrics of jobs come from the store, so they cover all machines and restarts;
metrics of HTTP requests come from this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from sqlalchemy import Connection

from remat_server.store import leases, tallies, upkeep

_COUNTERS = {
    "submitted": ("remat_jobs_submitted", "Jobs accepted", ("kind",)),
    "finished": ("remat_jobs_finished", "Jobs finished", ("kind", "status")),
    "answered_from_store": (
        "remat_jobs_answered_from_store",
        "Jobs answered from the store",
        ("kind",),
    ),
}
_HISTOGRAMS: dict[str, tuple[str, str, Sequence[float]]] = {
    "solve_seconds": ("remat_solve_seconds", "Time of solves, in seconds", tallies.SECONDS),
    "gap": ("remat_solve_gap", "Proved gap of plans, as a fraction", tallies.GAPS),
}
_STATES = ("queued", "running", "succeeded", "infeasible", "failed", "cancelled")


def request_histogram() -> Histogram:
    """Create the histogram of the seconds of HTTP requests, by method, route and status."""
    return Histogram(
        "remat_http_request_seconds",
        "Time of HTTP requests",
        ("method", "route", "status"),
        registry=None,
        buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0),
    )


def build_registry(connection: Connection, requests: Histogram) -> CollectorRegistry:
    """Return all metrics with their current values."""
    collectors = CollectorRegistry()
    collectors.register(requests)
    collectors.register(_StoreCollector(connection))
    ProcessCollector(registry=collectors)
    PlatformCollector(registry=collectors)
    return collectors


class _StoreCollector:
    """Collects the metrics that were read from the store at construction."""

    def __init__(self, connection: Connection) -> None:
        self._metrics = [*_job_metrics(connection), *_tally_metrics(connection)]

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def _job_metrics(connection: Connection) -> Iterator[Metric]:
    depth = upkeep.job_counts(connection)
    jobs = GaugeMetricFamily("remat_jobs", "Jobs in the store, by state", labels=("status",))
    for state in _STATES:
        jobs.add_metric((state,), depth.get(state, 0))
    yield jobs
    workers = leases.worker_count(connection, 60.0)
    yield GaugeMetricFamily("remat_workers", "Workers seen in the last minute", value=workers)


def _tally_metrics(connection: Connection) -> Iterator[Metric]:
    read = tallies.read(connection)
    for key, (name, text, labels) in _COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=labels)
        for pairs, amount in read.get(key, {}).items():
            counter.add_metric([dict(pairs).get(label, "") for label in labels], amount)
        yield counter
    for key, (name, text, bounds) in _HISTOGRAMS.items():
        counts = {dict(p).get("le", ""): n for p, n in read.get(f"{key}_bucket", {}).items()}
        total, buckets = 0.0, []
        for bound in (*map(str, bounds), "+Inf"):
            total += counts.get(bound, 0.0)
            buckets.append((bound, total))
        histogram = HistogramMetricFamily(name, text)
        histogram.add_metric((), buckets, sum(read.get(f"{key}_sum", {}).values()))
        yield histogram
