"""What people see of torch.compile's backend: lines of the log, progress, plans by name."""

from __future__ import annotations

import io
import logging
import os
import pty
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo
from tests.compilers import needs_compiler
from tests.models import PLAIN, Case
from torch import nn

import remat


@pytest.fixture(autouse=True)
def _anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled yet, in this process or on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


def checkpointed() -> Case:
    torch.manual_seed(0)
    return PLAIN["checkpointed"]()


def run(case: Case, budget: str = "min", **options: object) -> list[remat.CompiledPlan]:
    """The plans that one step makes."""
    before = len(remat.compiled_plans())
    model = remat.compile(case.model, budget, **{"inductor": False, "time_limit": 3.0, **options})
    case.loss(model(*case.args, **case.kwargs)).backward()
    return remat.compiled_plans()[before:]


# -- the log --------------------------------------------------------------------------------------


def test_planning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    case = checkpointed()
    with caplog.at_level(logging.INFO, "remat"):
        (plan,) = run(case)
    title = f"{type(case.model).__name__} [0/0]"
    assert plan.title == title
    begun, found, solved = caplog.messages
    assert begun.startswith(f"{title}: planning ")
    assert begun.endswith(" nodes within min")
    assert f"{title}: " in found
    assert " operations in forward, " in found
    assert f"{title}: solved in " in solved
    assert remat.budget.format_bytes(plan.plan.peak_bytes) in solved
    assert f"{len(plan.plan.schedule) - len(plan.plan.graph)} runs again" in solved


@needs_compiler
def test_what_inductor_makes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    case = Case(model, (torch.randn(512, 32),), loss=torch.Tensor.sum)
    with caplog.at_level(logging.INFO, "remat"):
        (plan,) = run(case, "95%", inductor=True)
    assert " of Inductor's kernels in forward, " in caplog.messages[1]
    size = remat.budget.format_bytes
    assert caplog.messages[3:] == [
        f"Sequential [0/0]: verified: the {half}'s kernels take {size(plan.verified[half])} of "
        f"{size(plan.budget_bytes or 0)}"
        for half in ("forward", "backward")
    ]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_module_has_its_name() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).tanh()
            torch._dynamo.graph_break()
            return self.second(x).sin()

    weight = torch.randn(4, requires_grad=True)

    def summed(x: torch.Tensor) -> torch.Tensor:
        return (weight * x).tanh().sum()

    x = torch.randn(4, 8)
    first, second = run(Case(Broken(), (x,), loss=torch.Tensor.sum), "100%")
    assert first.module == "Broken"
    assert second.module.startswith("Broken from line ")
    (plan,) = run(Case(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (x,), loss=torch.Tensor.sum))
    assert plan.module == "Sequential"
    assert repr(plan).startswith("CompiledPlan(Sequential: Plan(")
    before = len(remat.compiled_plans())
    remat.compile(summed, "100%", inductor=False)(torch.randn(4)).backward()
    (plan,) = remat.compiled_plans()[before:]
    assert plan.module.endswith("summed")


# -- progress -------------------------------------------------------------------------------------


def test_progress_is_told() -> None:
    told: list[remat.Progress] = []
    (plan,) = run(checkpointed(), progress=told.append)
    assert told
    assert told[-1].budget_bytes == plan.plan.budget_bytes
    with pytest.raises(ValueError, match="progress is 'bar'; it is True, for a line"):
        remat.compile(nn.Linear(2, 2), "50%", progress="bar")


@pytest.mark.parametrize("progress", [True, None])
def test_a_terminal_shows_progress(progress: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that was asked for."""
    screen, terminal = pty.openpty()
    with open(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        run(checkpointed(), progress=progress)
        monkeypatch.undo()
        stderr.write("end")
        stderr.flush()
        shown = b""
        while not shown.endswith(b"end"):
            shown += os.read(screen, 1024)
    os.close(screen)
    if progress:
        assert b"remat plans: " in shown
        assert shown.endswith(b"\r\x1b[2Kend"), "the line is gone"
    else:
        assert shown == b"end"


def test_what_is_no_terminal_stays_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    run(checkpointed(), progress=True)
    monkeypatch.undo()
    assert stderr.getvalue() == ""
