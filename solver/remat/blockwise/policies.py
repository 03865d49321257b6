"""`Policies`: the outputs that each block saves, for other checkpointing libraries to execute."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from remat.blockwise.block_step import SELECTIVE
from remat.documents.base import Document, DottedPath, Record
from remat.limits.units import format_bytes, format_seconds
from remat.report.report import Described, Fact, Report, Table, fold_layer_numbers

OPERATORS = "operators"
REGIONS = "regions"
MEGATRON = "megatron"
RULES = (OPERATORS, REGIONS, MEGATRON)
"""The granularity at which an executor saves or recomputes: outputs of single operators, all that
chosen modules save, or modules of Megatron's layers that are recomputed."""

_COLUMN_TITLES = {MEGATRON: "recomputed"}

_CallNumber = Annotated[int, Field(ge=0, le=1_000_000)]
_Name = Annotated[str, Field(min_length=1, max_length=200)]


class BlockPolicy(Record):
    """How one block runs: "as it is", "checkpointed" (recomputed as a whole) or "selective".

    `block` is the module path of the block. A selective block is recomputed except for what it
    saves. `operators` lists for each operator which of its calls in the block, counted from 0, save
    their outputs; `regions` the submodules that save what their backward needs; `modules` the
    submodules to recompute, by Megatron's names for them, where everything else is saved.
    """

    block: DottedPath
    how: Literal["as it is", "checkpointed", "selective"]
    operators: dict[_Name, tuple[_CallNumber, ...]] = Field(default_factory=dict)
    regions: tuple[DottedPath, ...] = ()
    modules: tuple[_Name, ...] = ()

    @property
    def saved(self) -> str:
        """A line that lists what the block saves; with the rules "megatron", what it recomputes."""
        calls = [
            _short_operator_name(name)
            if numbers == (0,)
            else f"{_short_operator_name(name)} {'+'.join(map(str, numbers))}"
            for name, numbers in self.operators.items()
        ]
        return ", ".join((*calls, *self.regions, *self.modules))


class Policies(Described, Document):
    """The policies of a model's blocks, with the predicted peak and time of a training step.

    Bytes include parameters, gradients and everything outside of blocks; seconds are of the blocks
    only. `optimum_overhead` is the overhead of a plan by remat of the same blocks within the same
    peak, which may recompute single operations; None if it was not computed.
    """

    FORMAT: ClassVar[str] = "remat.policies"
    VERSION: ClassVar[int] = 1

    model: Annotated[DottedPath, Field(max_length=500)] = ""
    rules: Literal["operators", "regions", "megatron"] = OPERATORS
    blocks: tuple[BlockPolicy, ...]
    budget_bytes: int = Field(ge=0)
    peak_bytes: int = Field(ge=0)
    baseline_bytes: int = Field(ge=0)
    time_s: float = Field(ge=0)
    baseline_time_s: float = Field(ge=0)
    optimum_overhead: float | None = Field(default=None, ge=-1)

    @model_validator(mode="after")
    def _check_rules_of_blocks(self) -> Self:
        """Raise ValueError if two policies are for one block, or one lists what the rules do not
        allow."""
        if len({policy.block for policy in self.blocks}) < len(self.blocks):
            raise ValueError("two policies are for the same block")
        for policy in self.blocks:
            entries = {
                OPERATORS: policy.operators,
                REGIONS: policy.regions,
                MEGATRON: policy.modules,
            }
            for rules in RULES:
                if entries[rules] and (policy.how != SELECTIVE or rules != self.rules):
                    raise ValueError(
                        f"the policy of {policy.block} lists what rules={rules!r} with "
                        f"how={SELECTIVE!r} may save or recompute, but it has "
                        f"rules={self.rules!r}, how={policy.how!r}"
                    )
        return self

    def for_block(self, block: str) -> BlockPolicy | None:
        """Return the policy of the block at the module path `block`, or None."""
        return next((policy for policy in self.blocks if policy.block == block), None)

    @property
    def overhead(self) -> float:
        """Extra time as a fraction of the blocks' time without recomputation."""
        return self.time_s / self.baseline_time_s - 1 if self.baseline_time_s else 0.0

    def report(self) -> Report:
        """Return budget, peak, time, overhead of a plan by remat, and a table of the policies."""
        share = f"{self.peak_bytes / max(self.baseline_bytes, 1):.1%}"
        facts = [
            Fact("budget", format_bytes(self.budget_bytes)),
            Fact(
                "peak",
                f"{format_bytes(self.peak_bytes)}, {share} of "
                f"{format_bytes(self.baseline_bytes)} without recomputation",
            ),
            Fact(
                "time",
                f"{format_seconds(self.time_s)} in blocks, {100 * self.overhead:+.3g}% over "
                f"{format_seconds(self.baseline_time_s)} (measured by running the blocks)",
            ),
        ]
        if self.optimum_overhead is not None:
            optimum = (
                f"{100 * self.optimum_overhead:+.3g}% within that peak, if the blocks are planned "
                "and run by remat (costs per operation)"
            )
            facts.append(Fact("remat", optimum))
        heading = ("blocks", "", _COLUMN_TITLES.get(self.rules, "saved"))
        return Report(facts, Table([heading, *self._rows()], "l"))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        def row_key(policy: BlockPolicy) -> object:
            return fold_layer_numbers(policy.block), policy.how, policy.saved

        for _, group in groupby(self.blocks, key=row_key):
            policies = list(group)
            first, last = policies[0].block, policies[-1].block
            name = first if first == last else f"{first} to {last}"
            yield name, policies[0].how, policies[0].saved


def _short_operator_name(operator: str) -> str:
    return operator.removeprefix("aten.").removesuffix(".default")
