"""Numbers of eager plans: loss and gradients against eager mode, bit for bit.

Where a plan has other operations than eager mode, or sums in another order, only rounding differs.

Needs the software GPU with right numbers. Both models take the same steps from the same seeds, and
the generator's state must be the same after each, too. Costs are those of `Roofline("h100")`: they
decide what is recomputed, and numbers must not depend on it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import remat
from benchmarks.software_gpu.families import DTYPES, FAMILIES, NAMESPACES, Batch, build

BUDGETS = ("100%", "75%", "min")
MODES = ("optimize", "enable", "blocks")
"""`remat.optimize`; `remat.enable` of the whole model; of its blocks."""

STEPS = 2
STRATEGY = remat.Auto(gap=0.05, time_limit=5.0)

SHARED = (
    "tensors that blocks share get one gradient from each block, which is another order of the "
    "sum, as with torch.utils.checkpoint(use_reentrant=True)"
)
MIN_SCALE = 1e-3
"""The least scale of a difference, as a share of the largest gradient of the step. The gradient of
an attention key's bias is zero but for rounding: its own largest element says nothing."""
OTHER_ROUNDING = {
    **{("lstm", mode): "the plan has each step's operations, not the fused cell" for mode in MODES},
    **{(family, "blocks"): SHARED for family in ("t5", "bart", "whisper", "unet2d")},
}
"""Reasons for another rounding than eager mode's, by family and mode."""
ROUNDING = {"float32": 1e-5, "bfloat16": 0.05, "autocast": 0.05}
"""The largest difference of a tensor that rounding explains, relative to its scale: its largest
element, and at least `MIN_SCALE` of the largest gradient."""

STEPWISE, STEPWISE_TOKENS = frozenset({"mamba"}), 16
"""Families with operations for each token, and the length of their sequences: each operation is
computed on the CPU."""

Row = dict[str, Any]


