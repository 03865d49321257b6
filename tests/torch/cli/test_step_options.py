"""Options that all commands with a model share: sizes of batches, and GPUs that are not here."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.helpers import command_line

quick = partial(command_line.quick, models=True)
SIZES = ("n_layer=1", "n_embd=16", "n_head=2", "vocab_size=50", "bos_token_id=0", "eos_token_id=0")
GPT2 = ("hf:gpt2", *(word for size in SIZES for word in ("--set", size)))
SCRIPT = """
import torch
def step():
    return torch.nn.Linear(4, 4), (torch.ones(3, 4),)
"""


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return f"{tmp_path / 'script.py'}:step"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "option"),
    [("trace", "--batch"), ("estimate", "--tokens"), ("fit", "--batch"), ("fit", "--image")],
)
def test_a_function_has_no_sizes_to_choose(factory: str, command: str, option: str) -> None:
    ended = quick(command, factory, option, 8)
    assert ended.code == 2
    assert f"{option} 8 has no effect" in ended.err
    assert "is a function, which creates its own batch" in ended.err


@pytest.mark.slow
def test_a_function_without_sizes_is_accepted(factory: str) -> None:
    ended = quick("fit", factory, "--device", "cpu", "--memory", "1GiB", "--json")
    assert ended.answer["batch"] is None
    ended = quick("fit", factory, "--lengths", "8,16")
    assert (ended.code, "--lengths 8,16 has no effect" in ended.err) == (2, True)


@pytest.mark.slow
def test_the_default_batch_is_two_sequences_of_128_tokens() -> None:
    ended = quick("trace", *GPT2, "--json")
    assert ended.code == 0, ended.err
    inputs = [p for p in json.loads(ended.out)["placeholders"] if p["kind"] == "input"]
    assert {tuple(p["tensor"]["shape"]) for p in inputs} == {(2, 128)}


@pytest.mark.slow
def test_lengths_replace_the_number_of_tokens() -> None:
    device = ("--device", "h100", "--memory", "1GiB")
    ended = quick("fit", *GPT2, *device, "--lengths", "16:3,32:1", "--json")
    assert ended.answer["lengths"] == [{"option": "", "length": 32, "share": 1.0}]
    ended = quick("fit", *GPT2, *device, "--lengths", "16,32", "--tokens", 32)
    assert ended.code == 2
    assert "give --tokens (one length) or --lengths (several)" in ended.err
    ended = quick("fit", *GPT2, *device, "--lengths", "16,5000")
    assert "tokens, but the longest of --lengths is 5,000; use at most" in ended.err


@pytest.mark.quick_cases("n_layer=100000")
@pytest.mark.parametrize("change", ["n_layer=0", "num_hidden_layers=-1", "n_layer=100000"])
def test_sizes_of_a_configuration_are_checked(change: str) -> None:
    ended = quick("trace", "hf:gpt2", "--set", change)
    assert ended.code == 1
    assert f"has {change}, and no model of that size can be built" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["trace", *(pytest.param(c, marks=pytest.mark.slow) for c in ("estimate", "fit"))]
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_gpu_that_cuda_stands_for_is_named(command: str) -> None:
    ended = quick(command, *GPT2, "--device", "cuda")
    assert ended.code == 0, ended.err
    assert "--device cuda is taken as h200; name another one: v100, " in ended.err
