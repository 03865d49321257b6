"""A small model, some training steps, and their comparison with eager mode and with the plan.

Numbers must be eager mode's bit for bit: loss, gradients, buffers and the generator's state. The
peak must be at most the predicted one, and at least 99.5% of it: on the CPU that of live storages,
on CUDA that of requested bytes; allocated bytes must be within the prediction, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.documents.trace import CUDA_ALIGNMENT_BYTES
from remat.frontend.memory.meter import LiveStorageMeter, unique_bytes
from remat.strategies import Strategy

MIN_SHARE = 0.995
WIDTH = 16
ROWS = {"cpu": 96, "cuda": 2048}
"""The rows of a batch. On CUDA, tensors are larger than the allocator's alignment, so that it is
less than 0.5% of the peak, and smaller than 1 MiB, so that nothing else is rounded."""


class NotPlantedError(Exception):
    """A fault changes nothing in the session, so that nothing can notice it."""


class Net(nn.Module):
    """A model with dropout twice, batch norm, a split and a buffer that counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.gates = nn.Linear(2 * WIDTH, 4 * WIDTH)
        self.last = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return a scalar loss."""
        self.steps += 1
        hidden = self.dropout(F.silu(self.norm(self.first(x))))
        gate, value = self.gates(hidden).chunk(2, dim=-1)
        hidden = self.dropout(F.silu(gate) * value) * self.steps + hidden
        return (self.last(F.silu(hidden)) * scale).square().mean()


class AttentionNet(nn.Module):
    """A model whose peak is in fused attention, which has a workspace on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 12 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar loss."""
        heads = self.first(x).view(-1, 64, 3, 4, WIDTH).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*heads.unbind()).square().mean()


@dataclass(frozen=True)
class Event:
    """One training step of a session, and what is different in it."""

    is_half_batch: bool = False
    scale: float = 1.0
    loss_factor: float = 1.0
    accumulates: bool = False
    is_autocast: bool = False
    is_training: bool = True
    freezes: bool = False


STEP = Event()


@dataclass
class StepResult:
    """The results of a step, by name. A gradient that does not exist is None."""

    tensors: dict[str, torch.Tensor | None]
    peaks: Peaks


@dataclass(frozen=True)
class Peaks:
    """Peaks of a step in bytes, with the tensors that live during the whole step. On CUDA they
    include `library_bytes`, the workspaces that cuBLAS keeps; on the CPU nothing is `allocated`."""

    requested_bytes: int
    allocated_bytes: int = 0
    library_bytes: int = 0


@dataclass(frozen=True)
class Session:
    """Training steps of `remat.optimize(model, budget)` with a strategy, on a device."""

    device: str
    strategy: Strategy
    events: Sequence[Event] = (STEP, STEP)
    budget: str = "100%"
    build_model: Callable[[], nn.Module] = Net

    def differences(self) -> list[str]:
        """Run the session, and return every difference from eager mode and from the plans. A step
        that fails is one."""
        torch.manual_seed(0)
        model = self.build_model().to(self.device)
        reference = copy.deepcopy(model)
        costs = remat.Roofline("cpu" if self.device == "cpu" else "h100")
        noticed: list[str] = []
        _prepare(model, self.events[0])
        try:
            planned = remat.optimize(
                model,
                self.budget,
                (self._inputs(self.events[0]),),
                strategy=self.strategy,
                costs=costs,
            )
            library_bytes = self._library_bytes()
            for number, event in enumerate(self.events):
                eager = self._run(reference, reference, event, number, library_bytes)
                actual = self._run(planned, model, event, number, library_bytes)
                where = f"step {number + 1}: "
                noticed += [where + text for text in _numbers_differ(eager, actual)]
                if event.is_training and planned.program is not None:
                    predicted_bytes = planned.program.predicted_peak_bytes
                    noticed += [where + t for t in _memory_differs(actual.peaks, predicted_bytes)]
        except NotPlantedError:
            raise
        except Exception as error:  # an error of a planted fault is how it is noticed
            noticed.append(f"{type(error).__name__}: {error}".splitlines()[0][:200])
        return noticed

    def _inputs(self, event: Event) -> torch.Tensor:
        rows = ROWS[self.device] // (2 if event.is_half_batch else 1)
        generator = torch.Generator().manual_seed(rows)
        return torch.randn(rows, WIDTH, generator=generator).to(self.device)

    def _library_bytes(self) -> int:
        """Return the bytes of the workspaces that cuBLAS keeps on both threads."""
        if self.device == "cpu":
            return 0
        x = torch.ones(WIDTH, WIDTH, device=self.device, requires_grad=True)
        (x @ x).sum().backward()
        return library_workspace_bytes()

    def _run(
        self,
        module: Callable[..., Any],
        model: nn.Module,
        event: Event,
        seed: int,
        library_bytes: int,
    ) -> StepResult:
        """Run one step from a fixed seed, by `module` on the parameters of `model`. Its peaks are
        right if an earlier step has made cuBLAS allocate its workspaces."""
        _prepare(model, event)
        if not event.accumulates:
            model.zero_grad(set_to_none=True)
        x = self._inputs(event)
        tangent = None  # it has the place of the tangent that the plan counts
        if event.loss_factor != 1.0:
            tangent = torch.full((), event.loss_factor, device=self.device)
        torch.manual_seed(seed)
        losses: list[torch.Tensor] = []

        def step() -> None:
            autocast = torch.autocast(self.device, torch.bfloat16, enabled=event.is_autocast)
            with autocast:
                loss = module(x) if event.scale == 1.0 else module(x, scale=event.scale)
            loss.backward(tangent)
            losses.append(loss.detach())

        peaks = _peaks(step, self.device, _resident(model, x), library_bytes)
        result = StepResult({"loss": losses[0]}, peaks)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            result.tensors[f"gradient of {name}"] = None if gradient is None else gradient.clone()
        result.tensors |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
        is_cpu = self.device == "cpu"
        state = torch.get_rng_state() if is_cpu else torch.cuda.get_rng_state()
        result.tensors["generator state"] = state
        return result


def _prepare(model: nn.Module, event: Event) -> None:
    """Set the model's modes for a step."""
    model.train(event.is_training)
    model.get_parameter("first.weight").requires_grad_(not event.freezes)


