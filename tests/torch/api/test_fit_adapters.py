"""`remat.fit` for adapters of PEFT and weights that bitsandbytes has quantized, against loops that
run: the predicted model is on the meta device, the one that runs on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.errors import RematError
from remat.frontend.api.adapters import with_adapters
from remat.frontend.common.quantized import quantization_tensors
from remat.frontend.memory.meter import LiveStorageMeter, unique_bytes

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")

TARGETS = ["q_proj", "v_proj", "down_proj"]


def llama(device: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        config = LlamaConfig(
            hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
            vocab_size=256, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        return LlamaForCausalLM(config).train()


def of_library(kind: str, **options: Any) -> Callable[[str], nn.Module]:
    """Return a function that adds adapters of a kind to a model on a device, as PEFT does."""

    def make(device: str) -> nn.Module:
        import peft

        config = getattr(peft, f"{kind}Config")(target_modules=TARGETS, **options)
        return peft.get_peft_model(llama(device), config).train()

    return make


def described(
    lora: str | None, quantize: str | None, dtype: torch.dtype = torch.float32
) -> Callable[[str], nn.Module]:
    """Return a function that creates the model that the command line names."""
    return lambda device: with_adapters(llama(device).to(dtype), lora, quantize)


ALL = "r=4,targets=all-linear"

CASES = {
    "LoRA": of_library("Lora", r=4),
    "DoRA": of_library("Lora", r=4, use_dora=True),
    "IA3": of_library("IA3", feedforward_modules=["down_proj"]),
    "OFT": of_library("OFT", oft_block_size=8, r=0),
    "LoHa": of_library("LoHa", r=4),
    "LoRA, in words": described(ALL, None),
    "DoRA, in words": described("r=4,targets=q_proj+v_proj,dora", None),
    "LoRA, bfloat16": described("r=4,dropout=0.1", None, torch.bfloat16),
    "nf4": described(ALL, "nf4"),
    "nf4, bfloat16": described(ALL, "nf4", torch.bfloat16),
    "nf4-double": described("r=4,targets=q_proj+v_proj", "nf4-double", torch.bfloat16),
    "fp4": described(ALL, "fp4", torch.bfloat16),
    "int8": described(ALL, "int8"),
    "int8, bfloat16": described(ALL, "int8", torch.bfloat16),
}

TOLERANCE = 0.005


def batch(device: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1)).to(device)
    return {"input_ids": ids, "labels": ids}


def loop_peak(model: nn.Module) -> int:
    """Return the peak in bytes of three steps with AdamW."""
    inputs = batch("cpu")
    model(**inputs)  # bitsandbytes moves weights in the first call
    tensors = [*model.parameters(), *model.buffers(), *quantization_tensors(model).values()]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    gc.collect()
    with LiveStorageMeter(unique_bytes([*tensors, *inputs.values()])) as meter:
        for _ in range(3):
            loss = model(**inputs).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    return meter.peak_bytes


@pytest.mark.slow_cases("LoRA", "OFT", "DoRA, in words", "nf4", "fp4", "int8")
@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_loop_is_predicted(name: str) -> None:
    make = CASES[name]
    answer = remat.fit(
        make("meta"), (), batch("meta"), device="cpu", memory="1TiB", outputs="dropped"
    )
    assert answer.memory.peak_bytes == pytest.approx(loop_peak(make("cpu")), rel=TOLERANCE)


@pytest.mark.parametrize(
    "text", ["r", "r=0", "r=x", "rank=4", "targets=", "dropout=1", "dora=1", ","]
)
def test_unknown_options_of_adapters_are_an_error(text: str) -> None:
    with pytest.raises(RematError, match="is not a valid option of LoRA"):
        with_adapters(nn.Linear(4, 4), text, None)


def test_an_unknown_quantization_is_an_error() -> None:
    with pytest.raises(RematError, match="quantize is 'nf5'; pass one of nf4"):
        with_adapters(nn.Linear(4, 4), None, "nf5")


def test_a_target_that_no_layer_has_is_an_error() -> None:
    with pytest.raises(RematError, match="PEFT cannot add adapters to LlamaForCausalLM"):
        with_adapters(llama("meta"), "r=4,targets=q_project", None)


@pytest.mark.parametrize("quantize", ["nf4", "nf4-double", "int8"])
def test_a_plan_has_the_gradients_of_the_quantized_model(quantize: str) -> None:
    """The whole step is planned, and its gradients equal eager mode's bit for bit."""
    make = described("r=4,targets=all-linear,dropout=0.1", quantize, torch.bfloat16)
    eager, inputs = make("cpu"), batch("cpu")
    model = remat.optimize(
        make("cpu"), "50%", (), inputs, costs=remat.Roofline("cpu"), outputs="dropped"
    )
    assert model.plan.peak_bytes <= model.plan.budget_bytes
    assert model.plan.overhead > 0
    losses = []
    for trained in (eager, model):
        torch.manual_seed(7)
        losses.append(trained(**inputs).loss)
        losses[-1].backward()
    assert torch.equal(*losses)
    gradients = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    assert len(gradients) == 2 * 7 * 3
    others = dict(model.named_parameters())
    for name, gradient in gradients.items():
        assert torch.equal(others[name].grad, gradient), name


class QuantizedBlocks(nn.Module):
    """Blocks of a layer of bitsandbytes and an ordinary one."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList()
        for _ in range(3):
            self.layers += [quantized_layer(bits), nn.Linear(64, 64)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def quantized_layer(bits: int) -> nn.Module:
    import bitsandbytes

    layer: nn.Module
    if bits == 4:
        layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32)
    else:
        layer = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    return layer.requires_grad_(False).to("cpu")


def replace_layer(model: QuantizedBlocks, other: Any) -> None:
    model.layers[2] = other


def replace_weight(model: QuantizedBlocks, other: Any) -> None:
    model.layers[2].weight = other.weight


def replace_weight_that_ran(model: QuantizedBlocks, other: Any) -> None:
    other(torch.randn(2, 64))
    model.layers[2].weight = other.weight


def replace_scales(model: QuantizedBlocks, other: Any) -> None:
    layer: Any = model.layers[2]
    if hasattr(other, "state"):
        layer.state.SCB = layer.state.SCB * 2
    else:
        layer.weight.quant_state = other.weight.quant_state


def write_scales(model: QuantizedBlocks, other: Any) -> None:
    layer: Any = model.layers[2]
    scales = layer.state.SCB if hasattr(other, "state") else layer.weight.quant_state.absmax
    scales.mul_(3)


@pytest.mark.parametrize("scope", ["model", "blocks"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "change",
    [replace_layer, replace_weight, replace_weight_that_ran, replace_scales, write_scales],
)
def test_a_plan_uses_the_present_quantized_weights(
    change: Callable[[QuantizedBlocks, Any], None], bits: int, scope: str
) -> None:
    eager, planned = QuantizedBlocks(bits), QuantizedBlocks(bits)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    remat.enable(planned, "90%", scope=scope, infeasible="smallest", costs=remat.Roofline("cpu"))

    def step(model: nn.Module) -> list[torch.Tensor]:
        loss = model(x)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return [loss.detach(), *gradients]

    for _ in range(2):
        assert all(map(torch.equal, step(eager), step(planned)))
        for model in (eager, planned):
            torch.manual_seed(5)
            change(model, quantized_layer(bits))
