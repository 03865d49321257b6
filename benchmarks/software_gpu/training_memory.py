"""Memory of training loops in eager mode, optimizer included, against the prediction of fit.

One case is a family in one precision, without families that have convolutions: `remat.fit` does not
know the workspaces that these have without cuDNN. Each optimizer, and a checkpoint for each block
with AdamW, is a row; AdamW in 8 bits if bitsandbytes is installed. The loop starts with an empty
allocator and takes three steps.
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
from benchmarks.software_gpu.families import CONVOLUTIONAL, DTYPES, FAMILIES, Batch, build
from remat.report.fit import Fit

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
    return [f"{f}-{dtype}" for f in FAMILIES if f not in CONVOLUTIONAL for dtype in DTYPES]


def run_case(case: str) -> list[Row]:
    """Return a row for each optimizer."""
    family, _, dtype = case.partition("-")
    return [_row(family, dtype, name) for name in (*OPTIMIZERS, CHECKPOINTED)]


def _row(family: str, dtype: str, name: str) -> Row:
    gc.collect()
    torch.cuda.empty_cache()
    model, batch = build(family, dtype)
    row: Row = {"family": family, "dtype": dtype, "optimizer": name}
    optimizer_name = "adamw" if name == CHECKPOINTED else name
    context = (
        torch.autocast("cuda", torch.bfloat16) if dtype == "autocast" else contextlib.nullcontext()
    )
    try:
        predicted = _predicted(model, batch, optimizer_name, context)
        if name != CHECKPOINTED:
            memory = predicted.memory
            peak_bytes, reserved_bytes = memory.peak_bytes, memory.expandable_bytes
        else:
            (option,) = [o for o in predicted.options if o.name.startswith("checkpoint")]
            peak_bytes, reserved_bytes = option.peak_bytes, None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                enable: Callable[[], None] = getattr(model, "gradient_checkpointing_enable")  # noqa: B009
                enable()
    except (remat.RematError, ValueError) as error:
        return row | refusal(error if isinstance(error, remat.RematError) else _error(error))
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    requested, reserved = _peaks(model, batch, optimizer, context)
    error = peak_bytes / requested - 1
    row |= {
        "predicted_bytes": peak_bytes,
        "requested_bytes": requested,
        "error": round(error, 5),
        "is_met": abs(error) <= TOLERANCE,
    }
    if reserved_bytes is not None:
        row |= {"predicted_reserved_bytes": reserved_bytes, "reserved_bytes": reserved}
        row["reserved_error"] = round(reserved_bytes / reserved - 1, 5)
    return row


def _error(error: ValueError) -> remat.RematError:
    return remat.RematError(f"no checkpoints: {error}")


def _predicted(
    model: nn.Module,
    batch: Batch,
    optimizer: str,
    context: contextlib.AbstractContextManager[object],
) -> Fit:
    """Return the prediction for a little less memory than needed, so that there are options."""
    with context:
        answer = remat.fit(model, (), batch, optimizer=optimizer, memory="1TiB")
        memory = answer.memory.reserved_bytes - 1
        return remat.fit(
            model, (), batch, optimizer=optimizer, memory=memory, strategy=remat.Auto(time_limit=2)
        )


def _peaks(
    model: nn.Module,
    batch: Batch,
    optimizer: optim.Optimizer,
    context: contextlib.AbstractContextManager[object],
) -> tuple[int, int]:
    """Return the requested and the reserved bytes of a training loop, at their peaks."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(_STEPS):
        with context:
            outputs = model(**batch)
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del outputs, loss
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.peak"], stats["reserved_bytes.all.peak"]
