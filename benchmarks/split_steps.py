"""Real training steps at small budgets, with and without splitting, on the CPU.

    python -m benchmarks.split_steps                          # all models, to benchmarks/results
    python -m benchmarks.split_steps --compiled               # the same under torch.compile
    python -m benchmarks.split_steps --only gpt2 t5 --out DIR

Each model is small, in float32, with random weights, dropout and ignored labels where it has them,
and returns its loss only. Two steps run in eager mode, of which the second adds to the gradients of
the first; then the same two steps, from the same seeds, under `remat.optimize` with a budget of 50%
and of 30%. A row has the peaks of live storages (parameters, gradients and batch included), the
budgets, and the largest differences of losses and gradients. Without splitting it says if the
budget is infeasible, or the extra time.

With `--compiled`, the step is that of `remat.compile`, without dropout, since Inductor samples
other numbers than eager mode. Its peak is the allocator's, and its budget a share of plain
torch.compile's peak, whose differences to eager mode are in the row, too.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import remat
from benchmarks.harness import machine, report
from remat.frontend.memory.allocator_peak import allocated_peak
from remat.frontend.memory.meter import LiveStorageMeter
from remat.plan_data import UNSPLIT_MIN_BYTES_STAT

Row = dict[str, Any]
Batch = dict[str, torch.Tensor]
Example = tuple[nn.Module, Batch]

RESULTS = Path(__file__).parent / "results"
BUDGETS = ("50%", "30%")
ROWS, TOKENS, WORDS = 4, 128, 6000
COSTS = remat.Roofline("cpu")
STRATEGY = remat.Auto(time_limit=10.0)
IGNORED = -100


def words() -> Batch:
    """Return a batch of tokens; every fifth label is ignored."""
    ids = torch.randint(2, WORDS, (ROWS, TOKENS))
    labels = ids.clone()
    labels[:, ::5] = IGNORED
    return {"input_ids": ids, "labels": labels}


def gpt2() -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=128, n_head=4, n_positions=TOKENS, vocab_size=WORDS, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), words()


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
        use_cache=False, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config), words()


def qwen3() -> Example:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=128, intermediate_size=352, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
        use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config), words()


def t5() -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4,
        use_cache=False, pad_token_id=0,
    )  # fmt: skip
    config.decoder_start_token_id = 0  # type: ignore[attr-defined]
    return T5ForConditionalGeneration(config), words()


def bert() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=TOKENS,
    )  # fmt: skip
    return BertForMaskedLM(config), {**words(), "attention_mask": torch.ones(ROWS, TOKENS)}


def vit() -> Example:
    """A vision transformer with attention weights as tensors, larger than all else."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=8, intermediate_size=128,
        image_size=128, patch_size=8, hidden_dropout_prob=0.1,
    )  # fmt: skip
    config.num_labels = 10
    model = ViTForImageClassification(config)
    model.set_attn_implementation("eager")
    return model, {"pixel_values": torch.randn(4, 3, 128, 128), "labels": torch.randint(10, (4,))}


class WideLayers(nn.Module):
    """Two gated layers whose hidden width is 24 times that of the model."""

    def __init__(self, width: int = 64, hidden: int = 1536) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, hidden) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(width, hidden) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(hidden, width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for norm, gate, up, down in zip(self.norms, self.gates, self.ups, self.downs, strict=True):
            h = norm(x)
            x = x + F.dropout(down(F.silu(gate(h)) * up(h)), 0.1, self.training)
        return F.mse_loss(x, target)


def wide_layers() -> Example:
    return WideLayers(), {"x": torch.randn(16, 128, 64), "target": torch.randn(16, 128, 64)}


class Logits(nn.Module):
    """Returns the logits of a GPT-2: the training loop has the criterion."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt2 = gpt2()[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.gpt2(input_ids=ids).logits


def smoothed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the labels that are not ignored."""
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=0.1
    )


def logits() -> Example:
    return Logits(), words()


MODELS: dict[str, Callable[[], Example]] = {
    "gpt2": gpt2, "llama": llama, "qwen3": qwen3, "t5": t5, "bert": bert, "vit": vit,
    "wide layers": wide_layers, "criterion outside": logits,
}  # fmt: skip


class Criterion(nn.Module):
    """The model and the criterion of a training loop, in eager mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return smoothed_cross_entropy(self.model(input_ids), labels)


def without_dropout(model: nn.Module) -> nn.Module:
    """Return the model, whose dropout layers and attention drop nothing."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name == "p"):
                setattr(module, name, 0.0)
    return model


