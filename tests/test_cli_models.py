"""`remat trace`, `measure`, `run` and `doctor`: what needs torch."""

from __future__ import annotations

import json
from pathlib import Path

from tests.command_line import run

import remat

SCRIPT = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

def step():
    return Net(), (torch.randn(512, 64),)

def failing():
    raise RuntimeError("no\\nway")
"""


def test_a_model_becomes_a_measured_trace(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    bare, measured = tmp_path / "bare.json.gz", tmp_path / "measured.json.gz"
    ended = run("trace", f"{script}:step", "--dtype", "float32", "-o", bare)
    assert ended.code == 0, ended.err
    assert "not measured yet" in ended.out
    traced = remat.Trace.load(bare)
    assert not traced.measured
    ended = run("measure", bare, "-o", measured)
    assert ended.code == 0, ended.err
    assert "costs measured cpu" in ended.out
    assert remat.Trace.load(measured).measured


def test_a_step_beside_the_models_own(tmp_path: Path) -> None:
    script, program = tmp_path / "train.py", tmp_path / "program.json.gz"
    script.write_text(SCRIPT)
    ended = run("run", f"{script}:step", "--budget", "80%", "--time-limit", "5", "--rounds", "1",
                "--program", program, "--json")  # fmt: skip
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told["remat"]["peak_bytes"] < told["eager"]["peak_bytes"]
    assert told["remat"]["peak_bytes"] <= told["plan"]["budget_bytes"]
    assert told["gradients"] == told["equal_gradients"] == 16
    made = remat.Program.load(program)
    assert made.predicted_peak_bytes == told["plan"]["peak_bytes"]


def test_a_factory_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = run("trace", f"{script}:failing")
    assert ended.code == 1
    assert "RuntimeError: no way" in ended.error


def test_doctor() -> None:
    ended = run("doctor", "--json")
    told = json.loads(ended.out)
    assert ended.code == (0 if told["is_well"] else 1)
    states = {check["name"]: check["state"] for check in told["checks"]}
    assert set(states.values()) <= {"ok", "missing", "wrong"}
    assert states["torch"] == "ok"
