"""Policies as options of Megatron-core: its own models, built with them, on the CPU.

Megatron is made for GPUs. Here its attention is another module, which any of its specs may name,
and its CUDA calls (the current device, random numbers) are answered for the CPU.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.training import steps
from tests.helpers.training.steps import Step
from torch import nn

import remat
from remat.blockwise.block_step import BlockOption, BlockStep, StepEvent
from remat.blockwise.choose import cheapest_setting
from remat.blockwise.policies import BlockPolicy, Policies
from remat.errors import InfeasibleBudget, RematError, TraceError
from remat.frontend.emit.megatron import settings_for_all_blocks
from remat.integrations import megatron

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH, WORDS = 48, 128


@pytest.fixture(scope="module")
def core() -> Iterator[Any]:
    with warnings.catch_warnings():  # of optional packages that are not installed
        warnings.simplefilter("ignore")
        package = pytest.importorskip("megatron.core")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "_get_cuda_rng_state", lambda *_, **__: torch.zeros(0))
        patch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        yield package
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def attention_class() -> type[nn.Module]:
    from megatron.core.transformer.module import MegatronModule

    class Attention(MegatronModule):
        def __init__(self, config: Any, *_: Any, **__: Any) -> None:
            super().__init__(config)

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
            length, batch, _, size = query.shape
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-1, -2) / size**0.5).masked_fill(later, float("-inf"))
            return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).reshape(length, batch, -1)

    return Attention


def gpt(**options: Any) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    sizes = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "hidden_dropout": 0.1}
    switches = {"use_cpu_initialization": True, "add_bias_linear": False}
    config = TransformerConfig(**(sizes | switches | options))
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    spec.submodules.self_attention.submodules.core_attention = attention_class()
    return GPTModel(config, spec, vocab_size=WORDS, max_sequence_length=LENGTH)


def experts(**options: Any) -> nn.Module:
    return gpt(
        num_moe_experts=4,
        moe_shared_expert_intermediate_size=128,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        **options,
    )


MODELS = {"gpt": gpt, "experts": experts}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    places = torch.arange(LENGTH).expand(4, LENGTH)
    return {"input_ids": ids, "position_ids": places, "attention_mask": mask, "labels": ids}


def step(model: nn.Module) -> Step:
    return steps.step(model, loss=torch.Tensor.mean, **batch())


def peak_of(model: nn.Module) -> int:
    step(model)  # what Megatron compiles
    return steps.peak_of(model, loss=torch.Tensor.mean, **batch())


def emitted(model: nn.Module, budget: int | str, **more: Any) -> Policies:
    more = {"compare": False, "outputs": "dropped", **more}
    return remat.emit(model, budget, example_kwargs=batch(), rules="megatron", **more)


@pytest.mark.slow_cases("gpt-90%")
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("gpt", "90%"),
        ("gpt", "min"),
        pytest.param("gpt", "75%", marks=pytest.mark.slow),
        pytest.param("experts", "90%", marks=pytest.mark.slow),
        pytest.param("experts", "min", marks=pytest.mark.slow),
    ],
)
def test_a_model_with_the_options_has_the_predicted_peak(core: Any, name: str, budget: str) -> None:
    expected = step(MODELS[name]())
    policies = emitted(MODELS[name](), budget)
    assert policies.peak_bytes <= policies.budget_bytes
    assert policies.peak_bytes < 0.95 * policies.baseline_bytes
    options = megatron.options(policies)
    assert options, "something is recomputed"
    model = MODELS[name](**options)
    steps.assert_same(step(model), expected)
    measured_bytes = peak_of(model)
    # Megatron's experts keep tensors in objects of their own, with their autograd history.
    least = 0.95 if name == "gpt" else 0.7
    assert least * policies.peak_bytes < measured_bytes <= policies.peak_bytes


@pytest.mark.slow
def test_where_everything_fits_nothing_is_recomputed(core: Any) -> None:
    policies = emitted(gpt(), "100%")
    assert megatron.options(policies) == {}
    assert {policy.how for policy in policies.blocks} == {"as it is"}


def test_all_layers_get_the_same_setting() -> None:
    """Layers of one kind have two modules that can be recomputed, those of the other only one of
    them."""
    dense, other = [
        (
            BlockPolicy(block="b", how="as it is"),
            BlockPolicy(block="b", how="checkpointed"),
            *(BlockPolicy(block="b", how="selective", modules=option_set) for option_set in sets),
        )
        for sets in ([("core_attn",), ("mlp",), ("core_attn", "mlp")], [("core_attn",)])
    ]
    distinct_settings = set(settings_for_all_blocks(["a.0", "a.1", "b.0"], [dense, other, dense]))
    assert distinct_settings == {
        (0, 0, 0), (2, 2, 2), (3, 0, 3), (4, 2, 4),  # nothing, core_attn, mlp, both
        (1, 0, 1), (1, 1, 1),  # the first layer of each stack, the first two
    }  # fmt: skip


def test_the_cheapest_setting_within_the_budget_is_selected() -> None:
    block_options = (
        BlockOption(1.0, 8, 8, 8),
        BlockOption(1.5, 1, 8, 8),
        BlockOption(1.2, 5, 8, 8),
    )
    events = [StepEvent("forward", 0, 0), StepEvent("forward", 0, 1)]
    events += [StepEvent("backward", 0, 1), StepEvent("backward", 0, 0)]
    step = BlockStep((block_options, block_options), tuple(events))
    offered = [(0, 0), (1, 1), (2, 2)]
    peaks = [step.peak_bytes(setting) for setting in offered]
    assert peaks == [16, 9, 13]
    assert [cheapest_setting(step, offered, b) for b in (16, 15, 13, 12, 9, None)] == [
        (0, 0), (2, 2), (2, 2), (1, 1), (1, 1), (1, 1),
    ]  # fmt: skip
    with pytest.raises(InfeasibleBudget, match='pass at least 9 bytes, or "min"'):
        cheapest_setting(step, offered, 8)


def test_the_mlp_is_not_recomputed_where_linear_layers_have_biases(core: Any) -> None:
    """Megatron's checkpoint of a module that returns its own bias does not end."""
    policies = emitted(gpt(add_bias_linear=True), "min")
    assert "mlp" not in {name for policy in policies.blocks for name in policy.modules}
    assert "mlp" not in megatron.arguments(policies)