class Steps(NamedTuple):
    """Two steps: the peak of live storages of each, in bytes, and its plan's budget (0 in eager
    mode); then both losses and all gradients."""

    peaks_bytes: list[int]
    budgets_bytes: list[int]
    values: list[torch.Tensor]


def run_steps(step: Any, model: nn.Module, batch: Batch, *, positional: bool) -> Steps:
    """Run two steps of `step`; the second adds to the gradients of the first."""
    result = Steps([], [], [])
    args, kwargs = (tuple(batch.values()), {}) if positional else ((), batch)
    for number in range(2):
        torch.manual_seed(number)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in (*model.parameters(), *model.buffers(), *batch.values(), *gradients)
        }
        meter = LiveStorageMeter(sum(storages.values()))
        with meter:
            output = step(*args, **kwargs)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            result.values.append(loss.detach())
            del output
            loss.backward()
        result.peaks_bytes.append(meter.peak_bytes)
        plan = getattr(step, "plan", None)
        result.budgets_bytes.append(plan.budget_bytes if plan else 0)
    result.values.extend(p.grad for p in model.parameters() if p.grad is not None)
    return result


def rows_of(name: str) -> list[Row]:
    """Return a row for each budget of a model."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    is_outside = isinstance(model, Logits)
    copied = copy.deepcopy(model)
    eager = run_steps(
        Criterion(copied) if is_outside else copied, copied, batch, positional=is_outside
    )
    rows: list[Row] = []
    for budget in BUDGETS:
        row: Row = {"model": name, "budget": budget, "eager_bytes": eager.peaks_bytes[0]}
        row |= _unsplit_figures(copy.deepcopy(model), batch, budget)
        row |= _split_figures(copy.deepcopy(model), batch, budget, eager)
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _optimized(model: nn.Module, batch: Batch, budget: str, split: str) -> remat.RematModule:
    options: dict[str, Any] = {"costs": COSTS, "strategy": STRATEGY, "split": split}
    if isinstance(model, Logits):
        return remat.optimize(
            model, budget, tuple(batch.values()), loss=smoothed_cross_entropy, **options
        )
    return remat.optimize(model, budget, example_kwargs=batch, outputs="loss", **options)


def _unsplit_figures(model: nn.Module, batch: Batch, budget: str) -> Row:
    started_s = time.perf_counter()
    try:
        plan = _optimized(model, batch, budget, "off").plan
    except remat.InfeasibleBudget as error:
        figures: Row = {"unsplit_min_bytes": error.min_feasible_bytes}
    else:
        assert plan is not None
        figures = {"unsplit_overhead": round(plan.overhead, 4)}
    return figures | {"unsplit_planning_s": round(time.perf_counter() - started_s, 1)}


def _split_figures(model: nn.Module, batch: Batch, budget: str, eager: Steps) -> Row:
    started_s = time.perf_counter()
    try:
        step = _optimized(model, batch, budget, "auto")
    except remat.InfeasibleBudget as error:
        return {"min_bytes": error.min_feasible_bytes}
    planning_s = round(time.perf_counter() - started_s, 1)
    plan = step.plan
    assert plan is not None
    steps = run_steps(step, model, batch, positional=isinstance(model, Logits))
    smallest_scale = 0.01 * max(value.abs().max().item() for value in eager.values[2:])
    differences = [
        _difference(a, b, smallest_scale if number >= 2 else 0.0)
        for number, (a, b) in enumerate(zip(eager.values, steps.values, strict=True))
    ]
    return {
        "planning_s": planning_s,
        "baseline_bytes": plan.baseline_peak_bytes,
        "predicted_bytes": plan.peak_bytes,
        "peaks_bytes": steps.peaks_bytes,
        "budgets_bytes": steps.budgets_bytes,
        "overhead": round(plan.overhead, 4),
        "lower_bound": plan.lower_bound,
        "splits": [[s.module, s.pieces, s.rows] for s in plan.graph.splits],
        "loss_differences": differences[:2],
        "largest_gradient_difference": max(differences[2:]),
        "equal_gradients": sum(d == 0 for d in differences[2:]),
        "gradients": len(differences) - 2,
    }


def compiled_rows_of(name: str) -> list[Row]:
    """Return a row for each budget of a model under torch.compile."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    from transformers import GPT2LMHeadModel

    without_dropout(model.train())
    if name == "criterion outside":
        model = Criterion(model)
    if isinstance(model, GPT2LMHeadModel):
        model.loss_type = "ForCausalLM"  # Transformers knows none, and Dynamo breaks at its warning
    eager = _compiled_step(copy.deepcopy(model), batch, lambda model: model)
    plain = _compiled_step(copy.deepcopy(model), batch, torch.compile)
    rows: list[Row] = []
    for budget in BUDGETS:
        row: Row = {"model": name, "budget": budget, "plain_peak_bytes": plain.peaks_bytes[0]}
        row["plain_gradient_difference"] = max(_differences(eager, plain)[1:])
        try:
            options: dict[str, Any] = {"outputs": "loss", "time_limit": 20.0}
            step = _compiled_step(
                copy.deepcopy(model),
                batch,
                lambda model, b=budget, o=options: remat.compile(model, b, **o),
            )
        except Exception as error:
            row["failure"] = str(error).splitlines()[1 if "\n" in str(error) else 0][:300]
            rows.append(row)
            print(row, flush=True)
            continue
        plan = remat.compiled_plans()[-1]
        loss_difference, *differences = _differences(eager, step)
        rows.append(
            row
            | {
                "baseline_bytes": plan.baseline_bytes,
                "budget_bytes": plan.budget_bytes,
                "verified_bytes": plan.verified_bytes,
                "peak_bytes": step.peaks_bytes[0],
                "overhead": round(plan.plan.overhead, 4),
                "unsplit_min_bytes": plan.plan.stats.get(UNSPLIT_MIN_BYTES_STAT),
                "splits": [[s.module, s.pieces, s.rows] for s in plan.plan.graph.splits],
                "loss_difference": loss_difference,
                "largest_gradient_difference": max(differences),
            }
        )
        print(rows[-1], flush=True)
    return rows


