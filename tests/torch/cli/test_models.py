"""`remat trace`, `measure`, `run` and `doctor`, which need torch."""

from __future__ import annotations

import json
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.helpers import command_line
from tests.helpers.command_line import run
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.paths import ROOT

import remat

quick = partial(command_line.quick, models=True)
SCRIPT = """
def failing():
    raise RuntimeError("no\\nway")
"""
SIZES = ("n_layer=2", "n_embd=64", "n_head=2", "vocab_size=120", "bos_token_id=0", "eos_token_id=0")
SMALL = ("--set", "n_layer=1", "--batch", 1, "--tokens", 16)
GPT2 = ("hf:gpt2", "--batch", 4, "--tokens", 64, *(word for s in SIZES for word in ("--set", s)))


@pytest.mark.slow
def test_a_model_becomes_a_measured_trace(tmp_path: Path) -> None:
    bare, measured = tmp_path / "bare.json.gz", tmp_path / "measured.json.gz"
    ended = quick("trace", *GPT2, *SMALL, "-o", bare)
    assert ended.code == 0, ended.err
    assert "not measured yet" in ended.out
    traced = remat.Trace.load(bare)
    assert not traced.measured
    ended = quick("measure", bare, "-o", measured)
    assert ended.code == 0, ended.err
    assert "costs measured cpu" in ended.out
    assert remat.Trace.load(measured).measured


@pytest.mark.slow
def test_run_compares_a_planned_step_with_eager_mode(tmp_path: Path) -> None:
    program = tmp_path / "program.json.gz"
    ended = quick("run", *GPT2, "--budget", "80%", "--time-limit", "5", "--rounds", "1",
                "--program", program, "--json")  # fmt: skip
    decoded = ended.answer
    assert decoded["remat"]["peak_bytes"] < decoded["eager"]["peak_bytes"]
    assert decoded["remat"]["peak_bytes"] <= decoded["plan"]["budget_bytes"]
    eager_bytes = decoded["eager"]["peak_bytes"]
    assert decoded["predicted"]["eager_peak_bytes"] == pytest.approx(eager_bytes, rel=0.03)
    assert decoded["plan"]["baseline_peak_bytes"] < 0.95 * eager_bytes, "eager mode has wider masks"
    assert decoded["gradients"] == decoded["equal_gradients"] == 28
    loaded = remat.Program.load(program)
    assert loaded.predicted_peak_bytes == decoded["plan"]["peak_bytes"]


@pytest.mark.slow
def test_dropped_outputs_are_planned_and_measured(tmp_path: Path) -> None:
    """The logits are most of the model's memory: estimated, planned and measured without them."""
    wide = (*GPT2[:5], "--set", "n_layer=1", "--set", "n_embd=16", "--set", "n_head=2", "--set",
            "vocab_size=3000", "--set", "bos_token_id=0", "--set", "eos_token_id=0")  # fmt: skip
    logits_bytes = 4 * 64 * 3000 * 4
    peaks: list[int] = []
    for words in ((), ("--outputs", "dropped")):
        decoded = quick("run", *wide, "-b", "100%", "--rounds", "1", *words, "--json").answer
        assert decoded["gradients"] == decoded["equal_gradients"]
        assert decoded["remat"]["peak_bytes"] <= decoded["plan"]["peak_bytes"]
        assert decoded["eager"]["peak_bytes"] == pytest.approx(
            decoded["predicted"]["eager_peak_bytes"], rel=0.03
        )
        peaks.append(decoded["eager"]["peak_bytes"])
    assert peaks[0] - peaks[1] > 0.9 * logits_bytes
    ended = quick("estimate", *wide, "--outputs", "dropped", "--json")
    assert json.loads(ended.out)["peak_bytes"] == pytest.approx(peaks[1], rel=0.03)
    traced = tmp_path / "trace.json.gz"
    assert quick("trace", *wide, "--outputs", "dropped", "-o", traced).code == 0
    assert remat.Trace.load(traced).outputs_dropped


