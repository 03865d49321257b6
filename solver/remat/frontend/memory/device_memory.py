"""The memory of a device that a plan may use: free bytes, workspaces of libraries, reserves.

The budget "auto" is what they leave.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Adafactor, Optimizer

from remat.allocator.prediction import uses_cublas, uses_cublaslt
from remat.allocator.replay import ALIGNMENT_BYTES, round_size
from remat.costs.optimizer_memory import optimizer_memory
from remat.documents.trace import Trace, accumulated_gradient_bytes
from remat.errors import BudgetError
from remat.frontend.common.operators import tensor_meta
from remat.limits.budget import Budget
from remat.limits.limits import SEGMENTS_MARGIN, Limits, nothing_left
from remat.limits.options import parse_reserve
from remat.limits.units import format_bytes

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device | str) -> int | None:
    """Return the free bytes of a device; None where the system does not report them.

    Memory that torch's CUDA allocator has reserved and does not use counts as free, as does the
    page cache on the CPU. The limit of a container counts where it is smaller.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    sizes = (_system_free_bytes(), _container_free_bytes())
    return min((size for size in sizes if size is not None), default=None)


def _system_free_bytes() -> int | None:
    """Return the available memory of the machine; None if /proc/meminfo does not report it."""
    try:
        return _number_in_file(Path("/proc/meminfo"), "MemAvailable:") * 1024
    except (OSError, ValueError):
        return None


def _container_free_bytes() -> int | None:
    """Return the unused part of a control group's memory limit (version 2), which MemAvailable does
    not include; None without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        cache = _number_in_file(_CGROUP / "memory.stat", "inactive_file")
        used = int((_CGROUP / "memory.current").read_text()) - cache
        return max(0, int(limit) - used)
    except (OSError, ValueError):
        return None


def _number_in_file(path: Path, name: str) -> int:
    """Return the number that follows a name in a file of the system. Raises ValueError if it is not
    there."""
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise ValueError(f"{path} has no {name}")


def library_bytes(
    device: torch.device | str,
    targets: Iterable[str],
    capability: tuple[int, int] | None = None,
) -> int:
    """Return the bytes of the workspaces that cuBLAS and cuBLASLt have in torch's allocator during
    a step with the operations `targets`; 0 on the CPU, and without matrix products. `capability` is
    the compute capability of a CUDA device that this machine does not have, None for `device`.

    Up to torch 2.14 the threads of the forward and the backward each have a workspace, which stays
    allocated. From 2.15 on a workspace is allocated for each product and freed after it, so that
    one counts, unless TORCH_CUBLAS_WORKSPACE_CACHE=1. (Measured with the allocators of both
    versions; see `scripts/allocator`.) A product with a bias runs in cuBLASLt, whose workspace may
    be another one.
    """
    device, targets = torch.device(device), set(targets)
    if (device.type != "cuda" and capability is None) or not any(map(uses_cublas, targets)):
        return 0
    threads = 2 if keeps_cublas_workspaces() else 1
    return threads * _cublas_workspace_bytes(device, capability, any(map(uses_cublaslt, targets)))


def allocated_workspace_bytes(device: torch.device) -> int:
    """Let cuBLAS allocate the workspaces that torch keeps, and return their bytes, so that later
    measurements of the device's memory can leave them out; 0 if torch keeps none."""
    if device.type != "cuda" or not keeps_cublas_workspaces():
        return 0
    matrix, bias = torch.ones(16, 16, device=device), torch.ones(16, device=device)

    def multiply() -> None:
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            torch.addmm(bias, matrix, matrix)
            torch.mm(matrix, matrix)

    multiply()
    run_in_backward(multiply, device)
    return library_bytes(device, ["aten.mm.default", "aten.addmm.default"])


def run_in_backward(call: Callable[[], object], device: torch.device) -> None:
    """Run `call` on the backward's thread of a CUDA device; on the current thread of a CPU.

    Waits for its end, and raises what it raises. Some state of CUDA libraries belongs to a thread:
    cuBLAS's handle with its workspace, and the algorithms that cuDNN chose with
    `torch.backends.cudnn.benchmark` (`thread_local` in `aten/src/ATen/native/cudnn/Conv_v8.cpp`). A
    step that must allocate nothing unplanned needs both on both threads.
    """
    with torch.enable_grad():
        leaf = torch.zeros((), device=device, requires_grad=True)
        result: torch.Tensor = _CallInBackward.apply(leaf, call)  # type: ignore[assignment]
    result.backward()