def _resident(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that live during the whole step."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.parameters(), *model.buffers(), x, *gradients]


def _peaks(
    step: Callable[[], object],
    device: str,
    resident: Sequence[torch.Tensor],
    library_bytes: int,
) -> Peaks:
    """Run a step, and return its peaks: of live storages on the CPU, of the allocator on CUDA."""
    if device == "cpu":
        meter = LiveStorageMeter(unique_bytes(resident))
        with meter:
            step()
        return Peaks(meter.peak_bytes)
    before = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    step()
    after = torch.cuda.memory_stats()
    blocks = sum(-(-unique_bytes([t]) // CUDA_ALIGNMENT_BYTES) for t in resident)
    requested, allocated = (
        after[f"{key}_bytes.all.peak"] - before[f"{key}_bytes.all.current"] + library_bytes
        for key in ("requested", "allocated")
    )
    return Peaks(
        requested + unique_bytes(resident),
        allocated + blocks * CUDA_ALIGNMENT_BYTES,
        library_bytes,
    )


def library_workspace_bytes() -> int:
    """Free the workspaces that cuBLAS keeps between steps, and return their bytes."""
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_stats()["requested_bytes.all.current"]


def _numbers_differ(eager: StepResult, actual: StepResult) -> list[str]:
    return [
        f"{name} differs{_largest(expected, actual.tensors[name])}"
        for name, expected in eager.tensors.items()
        if not _are_equal(expected, actual.tensors[name])
    ]


def _are_equal(expected: torch.Tensor | None, actual: torch.Tensor | None) -> bool:
    if expected is None or actual is None:
        return expected is actual
    return expected.dtype == actual.dtype and torch.equal(expected, actual)


def _largest(expected: torch.Tensor | None, actual: torch.Tensor | None) -> str:
    if expected is None or actual is None or not expected.is_floating_point():
        return ""
    return f" by {(expected.double() - actual.double()).abs().max().item():.2g}"


def _memory_differs(peaks: Peaks, predicted_bytes: int) -> list[str]:
    noticed: list[str] = []
    excess_bytes = peaks.requested_bytes - predicted_bytes
    if excess_bytes > 0:
        noticed.append(f"requested {excess_bytes:,} bytes above the plan")
    share = (peaks.requested_bytes - peaks.library_bytes) / (predicted_bytes - peaks.library_bytes)
    if 0 <= share < MIN_SHARE:
        noticed.append(f"requested {share:.1%} of the plan")
    if peaks.allocated_bytes > predicted_bytes:
        excess_bytes = peaks.allocated_bytes - predicted_bytes
        noticed.append(f"allocated {excess_bytes:,} bytes above the plan")
    return noticed
