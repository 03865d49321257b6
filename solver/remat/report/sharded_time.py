"""The time that the communication of several GPUs adds to a step, by a model: collectives overlap
with computation where FSDP2 and DDP let them, and take what `Ring` says.

- FSDP2 gathers the next block while a block runs: in the forward once the block before has been
  copied out of its buffer, in the backward by its prefetch. Gathers and reductions share one
  communicator, so they run in order. A block's reduction starts after its backward, and the next
  block's waits for it. Copies into and out of flat buffers take time on the GPU.
- DDP reduces a bucket once all its gradients exist: the first of 1 MiB, others of 25 MiB.
- ZeroRedundancyOptimizer broadcasts each parameter after its step, which nothing hides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from remat.costs.devices import DEVICES
from remat.costs.sharding import OPTIMIZER, Sharding
from remat.documents.trace import Trace, trained_parameters
from remat.graph import Graph
from remat.report.sharded_memory import ROOT, ShardedStep
from remat.schedule import Schedule

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2**20, 25 * 2**20


def added_communication_s(
    trace: Trace, graph: Graph, schedule: Schedule, sharding: Sharding, device: str
) -> float:
    """Return the seconds that a step takes longer than on one GPU, by the links of `device`."""
    if sharding.gpus == 1:
        return 0.0
    step = ShardedStep.of(trace, graph, schedule, sharding)
    if sharding.is_ddp:
        return _ddp_s(trace, step, device)
    return _fsdp_s(step, device)


def _costs(step: ShardedStep) -> list[float]:
    return [step.graph.operations[op].cost_s for op in step.schedule.runs]


def _copy_s(device: str, size_bytes: int) -> float:
    """Return the time to read and write so many bytes."""
    spec = DEVICES.get(device)
    return 2 * size_bytes / spec.bytes_per_s if spec else 0.0


def _fsdp_s(step: ShardedStep, device: str) -> float:
    costs, sharding = _costs(step), step.sharding
    ring, replicas = sharding.shard_ring(device), sharding.replica_ring(device)
    link_s = ring.round_s(step.gathered[ROOT])  # when the link is free
    replica_link_s = 0.0
    now_s = ready_s = link_s + _copy_s(device, step.gathered[ROOT])
    first = {run: name for name, (run, _) in step.blocks_in_forward.items()}
    for run in range(step.boundary):
        if run in first:
            size_bytes = step.gathered[first[run]]
            link_s = max(link_s, ready_s) + ring.round_s(size_bytes)
            now_s = ready_s = max(now_s, link_s) + _copy_s(device, size_bytes)
        now_s += costs[run]
    spans = step.blocks_in_backward
    following = dict(zip(spans, [*list(spans)[1:], None], strict=True))
    first = {run: name for name, (run, _) in spans.items()}
    last = {run: name for name, (_, run) in spans.items()}
    gathered_s: dict[str | None, float] = {}  # when a gather ends

    def prefetch(unit: str | None) -> None:
        nonlocal link_s
        if unit is not None and sharding.reshards_after_forward:
            link_s = max(link_s, now_s) + ring.round_s(step.gathered[unit])
            gathered_s[unit] = link_s

    def reduce(unit: str) -> None:
        nonlocal now_s, link_s, replica_link_s
        size_bytes = step.reduced[unit]
        now_s = max(now_s, reduced_s) + _copy_s(device, size_bytes)
        link_s = max(link_s, now_s) + ring.round_s(size_bytes)
        shard_bytes = size_bytes // sharding.shards
        replica_link_s = max(replica_link_s, link_s) + 2 * replicas.round_s(shard_bytes)

    reduced_s = 0.0  # when the latest reduction ends
    prefetch(next(iter(spans), None))
    for run in range(step.boundary, len(costs)):
        if (name := first.get(run)) is not None:
            if name in gathered_s:
                now_s = max(now_s, gathered_s[name]) + _copy_s(device, step.gathered[name])
            prefetch(following[name])
        now_s += costs[run]
        if (name := last.get(run)) is not None:
            reduce(name)
            reduced_s = link_s
    reduce(ROOT)
    return max(now_s, link_s, replica_link_s) - sum(costs)


def _ddp_s(trace: Trace, step: ShardedStep, device: str) -> float:
    ring = step.sharding.replica_ring(device)
    now_s = link_s = copies_s = 0.0
    produced = step.gradients_by_run
    buckets = _buckets([step.graph.values[v].size_bytes for run in produced for v in produced[run]])
    bucket_bytes, pending = next(buckets, 0), 0
    for run, cost_s in enumerate(_costs(step)):
        now_s += cost_s
        for value in produced.get(run, ()):
            size_bytes = step.graph.values[value].size_bytes
            pending += size_bytes
            copies_s += 2 * _copy_s(device, size_bytes)
            if pending == bucket_bytes:
                link_s = max(link_s, now_s) + 2 * ring.round_s(bucket_bytes)
                bucket_bytes, pending = next(buckets, 0), 0
    added_s = max(now_s, link_s) - now_s + copies_s
    if step.sharding.shard == OPTIMIZER:
        sizes = {p.storage: trace.allocated_bytes(p.storage) for p in trained_parameters(trace)}
        added_s += sum(ring.latency_s + size / ring.bytes_per_s for size in sizes.values())
    return added_s


def _buckets(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the bytes of the buckets of gradients, in the order in which these are produced."""
    limit, bucket_bytes = _FIRST_BUCKET_BYTES, 0
    for size in sizes:
        bucket_bytes += size
        if bucket_bytes >= limit:
            yield bucket_bytes
            limit, bucket_bytes = _BUCKET_BYTES, 0
    if bucket_bytes:
        yield bucket_bytes
