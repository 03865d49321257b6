"""The line on the terminal while a step is planned, in a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from tests.helpers.process_limit import PROCESS_LIMIT_S

ERASE = "\r\x1b[2K"
SETUP = """
import torch
from torch import nn
import remat
from remat.frontend.common import planning_line

planning_line._DELAY_S = {delay_s}  # a short planning is no reason for a line
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
x = torch.randn(64, 16)
options = dict({options})
"""
DOORS = {
    "optimize": "step = remat.optimize(model, '100%', **options)",
    "optimize, example inputs": "step = remat.optimize(model, '100%', (x,), **options)",
    "enable, model": "step = remat.enable(model, '100%', scope='model', **options)",
    "enable, blocks": "step = remat.enable(model, '100%', scope='blocks', **options)",
    "compile": "step = remat.compile(model, '100%', inductor=False, **options)",
}
RUN = "\nstep(x).sum().backward()\nassert model[0][0].weight.grad is not None\n"


def shown(door: str, *, delay_s: float = 0, options: str = "", **environment: str) -> str:
    """Return what a program that plans a step writes on its terminal."""
    terminal, program_end = pty.openpty()
    code = SETUP.format(delay_s=delay_s, options=options) + DOORS[door] + RUN
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stderr=program_end,
        env={**os.environ, "TERM": "xterm", **environment},
    )
    os.close(program_end)
    text = b""
    try:
        while data := os.read(terminal, 4096):
            text += data
    except OSError:  # Linux reports the end of the terminal so
        pass
    finally:
        os.close(terminal)
    assert process.wait(PROCESS_LIMIT_S) == 0, text.decode()
    return text.decode()


def slow_except(*quick: str, among: Iterable[str]) -> list[Any]:
    """Return the parameters of a test, with the mark `slow` except for those in `quick`."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in among]


@pytest.mark.slow
@pytest.mark.parametrize("door", slow_except("enable, model", among=DOORS))
def test_planning_shows_a_line_and_erases_it(door: str) -> None:
    text = shown(door)
    assert f"{ERASE}remat: planning the step, 0 s" in text
    assert text.endswith(ERASE)


SWITCHES: dict[str, dict[str, Any]] = {
    "progress=False": {"options": "progress=False"},
    "a function": {"options": "progress=lambda progress: None"},
    "REMAT_PROGRESS=0": {"REMAT_PROGRESS": "0"},
    "a short planning": {"delay_s": 1e4},
}


@pytest.mark.slow
@pytest.mark.parametrize("switch", slow_except("REMAT_PROGRESS=0", among=SWITCHES))
@pytest.mark.parametrize("door", slow_except("enable, model", among=("enable, model", "compile")))
def test_the_line_can_be_turned_off(door: str, switch: str) -> None:
    assert shown(door, **SWITCHES[switch]) == ""


@pytest.mark.slow
def test_without_a_terminal_nothing_is_written() -> None:
    code = SETUP.format(delay_s=0, options="") + DOORS["optimize"] + RUN
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROCESS_LIMIT_S
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