NET = """
import torch
from torch import nn

def step():
    torch.manual_seed(0)
    made_of = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)]
    model = nn.Sequential(*made_of, nn.Dropout(0.1), nn.Flatten(0), nn.Linear(512 * 32, 1))
    return model, (torch.randn(512, 32),)
"""


@needs_compiler
@pytest.mark.slow
def test_run_compares_a_compiled_step_with_plain_torch_compile(tmp_path: Path) -> None:
    script = tmp_path / "net.py"
    script.write_text(NET)
    words = ("run", f"{script}:step", "--compile", "--rounds", "1")
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    ended = run(*words, "--budget", "75%", "--json", env=environment)
    assert ended.code == 0, ended.err
    assert ended.err == "", "no output of torch's profiler"
    decoded = json.loads(ended.out)
    (plan,) = decoded["plans"]
    assert plan["module"] == "Sequential"
    assert plan["recomputations"] > 0
    assert plan["graph_budget_bytes"] == plan["torch_compile_bytes"] * 75 // 100
    assert decoded["remat"]["peak_bytes"] <= plan["verified_bytes"] <= plan["graph_budget_bytes"]
    assert decoded["remat"]["peak_bytes"] < decoded["torch_compile"]["peak_bytes"]
    assert plan["rounds"] >= 1
    assert decoded["gradients"] == 10
    assert decoded["largest_relative_difference"] <= 1e-5, "dropout sampled the same numbers"
    assert decoded["remat"]["loss"] == pytest.approx(decoded["torch_compile"]["loss"], rel=1e-5)


@needs_compiler
@pytest.mark.slow
def test_the_comparison_of_a_compiled_step_is_printed(tmp_path: Path) -> None:
    script = tmp_path / "net.py"
    script.write_text(NET)
    words = ("run", f"{script}:step", "--compile", "--rounds", "1")
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    ended = run(*words, "--budget", "75%", env=environment)
    assert ended.code == 0, ended.err
    expected = ["step under torch.compile within 75%", "\nplan ", "verified", "peak, measured",
              "first step", "gradients are equal"]  # fmt: skip
    places = [ended.out.index(text) for text in expected]
    assert places == sorted(places)
    ended = run(*words, "--budget", "1%", env=environment)
    assert ended.code == 3
    assert "Pass a budget of at least" in ended.error


@pytest.mark.slow
def test_options_that_exclude_a_compiled_step_are_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.json"
    ended = quick("run", *GPT2, "-b", "80%", "--compile", "--program", program)
    assert ended.code == 2
    assert "--program cannot be combined with --compile" in ended.error


@pytest.mark.slow
def test_a_model_larger_than_this_machine_is_estimated() -> None:
    """A layer as wide as those of the largest models: 11 billion parameters in bfloat16."""
    sizes = ("--set", "n_embd=28672", "--set", "n_head=64", "--set", "n_layer=1", "--batch", 1)
    decoded = quick("estimate", "hf:gpt2", *sizes, "--dtype", "bfloat16", "--json").answer
    assert decoded["parameter_bytes"] > 20e9
    assert decoded["peak_bytes"] >= decoded["parameter_bytes"] + decoded["gradient_bytes"]


@pytest.mark.slow
def test_a_training_loop_fits_or_has_options() -> None:
    ended = quick("fit", *GPT2, "--device", "h100")
    assert ended.code == 0, ended.err
    assert "fits      yes," in ended.out
    answer = quick("fit", *GPT2, "--device", "h100", "--memory", "90MiB", "--json").answer
    assert not answer["fits"]
    assert answer["usable_bytes"] == 90 << 20
    names = [option["name"] for option in answer["options"]]
    assert any(name.startswith("plan of remat") for name in names)
    assert any("batches of" in name for name in names)


def test_a_loop_of_several_gpus() -> None:
    shards = ("--gpus", 16, "--shard", "hybrid:8", "--mixed-precision-param", "bfloat16")
    answer = quick("fit", *GPT2, "--device", "h100", *shards, "--network", "25e9", "--json").answer
    assert answer["sharding"]["gpus"] == 16
    assert answer["sharding"]["network"] == 25e9
    assert 0 < answer["communication_s"] < answer["step_s"]
    ended = quick("fit", *GPT2, "--device", "h100", "--gpus", 8, "--shard", "zero3")
    assert ended.code == 2
    assert "the shard is 'zero3'; pass 'full', 'grad-op', 'optimizer', 'hybrid:4'" in ended.err


