"""`Fault`: a small change of remat's behaviour, planted at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import nn

from benchmarks.software_gpu.planted_faults.session import (
    STEP,
    Event,
    Net,
    NotPlantedError,
    Session,
)
from remat.documents.program import Program
from remat.frontend.planning import planner
from remat.rewrite import rewrite
from remat.strategies import Strategy
from remat.strategies.baselines.uniform import KeepAll, RecomputeAll

Plant = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Fault:
    """A fault with the session that must notice it.

    `plant` returns a context in which remat has the fault. `devices` are those where it can be
    noticed. `is_saving` selects a plan that recomputes nothing and saves all that the backward
    reads; by default everything is recomputed.
    """

    name: str
    plant: Plant
    events: Sequence[Event] = (STEP, STEP)
    devices: Sequence[str] = ("cpu", "cuda")
    is_saving: bool = False
    build_model: Callable[[], nn.Module] = Net

    def noticed(self, device: str) -> list[str]:
        """Return what notices the fault."""
        strategy: Strategy = KeepAll() if self.is_saving else RecomputeAll()
        with self.plant():
            return Session(
                device, strategy, self.events, build_model=self.build_model
            ).differences()


Replacement = tuple[object, str, Any]
"""The owner of an attribute, its name and its new value."""


def patched(*replacements: Replacement) -> Plant:
    """Return a plant that replaces attributes."""

    @contextmanager
    def plant() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, value in replacements:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    return plant


def changed_program(change: Callable[[Program], Program], *others: Replacement) -> Plant:
    """Return a plant that changes each program between rewriting and lowering, and makes
    `others`. The session
    raises `NotPlantedError` if a program stays as it is."""

    def rewrite_and_change(*args: Any) -> Program:
        program = rewrite(*args)
        changed = change(program)
        if changed == program:
            raise NotPlantedError("the fault does not apply to this program")
        return changed

    return patched((planner, "rewrite", rewrite_and_change), *others)
