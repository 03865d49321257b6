"""`Policies`: what each block of a model saves for its backward, for executors other than remat."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from remat.documents.base import Document, Path_, Record
from remat.limits.budget import format_bytes, format_seconds
from remat.report.tables import aligned, starred

OPERATORS = "operators"
REGIONS = "regions"
MEGATRON = "megatron"
RULES = (OPERATORS, REGIONS, MEGATRON)
"""What an executor decides on: the output of each operator, what whole modules save, or which
modules of Megatron's layers run again."""

AS_IT_IS = "as it is"
CHECKPOINTED = "checkpointed"
SELECTIVE = "selective"

_HEADS = {MEGATRON: "run again"}

_Number = Annotated[int, Field(ge=0, le=1_000_000)]
_Name = Annotated[str, Field(min_length=1, max_length=200)]


class BlockPolicy(Record):
    """How the block at `block` runs: "as it is", "checkpointed" (run again as a whole), or
    "selective": run again but for what it saves.

    `operators` has the numbers of the calls of each operator, counted in the block, whose outputs
    are saved; `regions` the modules inside of the block that save what they need; `modules` those
    that run again, by Megatron's names for them, where everything else is saved.
    """

    block: Path_
    how: Literal["as it is", "checkpointed", "selective"]
    operators: dict[_Name, tuple[_Number, ...]] = Field(default_factory=dict)
    regions: tuple[Path_, ...] = ()
    modules: tuple[_Name, ...] = ()

    @property
    def saved(self) -> str:
        """What it saves, in a line, or, where all else is saved, what it runs again."""
        calls = [
            _short(name) if numbers == (0,) else f"{_short(name)} {'+'.join(map(str, numbers))}"
            for name, numbers in self.operators.items()
        ]
        return ", ".join((*calls, *self.regions, *self.modules))


class Policies(Document):
    """The policies of a model's blocks with what was foreseen: bytes with parameters, gradients and
    all that is outside of blocks, seconds of the blocks alone. `optimum_overhead` is the extra time
    of the same blocks planned freely within the same peak, as a share, if that was looked for."""

    FORMAT: ClassVar[str] = "remat.policies"
    VERSION: ClassVar[int] = 1

    model: Annotated[Path_, Field(max_length=500)] = ""
    rules: Literal["operators", "regions", "megatron"] = OPERATORS
    blocks: tuple[BlockPolicy, ...]
    budget_bytes: int = Field(ge=0)
    peak_bytes: int = Field(ge=0)
    baseline_bytes: int = Field(ge=0)
    time_s: float = Field(ge=0)
    baseline_time_s: float = Field(ge=0)
    optimum_overhead: float | None = Field(default=None, ge=-1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({policy.block for policy in self.blocks}) < len(self.blocks):
            raise ValueError("two policies are for the same block")
        for policy in self.blocks:
            named = {
                OPERATORS: policy.operators,
                REGIONS: policy.regions,
                MEGATRON: policy.modules,
            }
            for rules in RULES:
                if named[rules] and (policy.how != SELECTIVE or rules != self.rules):
                    raise ValueError(
                        f"{policy.block} has what rules of {rules} say, which its policy rules out"
                    )
        return self

    def of(self, block: str) -> BlockPolicy | None:
        """The policy of the block at that path, if there is one."""
        return next((policy for policy in self.blocks if policy.block == block), None)

    @property
    def overhead(self) -> float:
        """Extra time, as a share of the blocks' time without recomputation."""
        return self.time_s / self.baseline_time_s - 1 if self.baseline_time_s else 0.0

    def describe(self) -> str:
        """A table: budget, peak and time, that of a free plan, and what each block saves."""
        share = f"{self.peak_bytes / max(self.baseline_bytes, 1):.1%}"
        optimum: list[str] = []
        if self.optimum_overhead is not None:
            optimum = [
                f"freely  {100 * self.optimum_overhead:+.3g}% within that peak, planned and run by "
                "remat (its costs are by operation)"
            ]
        lines = [
            f"budget  {format_bytes(self.budget_bytes)}",
            f"peak    {format_bytes(self.peak_bytes)}, {share} of "
            f"{format_bytes(self.baseline_bytes)} without recomputation",
            f"time    {format_seconds(self.time_s)} in blocks, {100 * self.overhead:+.3g}% over "
            f"{format_seconds(self.baseline_time_s)} (timed as they ran)",
            *optimum,
            "",
            *aligned([("blocks", "", _HEADS.get(self.rules, "saved")), *self._rows()], left=3),
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()

    def _rows(self) -> Iterator[tuple[str, ...]]:
        def alike(policy: BlockPolicy) -> object:
            return starred(policy.block), policy.how, policy.saved

        for _, found in groupby(self.blocks, key=alike):
            policies = list(found)
            first, last = policies[0].block, policies[-1].block
            name = first if first == last else f"{first} to {last}"
            yield name, policies[0].how, policies[0].saved


def _short(operator: str) -> str:
    return operator.removeprefix("aten.").removesuffix(".default")
