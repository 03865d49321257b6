"""Ways to train a language model without all of its logits at once, side by side on one machine.

    python -m benchmarks.split_peers                 # to benchmarks/results; a few minutes

The model has two transformer layers and a head that is larger than all else. Each method runs the
same step: eager mode, plain torch.compile, Inductor's auto-chunker, `F.linear_cross_entropy` with
chunks, Liger's algorithm (the gradients of a chunk of the loss are computed in the forward; it is
written here with torch operations, as Liger's kernels need a GPU), checkpointed chunks by hand, and
remat within the peak of each of them, eager and compiled. A row has the peak by the allocator
(parameters, gradients and batch included), the step time as a ratio to eager mode's of the same
rounds, and the largest difference of a gradient relative to its largest element.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from benchmarks.harness import machine, report
from benchmarks.harness.measurement import keep_freed_memory
from remat.frontend.memory.meter import allocated_peak

Row = dict[str, Any]
Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of the hidden states of all tokens, the head's weight and the labels."""

RESULTS = Path(__file__).parent / "results"
BATCH, TOKENS, WIDTH, WORDS, CHUNKS = 4, 256, 256, 16_000, 8
ROUNDS = 7


class Layer(nn.Module):
    """A transformer layer with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm_1(x)).unflatten(-1, (3, 4, WIDTH // 4))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    """Two layers and a head, whose loss `head` computes."""

    def __init__(self, head: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.02)
        self.head = head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embedding(ids))
        return self.head(x[:, :-1].flatten(0, 1), self.weight, ids[:, 1:].flatten())


def whole_head(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight), labels)


def checkpointed_head(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Checkpoint the loss of each chunk of tokens."""

    def part(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, weight), labels, reduction="sum")

    parts = zip(x.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)
    losses = [checkpoint(part, *chunk, use_reentrant=False) for chunk in parts]
    return torch.stack(losses).sum() / len(labels)  # type: ignore[arg-type]


