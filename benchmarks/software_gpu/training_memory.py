"""Memory of training loops in eager mode, optimizer included, against the prediction of fit.

One case is a family in one precision. Each optimizer, and a checkpoint for each block with AdamW,
is a row; AdamW in 8 bits if bitsandbytes is installed. A loop takes three steps, once with torch's
default segments and once with expandable ones, each time with a new model and an allocator that has
reserved nothing. Convolutions run without cuDNN; `remat.fit` measures their workspaces, as it does
with cuDNN on a GPU of this machine.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn, optim

import remat
from benchmarks.software_gpu.eager_memory import refusal
from benchmarks.software_gpu.families import DTYPES, FAMILIES, Batch, build
from remat.report.fit import FitOption

TOLERANCE = 0.02
"""The largest relative error of the predicted peak."""

CHECKPOINTED = "adamw, checkpoint each block"
_STEPS = 3

Row = dict[str, Any]


def _adamw_8bit(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], optim.Optimizer]] = {
    "adamw": optim.AdamW,
    "adamw-fused": lambda parameters: optim.AdamW(parameters, fused=True),
    "adam": optim.Adam,
    "adafactor": optim.Adafactor,
    "sgd": optim.SGD,
    "sgd-momentum": lambda parameters: optim.SGD(parameters, momentum=0.9),
}
if importlib.util.find_spec("bitsandbytes") is not None:
    OPTIMIZERS["adamw-8bit"] = _adamw_8bit


def cases() -> list[str]:
    """Return the names of the cases, "FAMILY-DTYPE"."""
    return [f"{family}-{dtype}" for family in FAMILIES for dtype in DTYPES]


def run_case(case: str) -> list[Row]:
    """Return a row for each optimizer."""
    family, _, dtype = case.partition("-")
    names = list(OPTIMIZERS)
    if family != "unet2d":  # the only one whose model has no method for a checkpoint for each block
        names.append(CHECKPOINTED)
    return [_row(family, dtype, name) for name in names]


def _row(family: str, dtype: str, name: str) -> Row:
    row: Row = {"family": family, "dtype": dtype, "optimizer": name}
    try:
        predicted_bytes, by_segments = _predicted(family, dtype, name)
    except remat.RematError as error:
        return row | refusal(error)
    requested_bytes = 0
    for key, is_expandable in (("reserved", False), ("expandable", True)):
        peaks = _peaks(family, dtype, name, is_expandable=is_expandable)
        requested_bytes = max(requested_bytes, peaks[0])
        if is_expandable in by_segments:
            prediction = by_segments[is_expandable]
            row |= {
                f"predicted_{key}_bytes": prediction,
                f"{key}_bytes": peaks[1],
                f"{key}_error": round(prediction / peaks[1] - 1, 5),
            }
    error = predicted_bytes / requested_bytes - 1
    return row | {
        "predicted_bytes": predicted_bytes,
        "requested_bytes": requested_bytes,
        "error": round(error, 5),
        "is_met": abs(error) <= TOLERANCE,
    }


def _predicted(family: str, dtype: str, name: str) -> tuple[int, dict[bool, int]]:
    """Return the predicted peak, and the predicted reserved bytes by whether segments are
    expandable. Raises `RematError`."""
    model, batch = build(family, dtype)
    with _context(dtype):
        if name != CHECKPOINTED:
            memory = remat.fit(model, (), batch, optimizer=name, memory="1TiB").memory
            reserved = {False: memory.reserved_bytes, True: memory.expandable_bytes}
            return memory.peak_bytes, reserved
        option = _checkpoints_option(model, batch)
    return option.peak_bytes, {False: option.reserved_bytes}


def _checkpoints_option(model: nn.Module, batch: Batch) -> FitOption:
    """Return the option of checkpoints with AdamW. With a little less memory than needed there are
    options; this one is combined with a smaller optimizer where only that fits, so with less memory
    than that takes it is not."""
    memory = remat.fit(model, (), batch, memory="1TiB").memory.reserved_bytes - 1
    while True:
        answer = remat.fit(model, (), batch, memory=memory, strategy=remat.Auto(time_limit=0.1))
        for option in answer.options:
            if option.name == "checkpoint each block":
                return option
        options = [o for o in answer.options if o.name.startswith("checkpoint")]
        if not options:
            (excluded,) = [e for e in answer.excluded if e.name.startswith("checkpoint")]
            raise remat.RematError(f"no checkpoints: {excluded.reason}")
        memory = options[0].reserved_bytes - 1


def _context(dtype: str) -> contextlib.AbstractContextManager[object]:
    is_autocast = dtype == "autocast"
    return torch.autocast("cuda", torch.bfloat16) if is_autocast else contextlib.nullcontext()


def _peaks(family: str, dtype: str, name: str, *, is_expandable: bool) -> tuple[int, int]:
    """Return the requested and the reserved bytes of a training loop, at their peaks."""
    _empty_allocator()
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{is_expandable}")
    model, batch = build(family, dtype)
    if name == CHECKPOINTED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable: Callable[[], None] = getattr(model, "gradient_checkpointing_enable")  # noqa: B009
            enable()
    optimizer = OPTIMIZERS["adamw" if name == CHECKPOINTED else name](model.parameters())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(_STEPS):
        with _context(dtype):
            outputs = model(**batch)
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del outputs, loss
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.peak"], stats["reserved_bytes.all.peak"]


def _empty_allocator() -> None:
    """Free all memory of the GPU, the workspaces of cuBLAS too: segments that an earlier loop has
    left would be reused, and less be reserved."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    if reserved_bytes := torch.cuda.memory_reserved():
        raise RuntimeError(f"{reserved_bytes:,} bytes are reserved before the loop")