class _CallInBackward(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call()
        return gradients[0], None


def keeps_cublas_workspaces() -> bool:
    """True if torch keeps cuBLAS's workspaces after a matrix product. If False, each product
    allocates and frees one, and a measurement counts it as the product's own workspace."""
    cache_setting = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE")
    return _torch_version() < (2, 15) or cache_setting == "1"


def _cublas_workspace_bytes(
    device: torch.device, capability: tuple[int, int] | None, has_lt: bool
) -> int:
    """Return the bytes of one thread's workspaces of cuBLAS and, with `has_lt`, of cuBLASLt.
    `capability` is as for `library_bytes`."""
    blas_size = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    lt_size = getattr(torch.backends.cuda, "cublaslt_workspace_size", None)
    is_local = capability is None and torch.cuda.is_available()
    if is_local and blas_size is not None and lt_size is not None:  # torch 2.13
        with torch.cuda.device(device):
            return _combined_workspace_bytes(blas_size(), lt_size() if has_lt else 0)
    lt_kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    lt_bytes = int(lt_kib) << 10 if lt_kib.isdigit() else _DEFAULT_LT_BYTES
    configured = configured_cublas_workspace_bytes(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if configured is None:
        major, _ = capability or torch.cuda.get_device_capability(device)
        configured = default_cublas_workspace_bytes(major)
    return _combined_workspace_bytes(configured, lt_bytes if has_lt else 0)


def _combined_workspace_bytes(blas_bytes: int, lt_bytes: int) -> int:
    """Return the bytes of the workspaces of cuBLAS and cuBLASLt together.

    From torch 2.13 on cuBLASLt shares the workspace of cuBLAS, unless the environment says that it
    must not. Before, it shares it only if the environment says so. With torch 2.11, plans without
    it were exceeded by one or two megabytes (H200, 2026-11-27); that 2.12 is like 2.11 is an
    assumption.
    """
    setting = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "")
    is_shared = setting == "1" if _torch_version() < (2, 13) else setting != "0"
    return blas_bytes if is_shared else blas_bytes + lt_bytes


def _torch_version() -> tuple[int, ...]:
    """Return the major and minor version of torch."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


_DEFAULT_LT_BYTES = 1 << 20
"""torch's default workspace of cuBLASLt, on every architecture."""


def default_cublas_workspace_bytes(major: int) -> int:
    """Return the bytes of torch's default workspace of a cuBLAS handle, by the major compute
    capability.

    It is 32 MiB from Hopper (9.0) on, before it 8 MiB and 128 KiB (":4096:2:16:8"). Source:
    `torch.backends.cuda.cublas_workspace_size()` of torch 2.15 for 7, 8, 9, 10 and 12;
    `aten/src/ATen/cuda/CublasHandlePool.cpp`.
    """
    return 32 << 20 if major >= 9 else (8 << 20) + (128 << 10)


def configured_cublas_workspace_bytes(configuration: str) -> int | None:
    """Return the total bytes of a CUBLAS_WORKSPACE_CONFIG, which is `:KiB:count` once or more, as
    torch reads it; None if it is empty or torch cannot read it."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", configuration)
    return sum(int(size) * int(count) for size, count in pairs) << 10 if pairs else None


Reserve = int | str | Optimizer
"""Bytes, a string such as "2GiB", or an optimizer."""


@dataclass(frozen=True, slots=True)
class ReserveSize:
    """The size of a reserve. `total_bytes` are subtracted from a budget in bytes. Of these,
    `unallocated_bytes` are not allocated yet: only they are subtracted from a device's free memory.
    """

    total_bytes: int = 0
    unallocated_bytes: int = 0


def reserve_size(reserve: Reserve | None) -> ReserveSize:
    """Return the size of a reserve.

    The existing state of an optimizer is measured. State that its first step creates is predicted
    by a step on tensors without memory. The temporary memory of `step()` is not counted: it runs
    when the activations are freed. Raises `BudgetError` for a value that is not a number of bytes,
    and for an optimizer whose state cannot be predicted.
    """
    if reserve is None:
        return ReserveSize()
    if isinstance(reserve, Optimizer):
        allocated_bytes = unallocated_bytes = 0
        for group in reserve.param_groups:
            stateless = [p for p in group["params"] if p.requires_grad and not reserve.state.get(p)]
            for parameter in group["params"]:
                state = reserve.state.get(parameter, {})
                allocated_bytes += _optimizer_state_bytes(state, parameter.device)
            if stateless:
                unallocated_bytes += _predicted_optimizer_bytes(reserve, group, stateless)
        return ReserveSize(allocated_bytes + unallocated_bytes, unallocated_bytes)
    if isinstance(reserve, bool) or not isinstance(reserve, (int, str)):
        raise BudgetError(
            f"the reserve is a {type(reserve).__name__}; pass bytes, a string such as "
            '"2GiB", or an optimizer (a torch.optim.Optimizer, not its class)'
        )
    size_bytes = parse_reserve(reserve)
    return ReserveSize(size_bytes, size_bytes)


def _optimizer_state_bytes(state: dict[str, Any], device: torch.device) -> int:
    """Return the bytes of one parameter's optimizer state on `device`, as torch's CUDA allocator
    rounds them; a step count may be on the CPU."""
    sizes = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in state.values()
        if isinstance(t, Tensor) and t.device == device
    }
    return sum(map(round_size, sizes.values()))


def _predicted_optimizer_bytes(
    optimizer: Optimizer, group: dict[str, Any], parameters: list[Tensor]
) -> int:
    """Return the bytes of the state that the first step of an optimizer creates for parameters of
    one group: run it on a copy of the optimizer with meta tensors. Raises `BudgetError` if that
    step fails."""
    # Scalars, such as the step count, are on the CPU unless a kernel has to read them.
    scalars_count = parameters[0].device.type == "cpu" or any(
        group.get(option) for option in ("fused", "capturable")
    )
    if isinstance(optimizer, Adafactor):
        # On meta tensors, its `step` fails: it reads elements.
        state = optimizer_memory("adafactor", list(map(tensor_meta, parameters)))
        steps_bytes = ALIGNMENT_BYTES * len(parameters) * scalars_count
        return steps_bytes + sum(map(round_size, state.state_sizes_bytes))
    meta_parameters = [torch.empty_like(p, device="meta", requires_grad=True) for p in parameters]
    for parameter in meta_parameters:
        parameter.grad = torch.empty_like(parameter)
    options = {key: value for key, value in group.items() if key != "params"}
    plain = {key: False for key in ("foreach", "fused", "capturable") if key in options}
    try:
        optimizer_type = cast("Callable[..., Optimizer]", type(optimizer))
        meta_optimizer = optimizer_type([{**options, **plain, "params": meta_parameters}])
        meta_optimizer.step()
    except Exception as error:  # an optimizer of a third party may need anything
        kind = type(optimizer).__name__
        reason = str(error).partition("\n")[0][:80]
        raise BudgetError(
            f"the size of the state of {kind} cannot be predicted before its first step "
            f"({type(error).__name__}: {reason}); pass its bytes, such as "
            'reserve="2GiB", or the optimizer after its first step'
        ) from None
    states = list(meta_optimizer.state.values())
    scalar_bytes = sum(_optimizer_state_bytes(state, torch.device("cpu")) for state in states)
    tensor_bytes = sum(_optimizer_state_bytes(state, torch.device("meta")) for state in states)
    return tensor_bytes + scalar_bytes * scalars_count


MARGIN = 0.08
"""Fraction of the free memory that no plan uses: fragmentation, handles of cuBLAS and cuDNN, other
processes."""


def auto_limits(trace: Trace, reserve: ReserveSize, *, is_allocated: bool = True) -> Limits:
    """Return the limits for a traced step from the free memory of its device.

    Parameters, buffers, inputs and (if the step accumulates) gradients are part of the step's
    peak. If `is_allocated`, they are in memory already, and therefore not in the free memory.
    Raises `BudgetError` where the free memory is unknown, or less than the reserve.
    """
    allocated_bytes = 0
    if is_allocated:
        storages = {p.storage for p in trace.placeholders if p.kind != "tangent"}
        allocated_bytes = sum(map(trace.allocated_bytes, storages))
        allocated_bytes += accumulated_gradient_bytes(trace) if trace.accumulates_gradients else 0
    return auto_limits_of_device(trace.device, allocated_bytes, reserve)


def auto_limits_of_device(
    device: torch.device | str, allocated_bytes: int, reserve: ReserveSize
) -> Limits:
    """Return the limits for a step of whose memory `allocated_bytes` are allocated already; see
    `auto_limits`."""
    free = free_bytes(device)
    if free is None:
        raise BudgetError(
            f'budget="auto" needs the free memory of {device}, which this system does not report; '
            'pass a number of bytes or a string such as "8GiB"'
        )
    step_bytes = int(free * (1 - MARGIN)) - reserve.unallocated_bytes + allocated_bytes
    if step_bytes <= 0:
        raise BudgetError(
            nothing_left(
                free, f"{format_bytes(reserve.unallocated_bytes)} are reserved on {device}"
            )
        )
    segments_bytes = int(free * (1 - SEGMENTS_MARGIN)) - reserve.unallocated_bytes + allocated_bytes
    budget = Budget.parse(step_bytes + reserve.total_bytes)
    return Limits(budget, reserve.total_bytes, segments_bytes=segments_bytes)
