"""Section `overhead`: extra time of a solve by HTTP over one in process, on the same graph."""

from __future__ import annotations

import argparse
import gzip
import statistics
import time
from pathlib import Path
from typing import Any

from tests.helpers.service import server as servers

import remat
from remat.service.wire import Options, SolveRequest
from remat.strategies import KeepAll

_REPEATS = 7
_STRATEGY = KeepAll()
_HEADERS = {
    "Content-Type": "application/json",
    "Content-Encoding": "gzip",
    "Prefer": "wait=60",
}


def run(folder: Path, settings: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the times of trivial solves, which show the overhead of the service.

    Plain HTTP with an encoded request measures the service. `remat.Client` also writes the trace
    and reads the plan and the program.
    """
    trace = remat.Trace.load(options.trace) if options.trace else _gpt2()
    body = b""
    local_s: list[float] = []
    http_s: dict[str, list[float]] = {"fresh": [], "cached": []}
    client_s: dict[str, list[float]] = {"fresh": [], "cached": []}
    running = servers.running(folder, "--workers", "1", **settings)
    with running as server, server.client() as client, server.http() as http:
        client.solve(trace, "99.5%", remat.Auto(gap=0.5))  # opens the connection
        for number in range(_REPEATS):
            time.sleep(2.0)  # until the next solving process is ready
            began = time.perf_counter()
            plan = remat.solve(trace, f"{100 + number}%", _STRATEGY)
            remat.rewrite(trace, plan.schedule)
            local_s.append(time.perf_counter() - began)
            body = _request(trace, f"{100 + number}%")
            for kind in http_s:
                began = time.perf_counter()
                answer = http.post("/solve", content=body, headers=_HEADERS)
                http_s[kind].append(time.perf_counter() - began)
                assert tuple(answer.json()["plan"]["runs"]) == plan.schedule.runs
            time.sleep(2.0)
            for kind in client_s:
                began = time.perf_counter()
                plan_and_program = client.plan(trace, f"{200 + number}%", _STRATEGY)
                client_s[kind].append(time.perf_counter() - began)
                assert plan_and_program[0].schedule == plan.schedule
    library_s = statistics.median(local_s)
    http_medians = {kind: statistics.median(seconds) for kind, seconds in http_s.items()}
    client_medians = {kind: statistics.median(seconds) for kind, seconds in client_s.items()}
    return {
        "operations": len(trace.graph()),
        "nodes": len(trace.nodes),
        "request_bytes": len(body),
        "library_s": round(library_s, 4),
        "http_fresh_over_library_s": round(http_medians["fresh"] - library_s, 4),
        "http_cached_s": round(http_medians["cached"], 4),
        "client_fresh_over_library_s": round(client_medians["fresh"] - library_s, 4),
        "client_cached_s": round(client_medians["cached"], 4),
    }


def _request(trace: remat.Trace, budget: str) -> bytes:
    """Return a compressed solve request."""
    request = SolveRequest(trace=trace, budget=budget, options=Options(strategy=_STRATEGY))
    return gzip.compress(request.model_dump_json().encode())


def _gpt2() -> remat.Trace:
    """Return the trace of a narrow GPT-2 of 20 layers, with roofline costs."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(n_layer=20, n_embd=128, n_head=4, vocab_size=512, use_cache=False)
    )
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    inputs = {"input_ids": tokens, "labels": tokens}
    return remat.measure(remat.trace(model, (), inputs), device=remat.Roofline("h200"))
