"""Code that torch takes from its disk cache comes with its plans."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.paths import ROOT
from torch import nn

import remat
from remat.frontend.compile.registry import CompiledPlan

pytestmark = [
    needs_compiler,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of torch's cache, which is empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with (
        inductor_config.patch(fx_graph_cache=True),
        functorch_config.patch(enable_autograd_cache=True),
    ):
        yield tmp_path / "remat"


class TwoGraphs(nn.Module):
    """A module of two graphs, of which the first does not end in the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (
            nn.Sequential(
                *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)), nn.Dropout(0.2)
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.one(x)
        torch._dynamo.graph_break()
        return (x + self.other(x)).square().mean()


def first_step(budget: str) -> tuple[list[CompiledPlan], dict[str, torch.Tensor]]:
    """Compile in this process without earlier compilations; return the plans and the gradients."""
    torch._dynamo.reset()
    model = TwoGraphs()
    before = len(remat.compiled_plans())
    torch.manual_seed(1)
    run: Any = torch.compile(model, backend="remat", options={"budget": budget, "split": "off"})
    run(torch.ones(512, 32)).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return remat.compiled_plans()[before:], gradients


def figures(plan: CompiledPlan) -> list[object]:
    of = (
        plan.budget_bytes,
        plan.external_bytes,
        plan.saved_bytes,
        plan.verified_bytes,
        plan.module,
    )
    return [*of, list(plan.plan.schedule.runs)]


def solved(caplog: pytest.LogCaptureFixture) -> int:
    """Return how many graphs were solved since the last call."""
    count = sum("solved in" in record.getMessage() for record in caplog.records)
    caplog.clear()
    return count


@pytest.mark.slow
def test_plans_are_cached_with_the_code(caplog: pytest.LogCaptureFixture) -> None:
    """The bytes that one graph retains are available to the next."""
    caplog.set_level(logging.INFO, "remat")
    first_plans, expected = first_step("85%")
    assert len(first_plans) == solved(caplog) == 2
    assert first_plans[1].external_bytes == first_plans[0].saved_bytes > 0
    cached_plan, gradients = first_step("85%")
    assert "from torch's cache; planned peak" in caplog.text
    assert solved(caplog) == 0
    assert [*map(figures, cached_plan)] == [*map(figures, first_plans)]
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_missing_and_damaged_plans_are_replanned(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also plans for another budget."""
    caplog.set_level(logging.INFO, "remat")
    first_plans, _ = first_step("85%")
    assert solved(caplog) == 2
    for text in (None, "{", "1"):
        for file in folder.iterdir():
            if text is None:
                file.unlink()
            else:
                file.write_text(text)
        replanned, _ = first_step("85%")
        assert solved(caplog) == 2
        assert [figures(plan)[2] for plan in replanned] == [
            figures(plan)[2] for plan in first_plans
        ]
    assert not [file for file in folder.iterdir() if file.suffix != ".json"]
    first_step("90%")
    assert solved(caplog) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the budget")
def test_steps_without_a_plan_are_cached() -> None:
    for _ in range(2):
        torch._dynamo.reset()
        before = len(remat.compiled_plans())
        with torch.no_grad():
            torch.compile(TwoGraphs(), backend="remat", options={"budget": "85%"})(
                torch.ones(512, 32)
            )
        assert len(remat.compiled_plans()) == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the budget")
def test_an_evaluation_does_not_replace_a_plan_in_the_cache() -> None:
    """It is an evaluation of the same graph, at the same budget."""
    planned, _ = first_step("85%")
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(TwoGraphs(), backend="remat", options={"budget": "85%"})(torch.ones(512, 32))
    assert [figures(p) for p in first_step("85%")[0]] == [figures(p) for p in planned]


def child() -> None:
    """Run one training process: print its plans, and the sums of its gradients."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("remat").addHandler(handler)
    logging.getLogger("remat").setLevel(logging.INFO)
    plans, gradients = first_step("85%")
    report = {
        "solved": sum("solved in" in line for line in lines),
        "plans": [figures(plan) for plan in plans],
        "gradients": {name: g.double().sum().item() for name, g in gradients.items()},
    }
    print(json.dumps(report))


@pytest.mark.slow
def test_a_second_process_solves_nothing(tmp_path: Path) -> None:
    code = "from tests.torch.compile.test_disk_cache import child; child()"
    reports: list[dict[str, Any]] = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        reports.append(json.loads(run.stdout.splitlines()[-1]))
    assert [report.pop("solved") for report in reports] == [2, 0]
    assert reports[0] == reports[1]
