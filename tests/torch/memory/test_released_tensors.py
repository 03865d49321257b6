"""Nothing of a step outlives it, with Python's garbage collector switched off.

A tensor in a reference cycle stays allocated until the collector runs, which may be many steps
later: the steps until then exceed their budget by it. So remat makes no cycle that holds a tensor,
not even by the traceback of an error.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import torch.profiler
from torch import nn

import remat

TOKENS = 32
FAST = remat.Auto(gap=0.1, time_limit=5.0)

Run = Callable[[torch.Tensor], dict[str, torch.Tensor]]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    """A language model with dropout and a buffer that the forward updates."""

    def __init__(self, width: int = 16, vocabulary: int = 100) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


def token_ids(rows: int = 16) -> torch.Tensor:
    return torch.randint(0, 100, (rows, TOKENS))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().train()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Switch the garbage collector off, and the collection that Dynamo makes at the end of each
    compilation: it misses what the collector has moved to the oldest generation by then."""
    gc.collect()
    gc.disable()
    try:
        with torch._dynamo.config.patch(run_gc_after_compile=False):
            yield
    finally:
        gc.enable()


def remaining_bytes(function: Callable[[], object]) -> int:
    """Return the bytes that the CPU's allocator handed out while a function ran, less those that
    were returned to it by then."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # no log message when the profiler starts
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events: Any = profile.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def step(run: Run, model: nn.Module) -> list[weakref.ref[torch.Tensor]]:
    """Run a step, and return references to tensors of it: input, outputs, a saved tensor."""
    ids = token_ids()
    output = run(ids)
    tensors = [ids, output["loss"], output["logits"]]
    output["loss"].backward()
    model.zero_grad(set_to_none=True)
    return [weakref.ref(tensor) for tensor in tensors]


def check_steps(run: Run, model: nn.Module, *, first_bytes: int = 0) -> None:
    """Check three steps: none leaves a tensor or a byte, but the first `first_bytes`."""
    for index in range(3):
        references: list[weakref.ref[torch.Tensor]] = []
        left_bytes = remaining_bytes(lambda: references.extend(step(run, model)))  # noqa: B023
        assert [r() is None for r in references] == [True] * 3, f"step {index}"
        assert left_bytes <= (first_bytes if index == 0 else 0), f"step {index}"


def eager(model: nn.Module) -> Run:
    return model


def optimized(model: nn.Module, budget: str, **options: Any) -> Run:
    return remat.optimize(model, budget, strategy=FAST, **options)


def enabled(model: nn.Module, budget: str, **options: Any) -> Run:
    remat.enable(model, budget, strategy=FAST, **options)
    return model


RUNS: dict[str, Callable[[nn.Module], Run]] = {
    "eager": eager,
    "optimize 100%": partial(optimized, budget="100%"),
    "optimize 80%": partial(optimized, budget="80%"),
    "optimize min": partial(optimized, budget="min"),
    "optimize 80% with examples": lambda m: optimized(m, "80%", example_inputs=(token_ids(),)),
    "enable 80%": partial(enabled, budget="80%", scope="model"),
    "enable blocks 80%": partial(enabled, budget="80%", scope="blocks"),
    "enable blocks min": partial(enabled, budget="min", scope="blocks"),
}


@pytest.mark.quick_cases("optimize 80% with examples")
@pytest.mark.parametrize("make_run", RUNS.values(), ids=RUNS)
def test_nothing_of_a_step_outlives_it(
    make_run: Callable[[nn.Module], Run], model: Model, no_collector: None
) -> None:
    """The first step plans and measures, the others run."""
    check_steps(make_run(model), model)


def traced(model: nn.Module) -> remat.Trace:
    return remat.measure(remat.trace(model, (token_ids(),)), cache=False)


CALLS: dict[str, Callable[[nn.Module], object]] = {
    "trace": lambda m: remat.trace(m, (token_ids(),)),
    "trace for an absent GPU": lambda m: remat.trace(m, (token_ids(),), device="h100"),
    "measure": traced,
    "solve": lambda m: remat.solve(traced(m), "80%", FAST),
    "rewrite": lambda m: remat.rewrite(t := traced(m), remat.solve(t, "80%", FAST).schedule),
    "estimate": lambda m: remat.estimate(m, (token_ids(),)),
    "max_batch": lambda m: remat.max_batch(
        lambda batch: (m, (token_ids(batch),)), "2MiB", most=64, strategy=FAST
    ),
    "optimize": lambda m: remat.optimize(m, "80%", (token_ids(),), strategy=FAST),
}


@pytest.mark.quick_cases("trace", "trace for an absent GPU")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_planning_leaves_no_tensor(
    call: Callable[[nn.Module], object], model: Model, no_collector: None
) -> None:
    assert remaining_bytes(lambda: call(model)) == 0


def compiled(model: nn.Module, budget: str, **options: Any) -> Run:
    options = {"budget": budget, "time_limit": 5.0, **options}
    return torch.compile(model, backend="remat", options=options)  # type: ignore[return-value]


COMPILED: dict[str, Callable[[nn.Module], Run]] = {
    "plain": torch.compile,  # type: ignore[dict-item]
    "100%": partial(compiled, budget="100%"),
    "90%": partial(compiled, budget="90%"),
    "min": partial(compiled, budget="min"),
    "without Inductor": partial(compiled, budget="80%", inductor=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("make_run", COMPILED.values(), ids=COMPILED)
@pytest.mark.usefixtures("empty_compile_caches")
def test_nothing_of_a_compiled_step_outlives_it(
    make_run: Callable[[nn.Module], Run], model: Model, no_collector: None
) -> None:
    """The first call plans: remat ends Inductor's front end by an exception, to read its kernels.

    That call may create constants, which stay.
    """
    check_steps(make_run(model), model, first_bytes=1 << 10)


def optimize_at_first_call(model: nn.Module, ids: torch.Tensor) -> None:
    optimized(model, "1%")(ids)


def enable_blocks_at_first_call(model: nn.Module, ids: torch.Tensor) -> None:
    enabled(model, "1%", scope="blocks")(ids)


def stop_the_search(model: nn.Module, ids: torch.Tensor) -> None:
    def stop(progress: remat.Progress) -> None:
        raise ZeroDivisionError

    # The first report ends the search. With costs from a data sheet there is one at any speed of
    # the machine: with measured costs, a plan may be optimal without a search.
    strategy = remat.Auto(gap=0, time_limit=300)
    costs = remat.Roofline("cpu")
    remat.optimize(model, "60%", (ids,), strategy=strategy, costs=costs, progress=stop)


class Refused(nn.Module):
    """A model whose last operation torch refuses, in compiled code too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.model(ids)
        return ids.float() @ torch.zeros(1, 3, 1000)


