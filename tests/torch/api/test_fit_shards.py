"""`remat.fit` for loops of several GPUs, against processes over gloo: FSDP2, DDP, and DDP with a
sharded optimizer."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.costs.roofline import Roofline
from remat.costs.sharding import Sharding
from remat.costs.trace_costs import with_roofline_costs
from remat.errors import RematError
from remat.fitting.answer import fit_trace
from remat.fitting.eager import EagerStep
from remat.fitting.question import FitQuestion, LoopOptions
from remat.fitting.sharding import sharding_options
from remat.frontend.memory.meter import LiveStorageMeter, unique_bytes
from remat.report.fit import Fit, FitOption

Model = tuple[nn.Module, dict[str, torch.Tensor]]
TOLERANCE = 0.005


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


@dataclass(frozen=True)
class Run:
    """A loop of several GPUs, by the options of `remat.fit`."""

    make: Callable[[int], Model]
    batch: int
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE

    @property
    def gpus(self) -> int:
        return self.options["gpus"]


def run(make: Callable[[int], Model], batch: int, gpus: int, shard: str, **options: Any) -> Run:
    return Run(make, batch, {"gpus": gpus, "shard": shard, **options})


BF16 = {"mixed_precision_param": "bfloat16"}
BF16_REDUCTION = {**BF16, "mixed_precision_reduce": "bfloat16"}
VIEWS = {"gradient_as_bucket_view": True}
RUNS = {
    "full": run(gpt2, 1, 2, "full"),
    "full, activations": run(gpt2, 8, 2, "full"),
    "full, checkpoints": run(gpt2, 8, 2, "full", checkpoint="blocks"),
    "full, padded": run(llama, 2, 2, "full"),
    "full, accumulated": run(gpt2, 1, 2, "full", accumulate=2),
    "full, sgd": run(llama, 1, 2, "full", optimizer="sgd"),
    "full, over 4": run(llama, 1, 4, "full"),
    "full, bf16": run(gpt2, 1, 2, "full", **BF16),
    "full, bf16, activations": run(gpt2, 8, 2, "full", **BF16),
    "full, bf16, checkpoints": run(gpt2, 8, 2, "full", **BF16, checkpoint="blocks"),
    # A norm's backward has two more tensors in float32 than predicted.
    "full, bf16, over 4": replace(run(llama, 1, 4, "full", **BF16), tolerance=0.01),
    "full, bf16 reduction": run(gpt2, 1, 2, "full", **BF16_REDUCTION),
    "full, bf16, accumulated": run(gpt2, 1, 2, "full", **BF16, accumulate=2),
    "grad-op": run(gpt2, 1, 2, "grad-op"),
    "grad-op, padded": run(llama, 2, 2, "grad-op"),
    "grad-op, bf16": run(gpt2, 1, 2, "grad-op", **BF16),
    "grad-op, checkpoints": run(gpt2, 8, 2, "grad-op", checkpoint="blocks"),
    "grad-op, over 4": run(llama, 1, 4, "grad-op"),
    "hybrid": run(gpt2, 1, 4, "hybrid:2"),
    "hybrid, accumulated": run(llama, 1, 4, "hybrid:2", accumulate=2),
    "hybrid, bf16": run(gpt2, 1, 4, "hybrid:2", **BF16),
    "hybrid, bf16 reduction": run(gpt2, 1, 4, "hybrid:2", **BF16_REDUCTION),
    "DDP": run(gpt2, 1, 2, "none"),
    "DDP, activations": run(gpt2, 8, 2, "none"),
    "DDP, accumulated": run(gpt2, 1, 2, "none", accumulate=2),
    "DDP, views": run(gpt2, 1, 2, "none", **VIEWS),
    "DDP, views, activations": run(llama, 8, 2, "none", **VIEWS),
    "DDP, views, accumulated": run(gpt2, 1, 2, "none", **VIEWS, accumulate=2),
    "optimizer": run(gpt2, 1, 2, "optimizer"),
    "optimizer, views": run(llama, 1, 2, "optimizer", **VIEWS),
    "optimizer, over 4": run(llama, 4, 4, "optimizer"),
    "optimizer, sgd-momentum": run(gpt2, 2, 4, "optimizer", optimizer="sgd-momentum"),
}  # fmt: skip
DEFAULT_RUNS = ("full", "full, bf16", "grad-op", "DDP, views", "optimizer")
"""Two processes each; the others are slow tests."""


def predicted(name: str) -> Fit:
    """Return the answer for a run; with checkpoints of blocks as the model's method makes them."""
    case = RUNS[name]
    model, kwargs = case.make(case.batch)
    return remat.fit(model, (), kwargs, device="cpu", memory="1TiB", **case.options)


