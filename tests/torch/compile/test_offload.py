"""Under torch.compile, tensors are on the host between forward and backward where that pays."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.compiled_steps import (
    Convolutions,
    assert_same,
    compiled,
    measured_peak,
    step,
    with_state,
)
from tests.helpers.training.models import Case
from tests.helpers.training.steps import Step
from torch import fx, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import remat
from remat.errors import InfeasibleBudget
from remat.frontend.compile import partitioner
from remat.frontend.compile.inductor import copy_operators
from remat.frontend.compile.inductor.copy_operators import COPY_OPERATORS
from remat.frontend.compile.registry import CompiledPlan
from remat.frontend.runtime.host_file import host_file
from remat.passes.offload.copies import without_offload_copies

pytestmark = [needs_compiler, pytest.mark.usefixtures("offload_file_in_tmp_path")]

FAST = remat.Link(1e12, 1e12)
OPTIONS: dict[str, Any] = {"offload": "auto", "link": FAST, "split": "off"}


class Layers(nn.Module):
    """Two linear layers with an activation of 2 MiB between them, several times."""

    def __init__(self, dropout: float, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(64, 128), nn.GELU(), nn.Dropout(dropout), nn.Linear(128, 64)
                )
                for _ in range(depth)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class SmallGPT(nn.Module):
    """An embedding, a block of attention and an MLP with dropout, as in GPT-2, and a loss."""

    def __init__(self, width: int = 64, words: int = 120) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        shape = (*ids.shape, 4, -1)
        qkv = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.project(attended.transpose(1, 2).flatten(2)), 0.1)
        x = x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1)
        return F.cross_entropy(self.head(self.norms[2](x)).flatten(0, 1), ids.flatten())


def small_gpt() -> Case:
    torch.manual_seed(0)
    return Case(SmallGPT(), (torch.randint(0, 120, (32, 128)),), loss=lambda loss: loss)


def layers(dropout: float = 0.1) -> Case:
    torch.manual_seed(0)
    return Case(Layers(dropout), (torch.randn(4096, 64),), loss=lambda loss: loss)


def compiled_step(case: Case, budget: int | str, **options: Any) -> tuple[Any, CompiledPlan]:
    """Compile a model with offloading, run a step, and return it with its plan."""
    run, plans, _ = compiled(case, budget, **(OPTIONS | options))
    return run, plans[-1]


def unplanned_steps(case: Case, **options: Any) -> list[Step]:
    """Return two steps of a plan that neither recomputes nor offloads."""
    case, state = with_state(case)
    _, _, steps = compiled(case, "100%", (1, 2), **options)
    case.model.load_state_dict(state)
    return steps


def smallest_peak_without_copies(plan: CompiledPlan) -> int:
    """Return the smallest peak of the step's kernels where all tensors stay on the device."""
    graph = without_offload_copies(plan.plan.graph)
    with pytest.raises(InfeasibleBudget) as error:
        remat.solve(graph, plan.plan.budget_bytes, remat.Auto(time_limit=3.0))
    assert error.value.min_feasible_bytes is not None
    return error.value.min_feasible_bytes


@contextmanager
def without_graph_caches() -> Iterator[None]:
    """Plan and verify each graph, with the caches of C++ code only."""
    with config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


