"""`Sharding`: how several GPUs share a training loop; and `Ring`, a model of the time that their
collectives take. Nothing here is measured.

A collective takes NCCL's estimate of a ring (`src/graph/tuning.cc` and `topo.h` of NCCL 2.27): a
base latency, one for each step around the ring, and the bytes over the bandwidth of the slowest
link. NVLink has the rate that NCCL counts on, 80 to 82% of the data sheet's; GPUs without it the
rate of PCIe to the host. A ring over several nodes uses the network cards of all its GPUs at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf, prod

from remat.costs.devices import DEVICES, PCIE_4
from remat.costs.layouts import HALF_DTYPES
from remat.documents.records import TensorMeta
from remat.errors import RematError

DDP, OPTIMIZER, GRAD_OP, FULL = "none", "optimizer", "grad-op", "full"
"""Values of the option `shard`, besides "hybrid:N"."""

MAX_GPUS = 2**20

_NVLINK_BYTES_PER_S = {
    **dict.fromkeys(("v100", "v100-16gb"), 6 * 20e9),
    **dict.fromkeys(("a100", "a100-40gb"), 12 * 20e9),
    **dict.fromkeys(("h20", "h100", "h200", "gh200"), 18 * 20.6e9),
    "b200": 18 * 40.1e9,
}
"""Links of a GPU times the rate of each, in one direction (NCCL's `SM70_NVLINK_BW` and others)."""

_NETWORK_BYTES_PER_S = {
    **dict.fromkeys(("h20", "h100", "h200", "gh200", "b200"), 50e9),
    **dict.fromkeys(("a100", "a100-40gb"), 25e9),
}
"""One network card for each GPU, of 400 Gbit/s (DGX H100 and B200) or 200 Gbit/s (DGX A100)."""

_OTHER_NETWORK_BYTES_PER_S = 12.5e9
"""100 Gbit/s for each GPU: an assumption."""

_BASE_S, _NVLINK_STEP_S, _PCIE_STEP_S, _NETWORK_STEP_S = 8.4e-6, 3.4e-6, 5.7e-6, 14e-6
"""NCCL's latencies of a ring with the protocol Simple (`baseLat` and `hwLat`)."""


@dataclass(frozen=True, slots=True)
class Ring:
    """GPUs that communicate in a ring: their number, the bandwidth of its slowest link, and the
    latency of one round."""

    gpus: int
    bytes_per_s: float
    latency_s: float

    def round_s(self, size_bytes: int) -> float:
        """Return the time to gather, or to reduce and scatter, a tensor of this size as a whole."""
        if self.gpus == 1:
            return 0.0
        return self.latency_s + size_bytes * (self.gpus - 1) / self.gpus / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How `gpus` GPUs, each with its own batch, share a training loop.

    `shard`: "full", as `fully_shard` (FSDP2, ZeRO-3); "grad-op", where gathered parameters stay
    until their backward (`reshard_after_forward=False`, ZeRO-2); "optimizer", DDP with
    `ZeroRedundancyOptimizer` (ZeRO-1); "hybrid:4", shards over 4 GPUs that all other groups of 4
    repeat (HSDP); "none", DDP. "" is "full" for several GPUs.

    `mixed_precision_param` and `mixed_precision_reduce` are the dtypes of `fully_shard`'s
    `MixedPrecisionPolicy`: parameters are gathered in the first one, gradients reduced in the
    second one, by default float32; the shards are float32. "" without the policy.
    `gradient_as_bucket_view` is the option of DDP. Nodes have `node_gpus` GPUs, and each GPU a
    share of `network` bytes a second of its node's network; by default what its generation
    usually has. Raises `RematError` for impossible values.
    """

    gpus: int = 1
    shard: str = ""
    mixed_precision_param: str = ""
    mixed_precision_reduce: str = ""
    gradient_as_bucket_view: bool = False
    node_gpus: int = 8
    network: float | None = None

    def __post_init__(self) -> None:
        for name, count in (("gpus", self.gpus), ("node_gpus", self.node_gpus)):
            is_integer = isinstance(count, int) and not isinstance(count, bool)
            if not is_integer or not 1 <= count <= MAX_GPUS:
                raise RematError(
                    f"{name} is {str(count)[:80]!r}; pass a number of GPUs, an integer from 1 to "
                    f"{MAX_GPUS:,}"
                )
        rate = self.network
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if rate is not None and not (is_number and 0 < rate < inf):
            raise RematError(
                f"the network is {str(rate)[:80]!r}; pass the bytes per second of each GPU, such "
                "as 50e9 for 400 Gbit/s"
            )
        changed = [f.name for f in fields(Sharding) if f.name not in ("gpus", "node_gpus")]
        changed = [name for name in changed if getattr(self, name) not in ("", False, None)]
        if self.gpus == 1 and changed:
            raise RematError(f"{changed[0]} needs several GPUs: pass gpus=8, --gpus 8")
        self._check_shard()
        self._check_mixed_precision()

    def _check_shard(self) -> None:
        shard = self.shard
        group = self._hybrid_gpus
        if not group and shard not in ("", DDP, OPTIMIZER, GRAD_OP, FULL):
            raise RematError(
                f"the shard is {str(shard)[:40]!r}; pass {FULL!r}, {GRAD_OP!r}, {OPTIMIZER!r}, "
                f"'hybrid:4' for shards over 4 GPUs, or {DDP!r} for DDP"
            )
        if group and (group < 2 or group >= self.gpus or self.gpus % group):
            raise RematError(
                f"{shard!r} does not divide {self.gpus:,} GPUs into several groups of several "
                f"GPUs: pass hybrid:N for a divisor N of {self.gpus:,}, or {FULL!r}"
            )
        if self.gradient_as_bucket_view and not self.is_ddp:
            raise RematError(
                f"gradient_as_bucket_view is an option of DDP: pass shard={DDP!r} or {OPTIMIZER!r}"
            )

    def _check_mixed_precision(self) -> None:
        param, reduce = self.mixed_precision_param, self.mixed_precision_reduce
        for name, dtype, dtypes in (
            ("mixed_precision_param", param, ("", *HALF_DTYPES)),
            ("mixed_precision_reduce", reduce, ("", "float32", *HALF_DTYPES)),
        ):
            if dtype not in dtypes:
                raise RematError(
                    f"{name} is {str(dtype)[:40]!r}; pass {' or '.join(map(repr, dtypes[1:]))}"
                )
        if reduce and not param:
            raise RematError("mixed_precision_reduce needs mixed_precision_param, too")
        if param and self.is_ddp:
            raise RematError(
                f"mixed_precision_param is an option of fully_shard, not of shard={self.shard!r}: "
                "use autocast with DDP"
            )

    @property
    def sharding(self) -> Sharding:
        """These fields alone, of an object that has more."""
        return Sharding(**{field.name: getattr(self, field.name) for field in fields(Sharding)})

    @property
    def _hybrid_gpus(self) -> int:
        """N of "hybrid:N"; 0 for another value."""
        match = re.fullmatch("hybrid:([1-9][0-9]{0,6})", str(self.shard))
        return int(match[1]) if match else 0

    @property
    def is_ddp(self) -> bool:
        """True if each of several GPUs has all parameters and gradients."""
        return self.gpus > 1 and self.shard in (DDP, OPTIMIZER)

    @property
    def is_fsdp(self) -> bool:
        """True if parameters are sharded."""
        return self.gpus > 1 and not self.is_ddp

    @property
    def reshards_after_forward(self) -> bool:
        """True if parameters are gathered for the forward and for the backward."""
        return self.shard != GRAD_OP

    @property
    def shards(self) -> int:
        """The number of shards of each parameter."""
        return (self._hybrid_gpus or self.gpus) if self.is_fsdp else 1

    @property
    def replicas(self) -> int:
        """The number of GPUs with the same shard."""
        return self.gpus // self.shards

    def describe(self) -> str:
        """Return the words of a report; "" for one GPU."""
        if self.gpus == 1:
            return ""
        name = {DDP: "DDP", OPTIMIZER: "DDP with ZeroRedundancyOptimizer (ZeRO-1)"}.get(self.shard)
        name = name or f"fully_shard ({self.shard or FULL})"
        text = f"{self.gpus:,} GPUs, {name}"
        if self.gradient_as_bucket_view:
            text += ", gradient_as_bucket_view"
        if self.mixed_precision_param:
            reduce = self.mixed_precision_reduce or "float32"
            text += f", float32 shards, {self.mixed_precision_param} compute, {reduce} reduction"
        return text

    def optimizer_tensors(self, tensors: Sequence[TensorMeta]) -> list[list[TensorMeta]]:
        """Return what the optimizer of a GPU updates: the shards of the first GPU, which has the
        largest; for "optimizer", the parameters of each GPU."""
        if self.is_fsdp:
            return [[self._shard_of(tensor) for tensor in tensors]]
        if self.gpus == 1 or self.shard == DDP:
            return [list(tensors)]
        # The largest parameter first, to the GPU with the fewest elements, as torch's
        # `ZeroRedundancyOptimizer._partition_parameters` does.
        parts: list[list[TensorMeta]] = [[] for _ in range(min(self.gpus, len(tensors) or 1))]
        elements = [0] * len(parts)
        for tensor in sorted(tensors, key=lambda tensor: prod(tensor.shape), reverse=True):
            gpu = elements.index(min(elements))
            parts[gpu].append(tensor)
            elements[gpu] += prod(tensor.shape)
        return parts

    def _shard_of(self, tensor: TensorMeta) -> TensorMeta:
        rows, *others = tensor.shape or (1,)
        shape = (-(-rows // self.shards), *others)
        strides = [1] * len(shape)
        for index in range(len(shape) - 2, -1, -1):
            strides[index] = strides[index + 1] * shape[index + 1]
        dtype = "float32" if self.mixed_precision_param else tensor.dtype
        changes = {"shape": shape, "stride": tuple(strides), "dtype": dtype}
        return tensor.model_copy(update=changes)

    def shard_ring(self, device: str) -> Ring:
        """Return the ring of the GPUs over which parameters are sharded."""
        return self._ring(device, self.shards, 1)

    def replica_ring(self, device: str) -> Ring:
        """Return the ring of the GPUs with the same shard."""
        return self._ring(device, self.replicas, self.shards)

    def _ring(self, device: str, gpus: int, stride: int) -> Ring:
        """Return a ring of GPUs, each the `stride`-th of the one before."""
        spec = DEVICES.get(device)
        nvlink = _NVLINK_BYTES_PER_S.get(device)
        link = nvlink or (spec.link if spec else PCIE_4).to_device_bytes_per_s
        in_node = max(1, min(gpus, self.node_gpus // stride))
        nodes = -(-gpus // in_node)
        latency_s = _BASE_S + (gpus - nodes) * (_NVLINK_STEP_S if nvlink else _PCIE_STEP_S)
        if nodes == 1:
            return Ring(gpus, link, latency_s)
        network = self.network or _NETWORK_BYTES_PER_S.get(device, _OTHER_NETWORK_BYTES_PER_S)
        latency_s += (nodes - 1) * _NETWORK_STEP_S
        return Ring(gpus, min(link, network * in_node), latency_s)


ONE_GPU = Sharding()
