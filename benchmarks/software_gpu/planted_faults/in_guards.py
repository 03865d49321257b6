"""Guards that do not notice a change: the plan of the first step runs in all later ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from benchmarks.software_gpu.planted_faults.fault import Fault, Plant
from benchmarks.software_gpu.planted_faults.session import STEP, Event
from remat.frontend.planning import planner
from remat.frontend.runtime.guards import CallSignature, call_signature
from remat.frontend.runtime.module import BoundProgram


def faults() -> list[Fault]:
    """Return the faults of this module."""
    changes = (
        ("shape", STEP, Event(is_half_batch=True), ("inputs",)),
        ("Python arguments", STEP, Event(scale=0.5), ("structure",)),
        ("requires_grad", Event(freezes=True), STEP, ("parameters",)),
        ("autocast mode", STEP, Event(is_autocast=True), ("autocast",)),
        ("training mode", STEP, Event(is_training=False), ("training", "training_exceptions")),
        ("existing gradients", STEP, Event(accumulates=True), ("accumulates_gradients",)),
    )
    return [
        Fault(f"no guard on {what}", _without_guard(*fields), (first, second))
        for what, first, second, fields in changes
    ]


def _without_guard(*fields: str) -> Plant:
    """Return a plant in which these fields of a call's signature are those of the first call."""

    @contextmanager
    def plant() -> Iterator[None]:
        first: list[CallSignature] = []

        def signature(*args: Any) -> CallSignature:
            current = call_signature(*args)
            first.append(current)
            return current._replace(**{name: getattr(first[0], name) for name in fields})

        patches: list[Any] = [mock.patch.object(planner, "call_signature", signature)]
        if "training" in fields:  # it is checked before the signature, too
            patches.append(mock.patch.object(BoundProgram, "training", False))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    return plant