@pytest.mark.slow
def test_estimates_are_available_for_an_absent_gpu(tmp_path: Path) -> None:
    output = tmp_path / "h100.json.gz"
    device_options = ("--device", "h100", "--autocast", "bfloat16")
    ended = quick("trace", *GPT2, *device_options, "-o", output)
    assert ended.code == 0, ended.err
    trace = remat.Trace.load(output)
    assert trace.device == "cuda:0"
    assert trace.environment.autocast == ("cuda:bfloat16",)
    assert "aten._scaled_dot_product_flash_attention.default" in {n.target for n in trace.nodes}
    decoded = quick("estimate", *GPT2, *device_options, "--json").answer
    assert (decoded["device"], decoded["cost_source"]) == ("cuda:0", "roofline h100")
    assert 0 < decoded["time_s"] < 0.01
    assert decoded["library_bytes"] == trace.library_bytes >= 32 << 20
    assert decoded["gpu"] == "h100"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="then it is measured there")
def test_a_trace_for_an_absent_gpu_is_priced_by_its_data_sheet(tmp_path: Path) -> None:
    output = tmp_path / "a100.json.gz"
    ended = quick("trace", *GPT2, "--device", "a100", "-o", output)
    assert ended.code == 0, ended.err
    assert "on cuda:0 (a100)" in ended.out
    ended = quick("measure", output)
    assert ended.code == 1
    assert "`remat measure --roofline a100` estimates" in ended.error


@pytest.mark.slow
def test_a_failing_factory_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = run("trace", f"{script}:failing")
    assert ended.code == 1
    assert "RuntimeError: no way" in ended.error


@pytest.mark.slow
def test_doctor_reports_this_machine() -> None:
    ended = run("doctor", "--json")
    decoded = json.loads(ended.out)
    assert ended.code == (0 if decoded["is_well"] else 1)
    states = {check["name"]: check["state"] for check in decoded["checks"]}
    assert set(states.values()) <= {"ok", "untested", "missing", "wrong"}
    assert states["torch"] == "ok"


@pytest.mark.slow
def test_the_reserve_is_subtracted_from_the_budget() -> None:
    sizes = (
        "hf:gpt2",
        "--batch",
        "1",
        "--tokens",
        "16",
        "--set",
        "n_layer=1",
        "--set",
        "n_embd=32",
    )
    small = (*sizes, "--set", "n_head=2", "--set", "vocab_size=100")
    ended = quick("estimate", *small, "--reserve", "3MiB", "--json")
    assert ended.answer["reserve_bytes"] == 3 << 20
    ended = quick("run", *small, "-b", "64MiB", "--reserve", "60MiB", "--rounds", "1", "--json")
    assert ended.answer["plan"]["budget_bytes"] == 4 << 20
    assert json.loads(ended.out)["plan"]["reserve_bytes"] == 60 << 20


@pytest.mark.slow
def test_make_demo_runs_and_compares_both_steps() -> None:
    """Run what `make demo` passes to the shell, with a smaller model: the plan, then both steps."""
    printed = subprocess.run(
        ["make", "-n", "demo", "STAMP=Makefile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = printed.stdout.replace("\\\n", "").splitlines()
    (command_line,) = [line for line in lines if line.split()[0].endswith("bin/remat")]
    words = shlex.split(command_line)
    smaller = ("--set", "n_layer=2", "--set", "n_embd=32", "--set", "n_head=1", "--tokens", "16")
    ended = quick(*words[1 : words.index("--device")], *smaller, "-b", "98%", "--rounds", 1)
    assert ended.code == 0, ended.err
    expected = ["gpt2 within", "\nplan ", "\nmodule ", "peak, measured", "gradients are equal"]
    places = [ended.out.index(word) for word in expected]
    assert places == sorted(places)
