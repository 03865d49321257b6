"""The option of several GPUs of `remat.fit` keeps its promise: two processes over gloo."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor

import remat
from remat.costs.roofline import Roofline
from remat.costs.trace_costs import with_roofline_costs
from remat.fitting.eager import EagerStep
from remat.fitting.options import sharding_options
from remat.fitting.question import FitQuestion, ScriptChanges
from remat.frontend.memory.meter import LiveStorageMeter
from remat.report.fit import FitOption
from remat.report.sharded_memory import sharded_peak_bytes

GPUS = 2
Model = tuple[nn.Module, dict[str, torch.Tensor]]


def gpt2(batch: int) -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=128, n_head=4, vocab_size=512, n_positions=64, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(512, (batch, 64))
    return GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids.clone()}


def llama(batch: int) -> Model:
    """A Llama whose vocabulary has an odd number of rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=136, intermediate_size=408, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=501, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(501, (batch, 32))
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


CASES: dict[str, tuple[Callable[[int], Model], int, bool]] = {
    "activations": (gpt2, 8, False),
    "checkpoints": (gpt2, 8, True),
    "gradients in reduction": (gpt2, 1, False),
    "padded shards": (llama, 2, False),
}


def eager_step(name: str, device: str) -> EagerStep:
    make, batch, _ = CASES[name]
    model, kwargs = make(batch)
    trace = remat.trace(model, (), kwargs, device=device)
    return EagerStep.of(with_roofline_costs(trace, Roofline(device)))


def promised_peak(step: EagerStep, *, has_checkpoints: bool) -> int:
    step = EagerStep.of(step.trace, "blocks" if has_checkpoints else "none")
    optimizer = step.optimizer("adamw")
    return sharded_peak_bytes(step.eager_trace, step.graph, step.schedule, optimizer, GPUS)


def option_for_two_gpus(name: str) -> FitOption:
    """Return the option for a GPU with a little more memory than two need each."""
    has_checkpoints = CASES[name][2]
    step = eager_step(name, "h100")
    script = ScriptChanges(checkpoints="model.gradient_checkpointing_enable()")
    question = FitQuestion(step, "adamw", 1 << 40, Roofline("h100"), script=script)
    needed_bytes = promised_peak(step, has_checkpoints=has_checkpoints)
    usable_bytes = int(1.01 * needed_bytes * question.fragmentation_ratio(question.optimizer))
    (option,) = sharding_options(replace(question, usable_bytes=usable_bytes))
    assert isinstance(option, FitOption)
    return option


def trained_peak(
    model: nn.Module, kwargs: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> int:
    """Return the peak in bytes of a step, without the copies that gloo makes of what it reduces
    and gathers, and NCCL does not."""
    state = [t for values in optimizer.state.values() for t in values.values()]
    resident = [*model.parameters(), *model.buffers(), *state]
    resident_bytes = sum(
        t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in resident
    )
    gc.collect()
    with LiveStorageMeter(
        resident_bytes + sum(tensor.nbytes for tensor in kwargs.values())
    ) as meter:
        output = model(**kwargs)
        output.loss.backward()
        del output
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return meter.peak_bytes


def worker(rank: int, codes: dict[str, str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=GPUS
    )
    for name, code in codes.items():
        make, batch, _ = CASES[name]
        model, kwargs = make(batch)
        exec(code, {"model": model})
        optimizer = torch.optim.AdamW(model.parameters())
        peaks = [trained_peak(model, kwargs, optimizer) for _ in range(2)]
        Path(f"{folder}/{name} {rank}").write_text(str(peaks[-1]))
    dist.destroy_process_group()


@pytest.mark.slow
def test_shards_keep_their_promise(tmp_path: Path) -> None:
    """The code of the option runs in two processes; both have the peak that is predicted."""
    options = {name: option_for_two_gpus(name) for name in CASES}
    assert all(option.gpus == GPUS and option.fits for option in options.values())
    codes = {name: option.code for name, option in options.items()}
    assert [name for name in CASES if "checkpointing" in codes[name]] == ["checkpoints"]
    mp.spawn(worker, args=(codes, str(tmp_path)), nprocs=GPUS)
    for name, (_, _, has_checkpoints) in CASES.items():
        promised_bytes = promised_peak(eager_step(name, "cpu"), has_checkpoints=has_checkpoints)
        for rank in range(GPUS):
            peak_bytes = int((tmp_path / f"{name} {rank}").read_text())
            assert promised_bytes == pytest.approx(peak_bytes, rel=0.002), (name, rank)
