"""The plans of what was compiled, in the order in which it was."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from remat.limits.budget import format_bytes
from remat.plan import Plan

_NUMBERS = itertools.count()
_PLANS: dict[int, CompiledPlan] = {}
_MOST = 1_000


@dataclass
class CompiledPlan:
    """A plan and what came of it.

    `module` is what was compiled: the class of the module, or the name of the function; with the
    line from which on, after a graph break; "" where torch does not tell. `compile_id` is the
    number of the compilation in torch's own logs, `operations` what torch traced, before kernels
    were made of it.
    `budget_bytes` is what was asked for less the `others_bytes` that other graphs of the step hold
    meanwhile, None for "min"; `plan` is for so much less as the kernels that Inductor made of
    earlier ones took more (`rounds`). `verified_bytes` is the peak of its own kernels and buffers,
    read off before code was generated; None where Inductor was not asked, or took its code from a
    cache. `baseline_bytes` is the same without recomputation. `given_bytes` are parameters, buffers
    and batch. The backward holds `held_bytes` beside what it reads, and `copied_bytes` of
    parameters in another layout; `passing` are the gradients that it is given and frees once they
    are read, by name, with their bytes.
    Between forward and backward `saved_bytes` are held, and without recomputation would be
    `baseline_saved_bytes`: other graphs of the same step (`group`) run meanwhile.
    """

    plan: Plan
    budget_bytes: int | None
    module: str = ""
    compile_id: str = ""
    baseline_bytes: int = 0
    others_bytes: int = 0
    given_bytes: int = 0
    held_bytes: int = 0
    copied_bytes: int = 0
    held_names: frozenset[str] = frozenset()
    passing: Mapping[str, int] = field(default_factory=dict[str, int])
    saved_bytes: int = 0
    baseline_saved_bytes: int = 0
    group: object = None
    rounds: int = 1
    operations: int = 0
    planned_s: float = 0.0
    verified: dict[str, int] = field(default_factory=dict[str, int])
    number: int = field(default_factory=lambda: next(_NUMBERS))

    @property
    def verified_bytes(self) -> int | None:
        """The larger of forward's and backward's, constant memory included."""
        return max(self.verified.values(), default=None)

    @property
    def frame(self) -> int | None:
        """The number of the frame in torch's logs: "1/0" is of frame 1."""
        number = self.compile_id.rpartition("!")[-1].partition("/")[0]
        return int(number) if number.isdecimal() else None

    @property
    def title(self) -> str:
        """What was compiled, as log lines name it."""
        return titled(self.module, self.compile_id)

    def __repr__(self) -> str:
        asked = "min" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        verified = (
            "" if self.verified_bytes is None else f", verified {format_bytes(self.verified_bytes)}"
        )
        of = f"{self.module}: " if self.module else ""
        return f"CompiledPlan({of}{self.plan!r}, budget {asked}{verified})"


def titled(module: str, compile_id: str) -> str:
    """A name for both, also where torch tells none."""
    return f"{module or 'a graph'} [{compile_id}]" if compile_id else module or "a graph"


class Lesson(NamedTuple):
    """What Inductor's kernels of earlier plans showed: plan for so many bytes less, and with memory
    of their own for the tensors `apart`, named by their nodes: no kernel wrote these over what it
    read, as was planned."""

    less_bytes: int = 0
    apart: frozenset[str] = frozenset()


NOTHING = Lesson()


class Others(NamedTuple):
    """What other graphs of a step hold while one runs, as planned and without recomputation."""

    held_bytes: int = 0
    baseline_bytes: int = 0


def held_by_others(group: object) -> Others:
    """Of the graphs that were compiled before for the same step. Those that torch makes of a model
    with graph breaks run one inside of the other: forward, forward, backward, backward."""
    if group is None:
        return Others()
    plans = [plan for plan in _PLANS.values() if plan.group is group]
    return Others(
        sum(plan.saved_bytes for plan in plans), sum(plan.baseline_saved_bytes for plan in plans)
    )


def remember(compiled: CompiledPlan) -> None:
    """Keep it for `compiled_plans`."""
    _PLANS[compiled.number] = compiled
    while len(_PLANS) > _MOST:
        _PLANS.pop(next(iter(_PLANS)))


def forget(compiled: CompiledPlan) -> None:
    """It is not what runs."""
    _PLANS.pop(compiled.number, None)


def find(number: int) -> CompiledPlan | None:
    """The plan of this number."""
    return _PLANS.get(number)


def compiled_plans() -> list[CompiledPlan]:
    """The plans of all graphs that were compiled in this process, oldest first."""
    return list(_PLANS.values())