def distributed(model: nn.Module, case: Run) -> nn.Module:
    """Return the model as the processes share it."""
    options = case.options
    shard, gpus = options["shard"], options["gpus"]
    if shard in ("none", "optimizer"):
        views = options.get("gradient_as_bucket_view", False)
        return DistributedDataParallel(model, gradient_as_bucket_view=views)
    if options == {"gpus": 2, "shard": "full"}:
        exec(option_code(case), {"model": model})  # an option's code does what it says
        return model
    arguments: dict[str, Any] = {}
    if shard.startswith("hybrid"):
        sharded = int(shard.partition(":")[2])
        sizes = (gpus // sharded, sharded)
        names = ("replicate", "shard")
        arguments["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if shard == "grad-op":
        arguments["reshard_after_forward"] = False
    if dtype := options.get("mixed_precision_param"):
        reduce = options.get("mixed_precision_reduce", "float32")
        arguments["mp_policy"] = MixedPrecisionPolicy(getattr(torch, dtype), getattr(torch, reduce))
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    for block in blocks:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)
    return model


def option_code(case: Run) -> str:
    """Return the code of the option to shard a loop of one GPU over two: for a GPU with a little
    more memory than each of two needs."""
    model, kwargs = case.make(case.batch)
    trace = remat.trace(model, (), kwargs, device="h100")
    step = EagerStep.of(with_roofline_costs(trace, Roofline("h100")))
    question = FitQuestion(step, "adamw", 1 << 40, Roofline("h100"))
    sharded = step.with_sharding(Sharding(gpus=2, shard="full"))
    needed_bytes = sharded.memory(sharded.optimizer("adamw")).reserved_bytes
    (option,) = sharding_options(replace(question, usable_bytes=needed_bytes + 1))
    assert isinstance(option, FitOption)
    assert option.gpus == case.gpus
    assert option.fits
    return option.code


def optimizer_of(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    name = options.get("optimizer", "adamw")
    kinds = {
        "adamw": (torch.optim.AdamW, {}),
        "sgd": (torch.optim.SGD, {}),
        "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    }
    kind, arguments = kinds[name]
    if options["shard"] == "optimizer":
        return ZeroRedundancyOptimizer(model.parameters(), kind, **arguments)
    return kind(model.parameters(), **arguments)


def trained_peak(case: Run) -> int:
    """Return the peak in bytes of a step, without the copies that gloo makes of what it reduces and
    gathers, and NCCL does not. Of two steps the smaller counts: gloo's threads may release a
    buffer late."""
    model, kwargs = case.make(case.batch)
    if case.options.get("checkpoint") == "blocks":
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    is_ddp = case.options["shard"] in ("none", "optimizer")
    optimizer, resident = None, [*model.parameters(), *model.buffers()]
    if not is_ddp:  # the meter counts a new DTensor twice: none is created inside of it
        model = distributed(model, case)
        optimizer = optimizer_of(model, case.options)
        train(model, kwargs, optimizer, case.options)
        state = [t for values in optimizer.state.values() for t in values.values()]
        resident = [*model.parameters(), *model.buffers(), *state]
    tensors = [*resident, *kwargs.values()]
    gc.collect()
    meter = LiveStorageMeter(
        unique_bytes(t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    )
    with meter:
        if optimizer is None:
            model = distributed(model, case)  # which allocates its buckets
            optimizer = optimizer_of(model, case.options)
        peaks: list[int] = []
        for _ in range(3):
            meter.reset_peak()
            train(model, kwargs, optimizer, case.options)
            peaks.append(meter.peak_bytes)
    return min(peaks[1:])


def train(
    model: nn.Module,
    kwargs: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
) -> None:
    """Run a step of the optimizer."""
    accumulate = options.get("accumulate", 1)
    for _ in range(accumulate):
        output = model(**kwargs)
        (output.loss / accumulate).backward()
        del output
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def worker(rank: int, names: list[str], gpus: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{gpus}", rank=rank, world_size=gpus
    )
    peaks = {name: trained_peak(RUNS[name]) for name in names}
    Path(f"{folder}/{gpus} {rank}.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


def largest_peaks(names: list[str], folder: Path) -> dict[str, int]:
    """Return the largest peak of all processes of each run."""
    peaks: dict[str, int] = {}
    for gpus in sorted({RUNS[name].gpus for name in names}):
        of_size = [name for name in names if RUNS[name].gpus == gpus]
        mp.spawn(worker, args=(of_size, gpus, str(folder)), nprocs=gpus)
        ranks = [json.loads((folder / f"{gpus} {r}.json").read_text()) for r in range(gpus)]
        peaks |= {name: max(rank[name] for rank in ranks) for name in of_size}
    return peaks


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(list(DEFAULT_RUNS), id="default"),
        pytest.param([n for n in RUNS if n not in DEFAULT_RUNS], id="all", marks=pytest.mark.slow),
    ],
)
def test_peaks_of_runs_are_predicted(names: list[str], tmp_path: Path) -> None:
    peaks = largest_peaks(names, tmp_path)
    errors = {name: predicted(name).memory.peak_bytes / peaks[name] - 1 for name in names}
    wrong = {n: f"{error:+.2%}" for n, error in errors.items() if abs(error) > RUNS[n].tolerance}
    assert not wrong


def gpt2_on(device: str, **options: Any) -> Fit:
    model, kwargs = gpt2(8)
    return remat.fit(model, (), kwargs, device=device, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 0}, "gpus is '0'; pass a number of GPUs"),
        ({"gpus": True}, "gpus is 'True'"),
        ({"gpus": 2.0}, "gpus is '2.0'"),
        ({"shard": "full"}, "shard needs several GPUs"),
        ({"gpus": 8, "shard": "zero3"}, "the shard is 'zero3'; pass 'full'"),
        ({"gpus": 8, "shard": 3}, "the shard is '3'"),
        ({"gpus": 8, "shard": "hybrid:3"}, "'hybrid:3' does not divide 8 GPUs"),
        ({"gpus": 8, "shard": "hybrid:8"}, "pass hybrid:N for a divisor N of 8"),
        ({"gpus": 8, "shard": "hybrid:"}, "the shard is 'hybrid:'"),
        ({"gpus": 8, "gradient_as_bucket_view": True}, "is an option of DDP"),
        ({"gpus": 8, "mixed_precision_param": "int8"}, "mixed_precision_param is 'int8'"),
        ({"gpus": 8, "mixed_precision_reduce": "bfloat16"}, "needs mixed_precision_param, too"),
        ({"gpus": 8, "shard": "none", **BF16}, "is an option of fully_shard, not of shard='none'"),
        ({"gpus": 8, "network": -1.0}, "the network is '-1.0'"),
        ({"gpus": 8, "network": float("nan")}, "the network is 'nan'"),
        ({"gpus": 8, "node_gpus": 0}, "node_gpus is '0'"),
    ],
)
def test_impossible_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RematError, match=message):
        gpt2_on("h100", **options)