def test_other_models_and_models_that_already_recompute_are_refused(core: Any) -> None:
    with pytest.raises(TraceError, match="has no TransformerLayer of Megatron-core"):
        remat.emit(nn.Sequential(nn.Linear(4, 4)), "60%", torch.ones(2, 4), rules="megatron")
    with pytest.raises(TraceError, match="was made with recompute_granularity='selective'"):
        emitted(gpt(recompute_granularity="selective"), "60%")


def policies_of(*blocks: BlockPolicy, rules: str = "megatron") -> Policies:
    numbers = {"budget_bytes": 9, "peak_bytes": 8, "baseline_bytes": 10}
    times = {"time_s": 2.0, "baseline_time_s": 1.0}
    return Policies.model_validate({"blocks": blocks, "rules": rules, **numbers, **times})


def test_the_options_are_available_as_command_line_arguments() -> None:
    selective = {"how": "selective", "modules": ("mlp", "core_attn")}
    some = policies_of(BlockPolicy(block="l.0", **selective), BlockPolicy(block="l.1", **selective))
    assert megatron.options(some) == {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp"],
    }
    assert megatron.arguments(some) == [
        "--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mlp",
    ]  # fmt: skip
    policies = [BlockPolicy(block=f"l.{n}", how="checkpointed") for n in range(2)]
    first = policies_of(*policies, BlockPolicy(block="l.2", how="as it is"))
    assert megatron.arguments(first) == [
        "--recompute-granularity", "full", "--recompute-method", "block",
        "--recompute-num-layers", "2",
    ]  # fmt: skip
    assert megatron.arguments(policies_of(BlockPolicy(block="l.0", how="as it is"))) == []
    with pytest.raises(
        RematError, match="rules='operators', and this executor needs rules='megatron'"
    ):
        megatron.options(policies_of(BlockPolicy(block="l.0", how="as it is"), rules="operators"))
    assert Policies.from_json(some.to_json()) == some
    assert "recomputed" in str(some)
    with pytest.raises(ValueError, match=r"the policy of l\.0 lists what rules='megatron'"):
        policies_of(BlockPolicy(block="l.0", **selective), rules="regions")


@pytest.mark.slow
def test_without_megatron_the_error_names_the_package() -> None:
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "import remat, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
        "try:\n    remat.emit(model, '50%', torch.ones(1, 2), rules='megatron')\n"
        "except remat.RematError as error:\n    print(error)"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'remat[megatron]'" in completed.stdout, completed.stderr
