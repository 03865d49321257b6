"""The prediction of one row, in a process of its own: `python -m benchmarks.fit_world.prediction`.

A process for each row returns all of its memory, and a failing row stops no other.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import time
import warnings
from typing import Any

import torch

import remat
from benchmarks.fit_world.building import build, is_installed
from benchmarks.fit_world.measurement import Measurement
from benchmarks.fit_world.sources import MEASUREMENTS
from remat.costs.optimizer_memory import OPTIMIZERS

Prediction = dict[str, Any]


def missing(row: Measurement) -> list[str]:
    """Return what a prediction of a row needs and is not here."""
    loop = row.loop
    needed = [loop.library]
    needed += ["peft"] if loop.adapter is not None else []
    needed += ["bitsandbytes"] if loop.quantize else []
    result = [f"the package {name}" for name in needed if not is_installed(name)]
    parameters = inspect.signature(remat.fit).parameters
    result += [f"the option {name}" for name in fit_options(row) if name not in parameters]
    if loop.optimizer not in OPTIMIZERS:
        result.append(f"the optimizer {loop.optimizer}")
    return [*result, *row.needs]


def fit_options(row: Measurement) -> dict[str, Any]:
    """Return the arguments of `remat.fit` for a row."""
    loop = row.loop
    options: dict[str, Any] = {"device": row.gpu, "memory": "10TiB", "optimizer": loop.optimizer}
    return {"outputs": "loss"} | options | dict(loop.fit)


def predict(row: Measurement) -> Prediction:
    """Return the predicted bytes of a row: those that correspond to what was measured."""
    start_s = time.perf_counter()
    autocast: Any = contextlib.nullcontext()
    if row.loop.autocast:
        # A torch without CUDA cannot enable autocast there: that of the CPU stands for it.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        autocast = torch.autocast(device, getattr(torch, row.loop.autocast))
    with warnings.catch_warnings(), autocast:
        warnings.simplefilter("ignore")
        model, args, kwargs = build(row.loop)
        memory = remat.fit(model, args, kwargs, **fit_options(row)).memory
    is_allocated = row.measured == "allocated"
    return {
        "predicted_bytes": memory.peak_bytes if is_allocated else memory.reserved_bytes,
        "parts": memory.parts,
        "seconds": round(time.perf_counter() - start_s, 1),
    }


if __name__ == "__main__":
    measurement = next(m for m in MEASUREMENTS if m.key == sys.argv[1])
    print(json.dumps(predict(measurement)))