FAILURES: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "optimize": lambda m, ids: remat.optimize(m, "1%", (ids,), strategy=FAST),
    "optimize at the first call": optimize_at_first_call,
    "enable blocks at the first call": enable_blocks_at_first_call,
    "max_batch": lambda m, ids: remat.max_batch(lambda _: (m, (ids,)), "1KiB", strategy=FAST),
    "an error of the progress callback": stop_the_search,
    "no model": lambda m, ids: remat.trace(m, (ids, ids)),
    "an operation that torch refuses": lambda m, ids: remat.trace(Refused(m), (ids,)),
    "another operation": lambda m, ids: remat.optimize(m, "80%", (ids,), namespaces=("other",)),
}


@pytest.mark.quick_cases("optimize at the first call", "an operation that torch refuses")
@pytest.mark.parametrize("call", FAILURES.values(), ids=FAILURES)
def test_an_error_releases_the_tensors_of_its_callers(
    call: Callable[[nn.Module, torch.Tensor], object], model: Model, no_collector: None
) -> None:
    """Once it is handled: an error in a cycle would keep the frames of its traceback."""

    def caller() -> weakref.ref[torch.Tensor]:
        ids = token_ids()
        try:
            call(model, ids)
        except (remat.RematError, ZeroDivisionError):
            return weakref.ref(ids)
        raise AssertionError("no error")

    assert caller()() is None
