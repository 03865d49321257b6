"""`make demo`: train GPT-2 in a fraction of its memory, and see what it costs.

Optimises one training step of a GPT-2 with random weights, prints the plan, then runs the step in
eager mode and under the plan, side by side: peak memory as predicted and as measured, time, and
whether loss and gradients are equal.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from typing import cast

import torch
from torch import nn

import remat
from remat.errors import RematError
from remat.frontend.trial import trial
from remat.progress import Progress


def main() -> int:
    """Run the demo; returns the exit code."""
    options = _options()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model, inputs = _gpt2(options, device)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"GPT-2: {options.layers} layers, width {options.width}, {parameters / 1e6:.1f} M "
        f"parameters, batch {options.batch} x {options.tokens} tokens, on {device}\n"
    )
    start = time.perf_counter()
    try:
        gm = remat.optimize(
            model,
            options.budget,
            example_kwargs=inputs,
            strategy=remat.Auto(gap=0.01, time_limit=options.time_limit, stall=6.0),
            progress=_Progress(),
        )
    except RematError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 3
    plan = gm.plan
    assert plan is not None
    print(plan.describe())
    spent = ", ".join(f"{k} {v:.1f} s" for k, v in gm.timings_s.items())
    print(f"\nready after {time.perf_counter() - start:.1f} s ({spent})\n")
    print(trial(model, gm, (), inputs).describe())
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m remat.demo", description=__doc__)
    parser.add_argument("--budget", default="45%", help='bytes, "2GiB", "45%%" (default) or "min"')
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for the solver")
    return parser.parse_args()


def _gpt2(options: argparse.Namespace, device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise SystemExit("the demo trains a transformers model: pip install 'remat[hf]'") from None
    vocabulary = 8192
    config = GPT2Config(
        n_layer=options.layers,
        n_embd=options.width,
        n_head=max(1, options.width // 64),
        n_positions=options.tokens,
        vocab_size=vocabulary,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    ids = torch.randint(0, vocabulary, (options.batch, options.tokens), device=device)
    model = cast(nn.Module, GPT2LMHeadModel(config))
    return model.to(device).train(), {"input_ids": ids, "labels": ids}


class _Progress:
    """One line on a terminal, nothing elsewhere."""

    def __call__(self, progress: Progress) -> None:
        if sys.stderr.isatty():
            gap = "" if progress.gap is None else f", gap {progress.gap:.2%}"
            text = f"solving ({progress.phase}): {progress.elapsed_s:.1f} s{gap}"
            print(f"\r\x1b[K{text}\r", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