def linear_cross_entropy_head(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=-(-len(labels) // CHUNKS))
    return F.linear_cross_entropy(x, weight, labels, options=options)


class _GradientsInForward(torch.autograd.Function):
    """The algorithm of Liger's fused linear cross-entropy (Hsu et al., 2024, section 3.2)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        loss = x.new_zeros(())
        chunks = zip(x.chunk(CHUNKS), labels.chunk(CHUNKS), grad_x.chunk(CHUNKS), strict=True)
        for part, targets, grad_part in chunks:
            logits = part @ weight.t()
            logits -= logits.logsumexp(-1, keepdim=True)
            rows = torch.arange(len(targets))
            loss -= logits[rows, targets].sum()
            logits.exp_()
            logits[rows, targets] -= 1
            logits /= len(labels)
            torch.mm(logits, weight, out=grad_part)
            grad_weight.addmm_(logits.t(), part)
        ctx.save_for_backward(grad_x, grad_weight)
        return loss / len(labels)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x.mul_(gradients[0]), grad_weight.mul_(gradients[0]), None


def liger_head(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _GradientsInForward.apply(x, weight, labels)  # type: ignore[return-value]


class Methods:
    """The methods, each with a copy of one model, and their results."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.ids = torch.randint(0, WORDS, (BATCH, TOKENS))
        self.state = LanguageModel(whole_head).state_dict()
        self.rows: list[Row] = []
        self.steps: dict[str, Callable[[], None]] = {}
        self.eager_gradients: list[torch.Tensor] = []

    def model(self, head: Head = whole_head) -> LanguageModel:
        """Return a new model with the same parameters."""
        model = LanguageModel(head)
        model.load_state_dict(self.state)
        return model

    def add(
        self, name: str, make: Callable[[LanguageModel], Any], head: Head = whole_head
    ) -> int | None:
        """Measure a method, and return its peak in bytes; None if it cannot run."""
        model = self.model(head)
        row: Row = {"method": name, "failure": ""}
        self.rows.append(row)
        try:
            started_s = time.perf_counter()
            run = make(model)

            def step() -> None:
                model.zero_grad(set_to_none=True)
                run(self.ids).backward()

            step()
            row["setup_s"] = round(time.perf_counter() - started_s, 1)
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(f"{name}: {row['failure']}", flush=True)
            return None
        step()
        model.zero_grad(set_to_none=True)
        constant_bytes = sum(p.nbytes for p in model.parameters()) + self.ids.nbytes
        row["peak_bytes"] = allocated_peak(step) + constant_bytes
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        self.eager_gradients = self.eager_gradients or gradients
        row["gradient_difference"] = max(
            ((a - b).abs().max() / a.abs().max()).item()
            for a, b in zip(self.eager_gradients, gradients, strict=True)
        )
        model.zero_grad(set_to_none=True)
        plan = getattr(run, "plan", None)
        if plan is not None:
            row["splits"] = [[s.module, s.pieces] for s in plan.graph.splits]
        self.steps[name] = step
        print(
            f"{name}: peak {row['peak_bytes'] / 2**20:.1f} MiB, gradients differ by "
            f"{row['gradient_difference']:.1e}",
            flush=True,
        )
        return row["peak_bytes"]

    def measure_times(self, rounds: int) -> None:
        """Run all methods in turn, and set the median of the time ratios to eager mode."""
        seconds: dict[str, list[float]] = {name: [] for name in self.steps}
        for _ in range(rounds):
            for name, step in self.steps.items():
                started_s = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - started_s)
        for row in self.rows:
            if row["method"] in seconds:
                times = seconds[row["method"]]
                ratios = [a / b for a, b in zip(times, seconds["eager"], strict=True)]
                row["step_s_median"] = round(statistics.median(times), 4)
                row["time_ratio_median"] = round(statistics.median(ratios), 3)


def _auto_chunked(model: nn.Module) -> Any:
    options: dict[str, Any] = {
        "auto_chunker.enable": True,
        "auto_chunker.num_chunk": CHUNKS,
        "auto_chunker.amplify_ratio_threshold": 2,  # 8 by default: the head is too small for that
    }
    return torch.compile(model, options=options)


def run(rounds: int) -> list[Row]:
    """Measure all methods, and return their rows."""
    torch._dynamo.config.recompile_limit = 64  # one forward, compiled for each method
    methods = Methods()
    by_hand: dict[str, Head] = {
        "eager": whole_head,
        "checkpointed chunks": checkpointed_head,
        "F.linear_cross_entropy": linear_cross_entropy_head,
        "Liger's algorithm": liger_head,
    }
    peaks = {name: methods.add(name, lambda model: model, head) for name, head in by_hand.items()}
    peaks |= {
        name: methods.add(name, make)
        for name, make in {
            "Inductor": torch.compile,
            "Inductor, auto-chunker": _auto_chunked,
        }.items()
    }
    for name, peak_bytes in peaks.items():
        if peak_bytes is None:
            continue

        def optimized(model: nn.Module, budget_bytes: int = peak_bytes) -> Any:
            return remat.optimize(model, budget_bytes, (methods.ids,))

        def compiled(model: nn.Module, budget_bytes: int = peak_bytes) -> Any:
            return remat.compile(model, budget_bytes)

        methods.add(f"remat at the peak of {name}", optimized)
        methods.add(f"remat, compiled, at the peak of {name}", compiled)
    methods.measure_times(rounds)
    return methods.rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and write its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(argv)
    result = {
        "benchmark": "split-peers",
        "machine": machine.describe(torch.device("cpu")),
        "keeps_freed_memory": keep_freed_memory(),
        "sizes": {"batch": BATCH, "tokens": TOKENS, "width": WIDTH, "words": WORDS},
        "rows": run(options.rounds),
    }
    for row in result["rows"]:
        print(row["method"], row.get("peak_bytes"), row.get("time_ratio_median"), row["failure"])
    print("written:", report.write_result(options.out, "split-peers-cpu", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