def raise_error(gradient: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


def copies_of_code(code: str) -> list[str]:
    """Return the calls of copies and of matrix products in generated code, in order."""
    call = re.compile(r"ops\.remat\.(\w+)\.default\(|extern_kernels\.(addmm|mm)\(")
    body = code.split("def call(", 1)[1]
    return [copy or "product" for copy, _ in call.findall(body)]


def copies_of_plan(plan: CompiledPlan) -> list[str]:
    """Return the same calls as planned."""
    names = [plan.plan.graph.operations[op].name for op in plan.plan.schedule.runs]
    kinds = [name.split("_")[0] for name in names]
    kinds = ["product" if kind in ("addmm", "mm") else kind for kind in kinds]
    return [kind for kind in kinds if kind == "product" or kind in COPY_OPERATORS]


@pytest.mark.slow
@pytest.mark.usefixtures("empty_compile_caches")  # costs, and so the plan, differ from run to run
def test_a_budget_below_the_smallest_without_is_met() -> None:
    """Memory is as verified; the numbers are those of a plan that neither recomputes nor offloads;
    and nothing stays on the host, however a step ends."""
    case = layers()
    expected = unplanned_steps(case)
    run, plan = compiled_step(case, "40%")
    assert plan.offloads
    assert plan.budget_bytes is not None
    assert smallest_peak_without_copies(plan) > plan.budget_bytes
    assert plan.verified_bytes is not None
    assert measured_peak(case, run) == plan.verified_bytes
    assert plan.verified_bytes <= plan.budget_bytes
    assert_same([step(case, run, seed) for seed in (1, 2)], expected, tolerance=0.0)
    for _ in range(2):  # a forward without backward, an error in the backward, an evaluation
        loss = run(*case.args)
        assert host_file().used_bytes > 0
        del loss
        assert host_file().used_bytes == 0
        loss = run(*case.args)
        hook = next(case.model.parameters()).register_hook(raise_error)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        hook.remove()
        del loss
        assert host_file().used_bytes == 0
        with torch.no_grad():
            run(*case.args)
        assert_same([step(case, run, seed) for seed in (1, 2)], expected, tolerance=0.0)
    assert host_file().used_bytes == 0


@pytest.mark.slow
def test_a_slow_link_makes_no_budget_infeasible() -> None:
    """Copies that start early, so as to end in time, take more memory than there is: then they
    start later, and the step waits for them."""
    case = layers()
    run, plan = compiled_step(case, "40%", link=remat.Link(1e12, 5e8))
    assert plan.offloads
    assert float(plan.plan.stats["waiting_s"]) > 0
    assert plan.verified_bytes is not None
    assert measured_peak(case, run) == plan.verified_bytes


def test_the_generated_code_has_the_planned_order() -> None:
    """Where copies are fast, tensors are offloaded instead of recomputed."""
    case = layers(dropout=0.0)
    with without_graph_caches():
        (_, plan), code = run_and_get_code(lambda: compiled_step(case, "50%"))
    assert len(plan.plan.schedule) == len(plan.plan.graph)
    assert [name for half in code for name in copies_of_code(half)] == copies_of_plan(plan)
    assert f"{len(plan.plan.graph.renewal)} tensors of" in plan.plan.describe()
    recomputing = remat.solve(without_offload_copies(plan.plan.graph), plan.plan.budget_bytes)
    assert recomputing.overhead > plan.plan.overhead + 0.01


@pytest.mark.slow
def test_a_program_whose_order_was_changed_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies that start earlier than planned are noticed; then nothing is offloaded."""
    build = partitioner.build_graph_modules

    def build_reordered(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = build(*args, **kwargs)
        *_, last_input = backward.graph.find_nodes(op="placeholder")
        reload = COPY_OPERATORS["reload"]
        for node in backward.graph.find_nodes(op="call_function", target=reload):
            last_input.append(node)
        backward.recompile()
        return forward, backward

    monkeypatch.setattr(partitioner, "build_graph_modules", build_reordered)
    case = layers()
    with caplog.at_level(logging.INFO, logger="remat"), without_graph_caches():
        _, plan = compiled_step(case, "50%")
    assert not plan.offloads
    assert "planning without offloading, as CopiesOutOfOrder: Inductor calls" in caplog.text
    settings = remat.Partitioner("50%", offload="auto", link=FAST).settings()
    torch._dynamo.reset()
    refused = pytest.raises(Exception, match="not where they were planned")
    with without_graph_caches(), refused:
        step(case, torch.compile(case.model, options=settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inductor", "budget"),
    [(False, "80%"), pytest.param(True, "50%", marks=pytest.mark.slow)],
    ids=["operations", "kernels"],
)
def test_a_language_model_trains_with_its_tensors_on_the_host(inductor: bool, budget: str) -> None:
    case = small_gpt()
    expected = unplanned_steps(case, inductor=inductor)
    run, plan = compiled_step(case, budget, inductor=inductor)
    assert plan.offloads
    assert_same([step(case, run, seed) for seed in (1, 2)], expected, tolerance=0.0)
    expected_bytes = plan.verified_bytes if inductor else plan.plan.peak_bytes
    assert expected_bytes is not None
    assert 0 <= measured_peak(case, run) - expected_bytes <= 1000
    assert expected_bytes <= (plan.budget_bytes or 0)


@pytest.mark.slow
def test_no_more_than_the_host_budget_is_on_the_host() -> None:
    case = layers()
    assert not compiled_step(case, "70%", host_budget=0, inductor=False)[1].offloads
    options = {"host_budget": "4MiB", "link": remat.Link(1e9, 1e9), "inductor": False}
    _, plan = compiled_step(case, "70%", **options)
    assert 0 < plan.plan.host_bytes <= 4 << 20
    assert "of which the step waits" in plan.plan.describe()


class TwoGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Layers(0.0).layers, Layers(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_the_graphs_of_a_step_share_the_host_budget() -> None:
    torch.manual_seed(0)
    case = Case(TwoGraphs(), (torch.randn(4096, 64),), loss=lambda loss: loss)
    expected = [step(case, case.model)]
    host_bytes: list[int] = []
    for host_budget in ("64MiB", "9MiB"):
        options = OPTIONS | {"host_budget": host_budget, "inductor": False}
        run, plans, _ = compiled(case, "60%", **options)
        assert len(plans) == 2
        host_bytes.append(sum(plan.plan.host_bytes for plan in plans))
        assert_same([step(case, run)], expected, tolerance=1e-5)
    assert host_bytes[0] > 9 << 20
    assert 0 < host_bytes[1] <= 9 << 20


@pytest.mark.slow
def test_tensors_come_back_in_the_strides_that_inductor_selects() -> None:
    """On CPUs, convolutions write channels-last tensors, which the graph does not know."""
    torch.manual_seed(0)
    case = Case(Convolutions(), (torch.randn(8, 3, 64, 64),), loss=lambda loss: loss)
    expected = unplanned_steps(case)
    with without_graph_caches():
        run, (plan,), actual = compiled(case, "63%", (1, 2), **OPTIONS)
    assert plan.offloads
    assert_same(actual, expected, tolerance=0.0)
    assert plan.verified_bytes is not None
    assert measured_peak(case, run) <= plan.verified_bytes <= (plan.budget_bytes or 0)


@pytest.mark.slow
def test_a_second_process_loads_the_plan_with_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    case = layers()
    first = compiled_step(case, "50%")[1]
    with caplog.at_level(logging.INFO, logger="remat"):
        run, second = compiled_step(copy.deepcopy(case), "50%")
    assert "planning" not in caplog.text
    assert second.offloads
    assert second.plan.schedule == first.plan.schedule
    assert second.verified_bytes == first.verified_bytes
    assert run is not None


def test_a_tensor_that_has_not_arrived_is_freed_with_its_handle() -> None:
    """As in a step that fails between the two operations of the copy back."""
    x = torch.randn(256, 64)
    sent = COPY_OPERATORS["offload"](x)
    stored = COPY_OPERATORS["release"](sent, x)
    coming = COPY_OPERATORS["reload"](stored)
    arrived = COPY_OPERATORS["arrive"](coming, [256, 64], [64, 1], x.dtype, x.device)
    assert torch.equal(arrived, x)
    coming = COPY_OPERATORS["reload"](stored)
    assert len(copy_operators._arriving) == 1
    del coming
    assert not copy_operators._arriving
    del sent, stored
    host_file()._reader.submit(len, ()).result()  # the second copy has ended
    assert host_file().used_bytes == 0


def test_options_that_cannot_be_met_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="CUDA graph cannot contain"):
        remat.compile(model, "50%", offload="auto", mode="reduce-overhead")
    run = remat.compile(model, "50%", offload="auto", host_budget="1000TiB", inductor=False)
    with pytest.raises(Exception, match="the host budget is"):
        run(torch.randn(2, 2)).sum().backward()
