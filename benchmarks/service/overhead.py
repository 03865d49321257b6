"""What a solve costs more by HTTP than in process, on the same graph at the same budget."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from tests import server as servers

import remat

_REPEATS = 7
_STRATEGY = remat.KeepAll()


def run(folder: Path, settings: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Solves that take next to no time, so that what is left is the service's own."""
    trace = remat.Trace.load(options.trace) if options.trace else _gpt2()
    budgets = [f"{100 + n}%" for n in range(_REPEATS)]
    local: list[float] = []
    fresh: list[float] = []
    cached: list[float] = []
    running = servers.running(folder, "--workers", "1", **settings)
    with running as server, server.client() as client:
        client.solve(trace, "99.5%", remat.Auto(gap=0.5))  # the first connection
        for budget in budgets:
            time.sleep(2.0)  # until the next process waits, as between users
            began = time.perf_counter()
            plan = remat.solve(trace, budget, _STRATEGY)
            remat.rewrite(trace, plan.schedule)
            local.append(time.perf_counter() - began)
            for seconds in (fresh, cached):
                began = time.perf_counter()
                found = client.plan(trace, budget, _STRATEGY)
                seconds.append(time.perf_counter() - began)
                assert found[0].schedule == plan.schedule
    return {
        "operations": len(trace.graph()),
        "nodes": len(trace.nodes),
        "library_s": round(statistics.median(local), 4),
        "fresh_s": round(statistics.median(fresh), 4),
        "cached_s": round(statistics.median(cached), 4),
        "fresh_over_library_s": round(statistics.median(fresh) - statistics.median(local), 4),
        "cached_over_nothing_s": round(statistics.median(cached), 4),
    }


def _gpt2() -> remat.Trace:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(n_layer=20, n_embd=128, n_head=4, vocab_size=512, use_cache=False)
    )
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    inputs = {"input_ids": tokens, "labels": tokens}
    return remat.measure(remat.trace(model, (), inputs), device=remat.Roofline("h200"))