def test_a_trace_in_another_dtype_than_mixed_precision_is_an_error() -> None:
    model, kwargs = gpt2(1)
    trace = remat.trace(model, (), kwargs, device="h100")
    loop = LoopOptions(gpus=8, mixed_precision_param="bfloat16")
    with pytest.raises(RematError, match=r"parameters in float32.*model.to\(torch.bfloat16\)"):
        fit_trace(trace, "adamw", loop=loop)


def test_a_model_keeps_its_parameters_in_mixed_precision() -> None:
    model, kwargs = gpt2(1)
    before = {name: (id(p), p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    remat.fit(model, (), kwargs, device="h100", gpus=2, **BF16)
    after = {name: (id(p), p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    assert after == before
    assert not model._forward_pre_hooks


def test_the_answer_names_gpus_and_communication() -> None:
    answer = gpt2_on("h100", gpus=16, shard="hybrid:8", **BF16)
    text = str(answer)
    shards = "float32 shards, bfloat16 compute, float32 reduction"
    assert f"GPUs      16 GPUs, fully_shard (hybrid:8), {shards}" in text
    assert "exposed communication (estimated)" in text
    assert json.loads(answer.to_json())["sharding"]["shard"] == "hybrid:8"
    assert answer.memory.peak_bytes == sum(answer.memory.parts.values())


def test_a_loop_that_does_not_fit_has_options_for_its_gpus() -> None:
    """Full shards over the same GPUs are an option for DDP; plans are excluded with a reason."""
    needed = gpt2_on("h100", gpus=4, shard="none").memory.reserved_bytes
    answer = gpt2_on("h100", gpus=4, shard="none", memory=needed - 1)
    options = {option.name: option for option in answer.options}
    assert options["FSDP over 4 GPUs"].gpus == 4
    assert "optimizer adamw-8bit" in options
    assert any(o.name == "plan of remat" and "DDP" in o.reason for o in answer.excluded)


@pytest.mark.parametrize("shard", ["full", "grad-op", "optimizer", "none", "hybrid:8"])
def test_a_slower_network_takes_longer(shard: str) -> None:
    fast, slow = (
        gpt2_on("h100", gpus=16, shard=shard, network=rate).communication_s for rate in (50e9, 1e6)
    )
    assert 0 < fast < slow


def test_collectives_of_one_node_do_not_use_the_network() -> None:
    nodes = [gpt2_on("h100", gpus=8, network=rate).communication_s for rate in (None, 1e6)]
    assert nodes[0] == nodes[1]
    across = gpt2_on("h100", gpus=8, network=1e6, node_gpus=4).communication_s
    assert across > nodes[0]


def test_a_ring_has_the_bandwidth_of_its_slowest_link() -> None:
    """8 GPUs of an H100 node gather 1 GB in 7/8 of it over 18 links of 20.6 GB/s; 16 GPUs by the
    8 network cards of each node."""
    node = Sharding(gpus=8).shard_ring("h100")
    assert node.round_s(10**9) == pytest.approx(0.875 / 370.8 + 8.4e-6 + 7 * 3.4e-6)
    nodes = Sharding(gpus=16, network=25e9).shard_ring("h100")
    assert nodes.bytes_per_s == 8 * 25e9
    replicas = Sharding(gpus=16, shard="hybrid:8").replica_ring("h100")
    assert (replicas.gpus, replicas.bytes_per_s) == (2, 50e9)
