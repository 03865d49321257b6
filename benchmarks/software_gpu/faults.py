"""Planted faults: small changes of remat's behaviour, each of which a check must notice.

One case is a fault, or none. The checks are those of the other tables: numbers against eager mode,
and memory against the plan. remat runs each step on one stream and waits for no event, so a wait
that is skipped is not among the faults.
"""

from __future__ import annotations

from typing import Any

from benchmarks.software_gpu.planted_faults import (
    at_run_time,
    in_compiled_steps,
    in_guards,
    in_memory,
    in_programs,
)
from benchmarks.software_gpu.planted_faults.fault import Fault, patched
from benchmarks.software_gpu.planted_faults.in_compiled_steps import CompiledFault
from benchmarks.software_gpu.planted_faults.session import (
    STEP,
    AttentionNet,
    Event,
)

Row = dict[str, Any]

NO_FAULT = "no fault"
EVERY_EVENT = (
    STEP,
    Event(is_half_batch=True),
    Event(scale=0.5),
    Event(freezes=True),
    Event(is_autocast=True),
    Event(is_training=False),
    Event(accumulates=True),
    Event(loss_factor=3.0),
    STEP,
)


def all_faults(device: str = "cuda") -> list[Fault | CompiledFault]:
    """Return the faults that can be noticed on a device, and the sessions without one."""
    faults: list[Fault | CompiledFault] = [
        Fault(NO_FAULT, patched(), EVERY_EVENT),
        Fault(f"{NO_FAULT}, saving all", patched(), EVERY_EVENT, devices=("cuda",), is_saving=True),
        Fault(
            f"{NO_FAULT}, attention",
            patched(),
            devices=("cuda",),
            is_saving=True,
            build_model=AttentionNet,
        ),
        *in_programs.faults(),
        *at_run_time.faults(),
        *in_guards.faults(),
        *in_memory.faults(),
        *in_compiled_steps.faults(),
    ]
    return [fault for fault in faults if device in fault.devices]


def cases() -> list[str]:
    """Return the names of the faults on CUDA."""
    return [fault.name for fault in all_faults()]


def run_case(case: str) -> list[Row]:
    """Return the row of one fault on CUDA."""
    (fault,) = (fault for fault in all_faults() if fault.name == case)
    return [row_of(fault, "cuda")]


def row_of(fault: Fault | CompiledFault, device: str) -> Row:
    """Run a fault's session. The requirement is that a fault is noticed, and nothing else."""
    noticed = fault.noticed(device)
    has_fault = not fault.name.startswith(NO_FAULT)
    return {
        "fault": fault.name,
        "noticed": "; ".join(noticed[:3]),
        "differences": len(noticed),
        "is_noticed": bool(noticed),
        "is_met": bool(noticed) == has_fault,
    }