class Recurrent(nn.Module):
    """Two LSTMs with dropout between them, and a loss. (Dropout inside of `nn.LSTM` is refused.)"""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(32, 48, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.second = nn.LSTM(48, 48, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the last step's class."""
        hidden = self.second(self.dropout(self.first(x)[0]))[0]
        return nn.functional.cross_entropy(self.head(hidden[:, -1]), labels)


def cases() -> list[str]:
    """Return the names of the cases, "FAMILY-DTYPE"."""
    return [f"{family}-{dtype}" for family in (*FAMILIES, "lstm") for dtype in DTYPES]


def run_case(case: str) -> list[Row]:
    """Return the rows of one case: each mode at each budget."""
    family, _, dtype = case.partition("-")
    return [check_numbers(family, dtype, budget, mode) for mode in MODES for budget in BUDGETS]


def check_numbers(family: str, dtype: str, budget: str, mode: str) -> Row:
    """Train a family by a plan and in eager mode, and return a row with the differences.

    `mode` is one of `MODES`. A budget that is refused as too small counts as met, and so does
    another rounding with a reason, which the row then has as its note.
    """
    row: Row = {"family": family, "dtype": dtype, "budget": budget, "mode": mode}
    gc.collect()
    model, batch = _build(family, dtype)
    reference = copy.deepcopy(model)
    try:
        with _autocast(dtype):
            planned = PLANNERS[mode](model, budget, batch)
    except remat.RematError as error:
        refused = str(error).splitlines()[0][:300]
        return row | {"refused": refused, "is_met": isinstance(error, remat.InfeasibleBudget)}
    differences: dict[str, float] = {}
    for step in range(STEPS):
        expected = step_results(reference, reference, batch, dtype, seed=step)
        actual = step_results(planned, model, batch, dtype, seed=step)
        for name, difference in unequal(expected, actual).items():
            differences[f"step {step + 1}: {name}"] = difference
    return row | judged(differences, OTHER_ROUNDING.get((family, mode)), ROUNDING[dtype])


def judged(differences: Mapping[str, float], reason: str | None, tolerance: float) -> Row:
    """Return the figures of a row. Where there is a reason for another rounding, differences up to
    `tolerance` meet the requirement."""
    largest = max(differences.values(), default=0.0)
    is_rounding = reason is not None and largest <= tolerance
    texts = [f"{name}: {difference:.2g}" for name, difference in sorted(differences.items())]
    note = {"note": reason} if differences and is_rounding else {}
    return {
        "differences": texts[:5],
        "difference_count": len(texts),
        **note,
        "is_met": not differences or is_rounding,
    }


def _build(family: str, dtype: str) -> tuple[nn.Module, Batch]:
    if family != "lstm":
        model, batch = build(family, dtype)
        if family in STEPWISE:
            batch = {name: value[:, :STEPWISE_TOKENS] for name, value in batch.items()}
        if "attention_mask" in batch:
            # In eager mode, transformers reads the mask and drops one of ones alone, which a trace
            # cannot: attention would be another kernel, with other rounding.
            batch["attention_mask"][0, -3:] = 0
        return model, batch
    torch.manual_seed(0)
    parameter_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = Recurrent().to("cuda", parameter_dtype)
    batch = {
        "x": torch.randn(4, 12, 32).to("cuda", parameter_dtype),
        "labels": torch.tensor([1, 0, 9, 4], device="cuda"),
    }
    return model, batch


def _autocast(dtype: str) -> contextlib.AbstractContextManager[object]:
    if dtype != "autocast":
        return contextlib.nullcontext()
    return torch.autocast("cuda", torch.bfloat16)


def _optimized(model: nn.Module, budget: str, batch: Batch) -> nn.Module:
    return remat.optimize(
        model, budget, (), batch, strategy=STRATEGY, costs=remat.Roofline("h100"),
        namespaces=NAMESPACES,
    )  # fmt: skip


def _enabled(scope: str) -> Callable[[nn.Module, str, Batch], nn.Module]:
    def enable(model: nn.Module, budget: str, batch: Batch) -> nn.Module:
        costs = remat.Roofline("h100")
        remat.enable(
            model, budget, (), batch, scope=scope, strategy=STRATEGY, costs=costs,
            namespaces=NAMESPACES,
        )  # fmt: skip
        return model

    return enable


PLANNERS: dict[str, Callable[[nn.Module, str, Batch], nn.Module]] = {
    "optimize": _optimized,
    "enable": _enabled("model"),
    "blocks": _enabled("blocks"),
}


def step_results(
    run: Callable[..., Any], model: nn.Module, batch: Batch, dtype: str, seed: int
) -> dict[str, Tensor | None]:
    """Run a training step, and return its results by name. `run` computes the loss of `model`."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with _autocast(dtype):
        outputs = run(**batch)
    loss = outputs if isinstance(outputs, Tensor) else outputs.loss
    loss.backward()
    return {
        "loss": loss.detach().cpu(),
        "generator": torch.cuda.get_rng_state(),
        **{f"{n}.grad": None if p.grad is None else p.grad.cpu() for n, p in _parameters(model)},
        **{n: buffer.cpu() for n, buffer in model.named_buffers()},
    }


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def unequal(
    expected: Mapping[str, Tensor | None], actual: Mapping[str, Tensor | None]
) -> dict[str, float]:
    """Return the results that differ in any bit, with the largest difference relative to their
    scale: infinity for a missing result, and for another generator state."""
    differences = {}
    gradients = [t for name, t in expected.items() if name.endswith(".grad") and t is not None]
    min_scale = MIN_SCALE * max((_largest(t) for t in gradients), default=0.0)
    for name in expected.keys() | actual.keys():
        one, other = expected.get(name), actual.get(name)
        if one is None or other is None:
            if one is not other:
                differences[name] = math.inf
        elif not torch.equal(one, other):
            is_state = name == "generator"
            differences[name] = (
                math.inf if is_state else _relative_difference(one, other, min_scale)
            )
    return differences


def _relative_difference(one: Tensor, other: Tensor, min_scale: float) -> float:
    scale = max(_largest(one), min_scale, 1e-300)
    difference = _largest(one.double() - other.double()) / scale
    return math.inf if math.isnan(difference) else difference


def _largest(tensor: Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0
