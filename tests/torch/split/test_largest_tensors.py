"""The largest tensor of a model, whatever it is, is split; or the reason is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from remat.documents.trace import Trace
from remat.passes.split.obstacle import split_obstacle
from remat.passes.split.splits import split_largest_operations

pytestmark = pytest.mark.filterwarnings("ignore")

COSTS = remat.Roofline("cpu")
Model = tuple[nn.Module, dict[str, Any]]
MODELS: dict[str, tuple[Callable[[], Model], str]] = {}
"""Models with a batch, and words of the reason if the largest tensor stays whole."""

_TEXT = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 256,
    "use_cache": False,
}  # fmt: skip


def model(why: str = "") -> Callable[[Callable[[], Model]], Callable[[], Model]]:
    def add(build: Callable[[], Model]) -> Callable[[], Model]:
        MODELS[build.__name__] = build, why
        return build

    return add


def tokens(words: int, *shape: int) -> dict[str, Tensor]:
    ids = torch.randint(2, words, shape)
    return {"input_ids": ids, "labels": ids}


def pixels(samples: int, side: int) -> Tensor:
    return torch.randn(samples, 3, side, side)


@model()
def gpt2() -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=2000, use_cache=False)
    return GPT2LMHeadModel(config), tokens(2000, 4, 64)


@model()
def llama_with_long_texts() -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=100, **_TEXT | {"intermediate_size": 1024})
    return LlamaForCausalLM(config), tokens(100, 2, 256)


@model("no rule splits transformers.grouped_mm_fallback")
def qwen3_experts() -> Model:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=100, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256,
        num_key_value_heads=2, head_dim=16, **_TEXT,
    )  # fmt: skip
    experts = Qwen3MoeForCausalLM(config)
    experts.set_experts_implementation("grouped_mm")
    return experts, tokens(100, 4, 128)


@model()
def bert() -> Model:
    from transformers import BertConfig, BertForMaskedLM

    options = {name: value for name, value in _TEXT.items() if name != "use_cache"}
    return BertForMaskedLM(BertConfig(vocab_size=3000, **options)), tokens(3000, 4, 64)


@model()
def t5() -> Model:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=64, d_kv=16, d_ff=256, num_layers=1, num_heads=4, vocab_size=2000,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), tokens(2000, 4, 64)


@model()
def whisper() -> Model:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=2000, d_model=64, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=128,
        decoder_ffn_dim=128, encoder_attention_heads=4, decoder_attention_heads=4, num_mel_bins=16,
        max_source_positions=50, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    batch = {"input_features": torch.randn(4, 16, 100), "labels": tokens(2000, 4, 64)["labels"]}
    return WhisperForConditionalGeneration(config), batch | {"use_cache": False}


@model("an operation needs its rows together")
def mamba() -> Model:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=1, state_size=8, use_cache=False
    )
    return MambaForCausalLM(config), tokens(100, 4, 32)


@model()
def vit() -> Model:
    from transformers import ViTConfig, ViTForImageClassification

    options = {name: value for name, value in _TEXT.items() if name != "use_cache"}
    config = ViTConfig(image_size=64, patch_size=8, num_labels=10, **options)
    batch = {"pixel_values": pixels(8, 64), "labels": torch.arange(8)}
    return ViTForImageClassification(config), batch


@model()
def convnext() -> Model:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1], num_labels=10)
    batch = {"pixel_values": pixels(8, 64), "labels": torch.arange(8)}
    return ConvNextForImageClassification(config), batch


@model("no rule splits aten._native_batch_norm_legit_functional")
def resnet() -> Model:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10)
    batch = {"pixel_values": pixels(8, 64), "labels": torch.arange(8)}
    return ResNetForImageClassification(config), batch


@model()
def segformer() -> Model:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 32, 64], decoder_hidden_size=64, num_labels=150
    )
    batch = {"pixel_values": pixels(2, 64), "labels": torch.randint(150, (2, 64, 64))}
    return SegformerForSemanticSegmentation(config), batch


class Denoiser(nn.Module):
    """The loss of a diffusion model."""

    def __init__(self, denoiser: nn.Module) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, images: Tensor, times: Tensor, noise: Tensor, **others: Tensor) -> Tensor:
        return F.mse_loss(self.denoiser(images + noise, times, **others).sample, noise)


@model()
def unet() -> Model:
    from diffusers import UNet2DModel

    denoiser = UNet2DModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    batch = {"images": pixels(8, 32), "times": torch.arange(8), "noise": pixels(8, 32)}
    return Denoiser(denoiser), batch


@model()
def diffusion_transformer() -> Model:
    from diffusers import DiTTransformer2DModel

    denoiser = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=1,
        sample_size=16, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=8,
    )  # fmt: skip
    images, noise = torch.randn(2, 8, 4, 16, 16)
    batch = {"images": images, "times": torch.arange(8), "noise": noise}
    return Denoiser(denoiser), batch | {"class_labels": torch.arange(8)}


class Loss(nn.Module):
    """Features of one or two inputs, from which `loss` computes the rest."""

    def __init__(self, loss: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.loss = loss
        self.weights = nn.ParameterList(0.02 * torch.randn(shape) for shape in shapes)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.loss(*self.weights, **batch)


def features(n: int = 512) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 16), "y": torch.randn(n, 16)}


def similarities(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.normalize(x @ w, dim=-1) @ F.normalize(y @ v, dim=-1).t() / 0.1


@model("an operation needs its rows together")
def softmax_over_rows_and_columns() -> Model:
    def loss(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        scores, labels = similarities(w, v, x, y), torch.arange(len(x))
        return F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)

    return Loss(loss, (16, 32), (16, 32)), features()


@model()
def softmax_over_rows() -> Model:
    def loss(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(torch.cat([x, y]) @ w, dim=-1)
        scores = (z @ z.t() / 0.1).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
        return F.cross_entropy(scores, torch.arange(len(z)).roll(len(x)))

    return Loss(loss, (16, 32), (16, 32)), features(256)


@model("no rule splits aten.eye")
def sigmoid_of_pairs() -> Model:
    def loss(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return -F.logsigmoid(similarities(w, v, x, y) * (2 * torch.eye(len(x)) - 1)).mean()

    return Loss(loss, (16, 32), (16, 32)), features()


@model("no rule splits aten._euclidean_dist")
def hardest_triplets() -> Model:
    def loss(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        distances = torch.cdist(x @ w, y @ v)
        return (distances.diagonal() - distances.amin(1) + 0.3).relu().mean()

    return Loss(loss, (16, 32), (16, 32)), features()


@model()
def heads_of_several_tokens() -> Model:
    def loss(words: Tensor, heads: Tensor, ids: Tensor) -> Tensor:
        hidden = torch.einsum("btd,kde->btke", words[ids], heads)
        scores = (hidden @ words.t())[:, : -len(heads)]
        ends = [ids[:, n + 1 : ids.shape[1] - len(heads) + n + 1] for n in range(len(heads))]
        return F.cross_entropy(scores.flatten(0, 2), torch.stack(ends, 2).flatten())

    return Loss(loss, (2000, 32), (4, 32, 32)), {"ids": torch.randint(2000, (4, 64))}


@model()
def dense_experts() -> Model:
    def loss(
        words: Tensor, head: Tensor, router: Tensor, up: Tensor, down: Tensor, ids: Tensor
    ) -> Tensor:
        hidden = F.embedding(ids, words)
        inner = F.silu(torch.einsum("btd,edh->bteh", hidden, up))
        outer = torch.einsum("bteh,ehd->bted", inner, down)
        mixed = (outer * (hidden @ router).softmax(-1).unsqueeze(-1)).sum(2)
        return F.cross_entropy((mixed @ head).flatten(0, 1), ids.flatten())

    shapes = (100, 32), (32, 100), (32, 4), (4, 32, 512), (4, 512, 32)
    return Loss(loss, *shapes), {"ids": torch.randint(100, (4, 64))}


@model()
def segmentation() -> Model:
    def loss(kernel: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.conv2d(images, kernel), labels)

    batch = {"images": pixels(4, 64), "labels": torch.randint(150, (4, 64, 64))}
    return Loss(loss, (150, 3, 1, 1)), batch


def largest_bytes(trace: Trace) -> int:
    """Return the bytes of the largest tensor that is no view."""
    return max(
        trace.storage_bytes[result.storage]
        for node in trace.nodes
        if not node.view
        for result in node.results
    )


_SLOW = {
    "bert", "convnext", "diffusion_transformer", "gpt2", "mamba", "resnet", "segformer", "t5",
    "unet", "vit", "whisper",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in _SLOW else n for n in MODELS]
)
def test_the_largest_tensor_is_split_or_the_reason_is_said(name: str) -> None:
    build, why = MODELS[name]
    torch.manual_seed(0)
    built, batch = build()
    trace = remat.measure(remat.trace(built, (), batch, outputs="loss"), COSTS)
    split = trace
    for _ in range(6):
        in_pieces = split_largest_operations(split, 16)
        if in_pieces is split:
            break
        split = remat.measure(in_pieces, COSTS)
    reason = split_obstacle(trace, split)
    assert why in reason
    if not why:
        assert reason == ""
        assert largest_bytes(split) < 0.6 * largest_bytes(trace)


class ReturnsScores(nn.Module):
    """Returns the logits with the loss, as Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(0.02 * torch.randn(2000, 32))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        scores = self.words[ids].tanh() @ self.words.t()
        return {"loss": F.cross_entropy(scores.flatten(0, 1), ids.flatten()), "scores": scores}


def test_an_output_that_stays_whole_is_named_as_one() -> None:
    trace = remat.measure(remat.trace(ReturnsScores(), (torch.randint(2000, (4, 64)),)), COSTS)
    split = split_largest_operations(trace, 16)
    assert "because the step returns them" in split_obstacle(trace, split)
