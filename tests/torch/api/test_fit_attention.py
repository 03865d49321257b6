"""`remat.fit` for flex attention and packed sequences, against loops on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

import remat
from remat.errors import TraceError
from remat.frontend.common.target_gpu import local_gpu_name
from remat.integrations.transformers import flash_attention_assumed

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of torch.compile and transformers

Batch = dict[str, Any]
Model = tuple[nn.Module, Batch]

WIDTH, HEADS, TOKENS = 128, 4, 512
LENGTHS = (100, 256, 28, 128)
compiled_flex = torch.compile(flex.flex_attention)
compiled_block_mask = torch.compile(flex.create_block_mask)


class Layer(nn.Module):
    """A layer of a transformer; `attend` computes attention for tensors (..., heads, size)."""

    def __init__(self, attend: Callable[..., torch.Tensor], key_heads: int) -> None:
        super().__init__()
        self.attend, self.size = attend, WIDTH // HEADS
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        widths = (WIDTH, key_heads * self.size, key_heads * self.size)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)
        self.out, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        normed = self.norms[0](x)
        qkv = [p(normed).unflatten(-1, (-1, self.size)) for p in self.projections]
        x = x + self.out(self.attend(*qkv, mask).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Layers, and a function that returns their mask."""

    def __init__(
        self,
        attend: Callable[..., torch.Tensor],
        make_mask: Callable[[torch.Tensor, torch.Tensor], Any],
        key_heads: int,
    ) -> None:
        super().__init__()
        self.make_mask = make_mask
        self.layers = nn.ModuleList(Layer(attend, key_heads) for _ in range(3))

    def forward(self, x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        mask = self.make_mask(x, documents)
        for layer in self.layers:
            x = layer(x, mask)
        return x.float().mean()


def attend_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: flex.BlockMask
) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    is_grouped = q.shape[1] != k.shape[1]
    return compiled_flex(q, k, v, block_mask=mask, enable_gqa=is_grouped).transpose(1, 2)


def document_mask(x: torch.Tensor, documents: torch.Tensor) -> flex.BlockMask:
    def is_visible(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    return compiled_block_mask(is_visible, x.shape[0], None, TOKENS, TOKENS, device=x.device)


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    attention: Callable[..., Any] = varlen_attn
    return attention(
        *(q, k, v, starts, starts, max(LENGTHS), max(LENGTHS)),
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def blocks(key_heads: int, dtype: torch.dtype) -> Model:
    batch = {
        "x": torch.ones(2, TOKENS, WIDTH, dtype=dtype),
        "documents": torch.zeros(2, TOKENS, dtype=torch.int32),
    }
    return Transformer(attend_in_blocks, document_mask, key_heads).to(dtype), batch


def packed(key_heads: int, dtype: torch.dtype) -> Model:
    starts = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch = {"x": torch.ones(TOKENS, WIDTH, dtype=dtype), "documents": starts}
    return Transformer(attend_packed, lambda x, starts: starts, key_heads).to(dtype), batch


def llama(implementation: str, *, is_packed: bool = False) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    with flash_attention_assumed():
        config = LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            vocab_size=500,
            use_cache=False,
            attn_implementation=implementation,
            dtype=torch.bfloat16,
        )
        model = LlamaForCausalLM(config).bfloat16()
    ids = torch.zeros(1 if is_packed else 2, TOKENS, dtype=torch.long)
    batch: Batch = {"input_ids": ids, "labels": ids}
    if is_packed:
        starts = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        batch |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        batch |= {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
        batch["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return model, batch


LOOPS: dict[str, Callable[[], Model]] = {
    "flex": lambda: blocks(HEADS, torch.bfloat16),
    "flex, grouped, float32": lambda: blocks(2, torch.float32),
    "packed": lambda: packed(HEADS, torch.bfloat16),
    "packed, grouped": lambda: packed(2, torch.bfloat16),
    "Llama, flex": lambda: llama("flex_attention"),
}


def loop_peak(model: nn.Module, batch: Batch) -> int:
    """Return the requested bytes of the third and fourth step. The first one compiles, and measures
    kernels; its garbage is collected."""
    model = model.cuda()
    batch = {key: value.cuda() for key, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        del output, loss
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOOPS)
def test_the_peak_on_a_gpu_is_predicted(name: str) -> None:
    model, batch = LOOPS[name]()
    gpu = local_gpu_name("cuda")
    answer = remat.fit(model, (), batch, device=gpu, memory="1TiB")
    torch._dynamo.reset()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    library_bytes = answer.memory.parts["libraries"]
    peak_bytes = loop_peak(model, batch)
    # Relative to the rest: these models are small.
    assert answer.memory.peak_bytes - library_bytes == pytest.approx(
        peak_bytes - library_bytes, rel=0.005
    )


def targets_of(model: nn.Module, batch: Batch) -> list[str]:
    trace = remat.trace(model, (), batch, device="h100")
    return [node.target for node in trace.nodes if "att" in node.target]


@pytest.mark.parametrize("name", LOOPS)
def test_attention_of_an_absent_gpu_has_its_kernels(name: str) -> None:
    targets = targets_of(*LOOPS[name]())
    layers = 2 if name.startswith("Llama") else 3
    operator = "torch_attn._varlen_attn" if name.startswith("packed") else "remat.flex_attention"
    backward = f"{operator}_backward.default"
    assert targets == [f"{operator}.default"] * layers + [backward] * layers


@pytest.mark.parametrize("is_packed", [False, True])
def test_flash_attention_of_transformers_without_its_package(is_packed: bool) -> None:
    model, batch = llama("flash_attention_2", is_packed=is_packed)
    targets = targets_of(model, batch)
    operator = (
        "torch_attn._varlen_attn" if is_packed else "aten._scaled_dot_product_flash_attention"
    )
    assert targets == [f"{operator}.default"] * 2 + [f"{operator}_backward.default"] * 2
    answer = remat.fit(model, (), batch, device="h100")
    scaled, _ = llama("sdpa")
    if not is_packed:  # on an H100, torch's default is cuDNN, whose results are as large
        other = remat.fit(scaled, (), batch, device="h100")
        assert answer.memory.peak_bytes == pytest.approx(other.memory.peak_bytes, rel=0.005)


def test_a_step_with_an_operator_for_predictions_does_not_run() -> None:
    model, batch = blocks(HEADS, torch.float32)
    remat.trace(model, (), batch, device="h100")
    q = torch.ones(1, HEADS, 8, 8)
    with pytest.raises(TraceError, match="plans of such models cannot run"):
        torch.ops.remat.flex_attention(q, q, q, [])


def test_a_block_mask_is_no_argument() -> None:
    class Masked(nn.Module):
        def __init__(self, mask: flex.BlockMask | None = None) -> None:
            super().__init__()
            self.mask, self.layer = mask, Layer(attend_in_blocks, HEADS)

        def forward(self, x: torch.Tensor, mask: flex.BlockMask | None = None) -> torch.Tensor:
            return self.layer(x, mask or self.mask).square().mean()

    mask = flex.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, TOKENS, TOKENS, device="cpu"
    )
    x = torch.ones(1, TOKENS, WIDTH)
    assert targets_of(Masked(mask), {"x": x})
    with pytest.raises(TraceError, match=r"is a BlockMask.*create it in the forward"):
        remat.trace(Masked(), (x, mask), device="h100")
