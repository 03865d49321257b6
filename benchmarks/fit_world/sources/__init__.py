"""All published measurements, by source."""

from __future__ import annotations

from benchmarks.fit_world.measurement import Measurement
from benchmarks.fit_world.sources import (
    fms_acceleration,
    litgpt,
    peft_comparison,
    pytorch_memory_optim,
    torchtune,
    transformers_docs,
)

MEASUREMENTS: tuple[Measurement, ...] = (
    *fms_acceleration.ROWS,
    *peft_comparison.ROWS,
    *litgpt.ROWS,
    *torchtune.ROWS,
    *transformers_docs.ROWS,
    *pytorch_memory_optim.ROWS,
)
"""Every row that a configuration reproduces, or would with what it `needs`."""
