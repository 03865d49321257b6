"""`remat.fit` of mixtures of experts, against steps with balanced and worst-case routing."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import remat
from remat.frontend.memory.meter import LiveStorageMeter, unique_bytes

EXPERTS, TOP_K = 4, 2
BATCH, TOKENS = 2, 32


def mixtral(implementation: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=99, num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K, use_cache=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.set_experts_implementation(implementation)
    ids = torch.randint(1, 99, (BATCH, TOKENS))
    return model.to(torch.bfloat16).train(), {"input_ids": ids, "labels": ids.clone()}


def route(model: nn.Module, *, is_balanced: bool) -> None:
    """Send all tokens to the same experts, or as many to all of them."""

    def forced(module: nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> object:
        logits, scores, experts = output
        token = torch.arange(len(experts)) if is_balanced else torch.zeros(len(experts), dtype=int)
        return logits, scores, (token[:, None] + torch.arange(TOP_K)) % EXPERTS

    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.gate.register_forward_hook(forced)  # type: ignore[union-attr]


def trained_peak(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    gc.collect()
    meter = LiveStorageMeter(
        unique_bytes([*model.parameters(), *model.buffers(), *inputs.values()])
    )
    with meter:
        for _ in range(2):
            model(**inputs).loss.backward()
            model.zero_grad(set_to_none=True)
    return meter.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_both_routings_need_the_predicted_memory(implementation: str) -> None:
    model, inputs = mixtral(implementation)
    answer = remat.fit(model, (), inputs, device="cpu", optimizer="none", memory="1TiB")
    (note,) = answer.notes
    assert f"have {BATCH * TOKENS * TOP_K} rows" in note
    peaks = []
    for is_balanced in (True, False):
        model, inputs = mixtral(implementation)
        route(model, is_balanced=is_balanced)
        peaks.append(trained_peak(model, inputs))
    assert peaks[0] == peaks[1]
    assert answer.memory.peak_bytes == pytest.approx(peaks[0], rel=0.005)


@pytest.mark.slow
def test_checkpoints_of_experts_need_the_predicted_memory() -> None:
    """Autograd's copies of the router's weights, which only the backward reads, do not recompute
    all layers at once."""
    model, inputs = mixtral("grouped_mm")
    eager = remat.fit(model, (), inputs, device="cpu", optimizer="none", memory="1TiB")
    answer = remat.fit(
        model, (), inputs, device="cpu", optimizer="none", memory=eager.memory.peak_bytes - 1,
        strategy=remat.Auto(time_limit=0.2),
    )  # fmt: skip
    (promised,) = [o for o in answer.options if o.name == "checkpoint each block"]
    eval(promised.code, {"model": model})
    assert promised.peak_bytes == pytest.approx(trained_peak(model, inputs), rel=0.02)


def test_a_loop_over_experts_is_refused_with_the_remedy() -> None:
    model, inputs = mixtral("eager")
    with pytest.raises(remat.TraceError, match=r'set_experts_implementation\("grouped_mm"\)'):
        remat.fit(model, (), inputs, device="cpu")
    dense = remat.fit(nn.Linear(4, 4), (torch.ones(2, 4),), device="cpu", memory="1GiB")
    assert not dense.notes
