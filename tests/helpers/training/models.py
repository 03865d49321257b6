"""The models of the tests: small real families with random weights, and plain modules with one
difficulty each. Every entry creates a new model with its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Case:
    """A model with the arguments of one call. `loss` maps the output to a scalar."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] = lambda out: out.loss
    autocast: torch.dtype | None = None


def gpt2(layers: int = 2, dropout: float = 0.1, mask: bool = False) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=64, n_head=2, vocab_size=120, n_positions=64, use_cache=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=dropout, attn_pdrop=dropout, embd_pdrop=dropout,
    )  # fmt: skip
    ids = torch.randint(0, 120, (4, 64))
    kwargs = {"input_ids": ids, "labels": ids}
    if mask:
        kwargs["attention_mask"] = torch.ones(4, 64, dtype=torch.long)
        kwargs["attention_mask"][:, 50:] = 0
    return Case(GPT2LMHeadModel(config).train(), kwargs=kwargs)


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=120, hidden_size=64, intermediate_size=128, num_hidden_layers=2, use_cache=False,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    ids = torch.randint(0, 120, (4, 64))
    return Case(LlamaForCausalLM(config).train(), kwargs={"input_ids": ids, "labels": ids})


def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=120, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(0, 120, (4, 64))
    mask = torch.ones(4, 64, dtype=torch.long)
    mask[:, 48:] = 0
    kwargs = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    return Case(BertForMaskedLM(config).train(), kwargs=kwargs)


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=120, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids, labels = torch.randint(1, 120, (4, 48)), torch.randint(1, 120, (4, 32))
    model = T5ForConditionalGeneration(config).train()
    return Case(model, kwargs={"input_ids": ids, "labels": labels})


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        image_size=32, patch_size=4, num_labels=10, hidden_dropout_prob=0.1,
    )  # fmt: skip
    kwargs = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(0, 10, (8,))}
    return Case(ViTForImageClassification(config).train(), kwargs=kwargs)


def resnet() -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=10
    )
    kwargs = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(0, 10, (8,))}
    return Case(ResNetForImageClassification(config).train(), kwargs=kwargs)


def unet() -> Case:
    pytest.importorskip("diffusers", reason="a machine for its GPU may have only transformers")
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1,
        block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    args = (torch.randn(4, 3, 16, 16), torch.tensor([1, 5, 9, 3]), torch.randn(4, 3, 16, 16))
    return Case(Denoiser(model).train(), args=args, loss=lambda out: out[0])


class Denoiser(nn.Module):
    """A diffusion training step, which contains its loss."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(
        self, noisy: torch.Tensor, steps: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sample = self.unet(noisy, steps).sample
        return F.mse_loss(sample, noise), sample


FAMILIES: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "gpt2-mask": lambda: gpt2(mask=True),
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "resnet": resnet,
    "unet": unet,
}


# -- plain modules, one difficulty each ----------------------------------------------------------


class WithParts(nn.Module):
    """A module whose class statement names its parts: `class Net(WithParts, layer=(4, 8))` has a
    linear layer. A part of another kind is a function that creates it, or a value."""

    _parts: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **parts: Any) -> None:
        super().__init_subclass__()
        cls._parts = {**cls._parts, **parts}

    def __init__(self) -> None:
        super().__init__()
        for name, part in self._parts.items():
            if isinstance(part, tuple):
                part = nn.Linear(*part)
            elif callable(part):
                part = part()
            setattr(self, name, part)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Mlp(nn.Module):
    """Dropout, residuals, a frozen layer, an unused layer, None and dict outputs."""

    def __init__(self, width: int = 32, depth: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.unused = nn.Linear(3, 3)
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        return {"loss": (x * scale).square().mean(), "hidden": x, "nothing": None, "n": 3}


class LanguageModel(nn.Module):
    """Layers with dropout, and a head whose logits are by far the largest tensor."""

    def __init__(self, width: int = 16, words: int = 1000) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def language_model() -> Case:
    """Return a model whose smallest peak is far larger without splitting."""
    torch.manual_seed(0)
    labels = torch.randint(0, 1000, (4, 16))
    labels[0, :3] = -100
    return Case(LanguageModel(), (torch.randn(4, 16, 16), labels), loss=lambda out: out)


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


class Shared(nn.Module):
    """One block under two names, with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Dropout(0.2))
        self.body = nn.Sequential(block, nn.Tanh(), block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


class Norms(nn.Module):
    """Batch norm, in-place ReLU and dropout, a buffer that counts and one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.3, inplace=True),
        )  # fmt: skip
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        h = self.conv(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(dim=(0, 2, 3))
        h += 1.0
        return (h * self.steps).square().mean()


@dataclass
class Answer:
    """A plain dataclass, not registered as a pytree."""

    first: torch.Tensor
    second: torch.Tensor
    comment: str = "fine"


class TwoHeads(nn.Module):
    """Two differentiable outputs in a dataclass; views; split; a constant tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 5)])

    def forward(self, x: torch.Tensor) -> Answer:
        a, b = torch.sigmoid(self.body(x)).split(16, dim=-1)
        weights = torch.tensor([1.0, 0.5, 2.0, 1.0])
        return Answer(self.heads[0](a) * weights, self.heads[1](b.t().contiguous().t()).t())


class Checkpointed(nn.Module):
    """A model that uses `torch.utils.checkpoint`, both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for i, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=bool(i % 2))
        return x.square().mean()


class Alias(nn.Module):
    """Outputs that are an input, a parameter, and twice the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.tanh(x @ self.weight)
        return y, y, y.view(-1), x, self.weight


class Weights(nn.Module):
    """Gradients that share memory or are expanded: a sum of parameters, the bias of a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(40))
        self.b = nn.Parameter(torch.randn(40))
        self.c = nn.Parameter(torch.randn(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a + self.b).mean() + (x * (self.c + self.a)).sum()


def _x(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=grad)


PLAIN: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(Mlp(), (_x(64, 32),), {"scale": 0.5}, loss=lambda out: out["loss"]),
    "mlp-input-grad": lambda: Case(Mlp(), (_x(64, 32, grad=True),), loss=lambda out: out["loss"]),
    "mlp-bf16": lambda: Case(
        Mlp(), (_x(64, 32),), loss=lambda out: out["loss"], autocast=torch.bfloat16
    ),
    "tied": lambda: Case(Tied(), (_x(64, 24),), loss=lambda out: out),
    "shared": lambda: Case(Shared(), (_x(128, 24),), loss=lambda out: out),
    "norms": lambda: Case(Norms(), (_x(8, 3, 12, 12),), loss=lambda out: out),
    "two-heads": lambda: Case(
        TwoHeads(), (_x(64, 16),), loss=lambda out: out.first.sum() + out.second.square().mean()
    ),
    "checkpointed": lambda: Case(Checkpointed(), (_x(64, 24),), loss=lambda out: out),
    "alias": lambda: Case(
        Alias(), (_x(64, 8),), loss=lambda out: out[0].sum() + out[2].square().mean()
    ),
    "weights": lambda: Case(Weights(), (_x(40),), loss=lambda out: out),
}