def _compiled_step(model: nn.Module, batch: Batch, compile_: Callable[[nn.Module], Any]) -> Steps:
    """Return the loss and gradients of a compiled step, and the allocator's peak of a warm one."""
    torch._dynamo.reset()
    run = compile_(model)
    values: list[torch.Tensor] = []

    def step() -> None:
        model.zero_grad(set_to_none=True)
        output = run(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        values[:] = [loss.detach()]
        del output
        loss.backward()

    step()
    values.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    result = list(values)
    model.zero_grad(set_to_none=True)
    constants = {t.untyped_storage().data_ptr(): t.nbytes for t in model.parameters()}
    constants |= {t.data_ptr(): t.nbytes for t in (*batch.values(), *model.buffers())}
    peak_bytes = allocated_peak(step) + sum(constants.values())
    return Steps([peak_bytes], [0], result)


def _differences(expected: Steps, actual: Steps) -> list[float]:
    smallest_scale = 0.01 * max(value.abs().max().item() for value in expected.values[1:])
    return [
        _difference(a, b, smallest_scale if number else 0.0)
        for number, (a, b) in enumerate(zip(expected.values, actual.values, strict=True))
    ]


def _difference(expected: torch.Tensor, actual: torch.Tensor, smallest_scale: float) -> float:
    """Return the largest difference relative to the largest element, or to a hundredth of the
    largest of all gradients: that of a key's bias before a softmax has rounding errors only."""
    scale = max(expected.abs().max().item(), smallest_scale) or 1.0
    return (expected.double() - actual.double()).abs().max().item() / scale


def _line(row: Row) -> str:
    unsplit = (
        f"infeasible below {row['unsplit_min_bytes'] / row['eager_bytes']:.0%}"
        if "unsplit_min_bytes" in row
        else f"{row['unsplit_overhead']:+.1%}"
    )
    head = f"{row['model']}, {row['budget']}: unsplit {unsplit}; "
    if "peaks_bytes" not in row:
        return f"{head}infeasible below {row['min_bytes'] / row['eager_bytes']:.0%}"
    peaks = [
        f"{peak / budget:.4f}"
        for peak, budget in zip(row["peaks_bytes"], row["budgets_bytes"], strict=True)
    ]
    return (
        f"{head}split {row['splits']} {row['overhead']:+.1%}, peaks {', '.join(peaks)} of the "
        f"budgets, differences {max(row['loss_differences']):.1e} of the losses and "
        f"{row['largest_gradient_difference']:.1e} of the gradients, of which "
        f"{row['equal_gradients']} of {row['gradients']} are equal"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and write its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MODELS, metavar="MODEL")
    parser.add_argument("--compiled", action="store_true", help="steps under torch.compile")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(argv)
    name = "split-steps-compiled" if options.compiled else "split-steps"
    check = compiled_rows_of if options.compiled else rows_of
    result = {
        "benchmark": name,
        "machine": machine.describe(torch.device("cpu")),
        "costs": "measured" if options.compiled else "roofline cpu",
        "rows": [row for model in options.only or MODELS for row in check(model)],
    }
    print("written:", report.write_result(options.out, f"{name}-cpu", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
