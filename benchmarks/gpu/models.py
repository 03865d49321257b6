"""Models of the acceptance run, with random weights and the loss inside; tiny in a dry run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.gpu.setting import Setting
from benchmarks.models.workloads import Workload

HALF = torch.bfloat16


def _to_workload(
    setting: Setting,
    size: str,
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    blocks: Callable[[nn.Module], list[nn.Module]],
    half: bool,
) -> Workload:
    """Return a workload of the model in training mode, on the setting's device."""
    device = setting.device
    with setting.gpu():
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        model = model.to(device).train()
    size = f"{size}, {'bfloat16 autocast' if half else 'float32'}"
    return Workload(size, model, batch, blocks, HALF if half else None)


def gpt2(
    setting: Setting,
    *,
    layers: int = 12,
    width: int = 768,
    rows: int = 8,
    tokens: int = 512,
    dropout: float = 0.1,
    half: bool = False,
    mask: bool = False,
) -> Workload:
    """Return a GPT-2 workload. `mask` masks out the last tokens of each row."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width = setting.sized((layers, width), (min(layers, 2), 16))
    rows, tokens = setting.sized((rows, tokens), (min(rows, 2), min(tokens, 16)))
    vocabulary = setting.sized(50257, 64)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=setting.sized(width // 64, 2), n_positions=tokens,
        vocab_size=vocabulary, use_cache=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, attn_pdrop=dropout, embd_pdrop=dropout,
    )  # fmt: skip
    ids = torch.randint(0, vocabulary, (rows, tokens))
    batch = {"input_ids": ids, "labels": ids}
    if mask:
        batch["attention_mask"] = torch.ones(rows, tokens, dtype=torch.long)
        batch["attention_mask"][:, tokens - tokens // 4 :] = 0
    size = f"GPT-2, {layers} layers of width {width}, {rows} x {tokens} tokens, dropout {dropout:g}"
    return _to_workload(
        setting, size, GPT2LMHeadModel(config), batch,
        lambda model: list(model.get_submodule("transformer.h").children()), half,
    )  # fmt: skip


def bert(setting: Setting, *, rows: int = 8, tokens: int = 512) -> Workload:
    """Return a BERT workload with an attention mask, in float32."""
    from transformers import BertConfig, BertForMaskedLM

    layers, width, heads, vocabulary = setting.sized((12, 768, 12, 30522), (2, 16, 2, 64))
    rows, tokens = setting.sized((rows, tokens), (2, 16))
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        intermediate_size=4 * width, vocab_size=vocabulary, max_position_embeddings=tokens,
    )  # fmt: skip
    ids = torch.randint(0, vocabulary, (rows, tokens))
    seen = torch.ones(rows, tokens, dtype=torch.long)
    seen[:, tokens - tokens // 4 :] = 0
    return _to_workload(
        setting, f"BERT, {layers} layers of width {width}, {rows} x {tokens} tokens",
        BertForMaskedLM(config), {"input_ids": ids, "labels": ids, "attention_mask": seen},
        lambda model: list(model.get_submodule("bert.encoder.layer").children()), False,
    )  # fmt: skip


def llama(setting: Setting, *, rows: int = 2, tokens: int = 2048) -> Workload:
    """Return a Llama workload of the size of Llama 3.2 1B: 16 layers, grouped queries, bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, inner, vocabulary = setting.sized((16, 2048, 8192, 128256), (2, 16, 32, 64))
    heads, groups = setting.sized((32, 8), (4, 2))
    rows, tokens = setting.sized((rows, tokens), (2, 16))
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inner,
        vocab_size=vocabulary, num_attention_heads=heads, num_key_value_heads=groups,
        max_position_embeddings=tokens, use_cache=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    ids = torch.randint(0, vocabulary, (rows, tokens))
    with setting.device:  # initializing a billion parameters takes long on a CPU
        model = LlamaForCausalLM(config)
    return _to_workload(
        setting, f"Llama, {layers} layers of width {width}, {rows} x {tokens} tokens",
        model, {"input_ids": ids, "labels": ids},
        lambda model: list(model.get_submodule("model.layers").children()), True,
    )  # fmt: skip


def _images(rows: int, side: int, labels: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(rows, 3, side, side),
        "labels": torch.randint(0, labels, (rows,)),
    }


def resnet50(setting: Setting, *, rows: int, half: bool = False) -> Workload:
    """Return a ResNet-50 workload (bottleneck layers 3, 4, 6, 3)."""
    from transformers import ResNetConfig, ResNetForImageClassification

    depths = setting.sized([3, 4, 6, 3], [1, 1])
    rows, side = setting.sized((rows, 224), (16, 32))
    config = ResNetConfig(
        depths=depths, layer_type="bottleneck", embedding_size=setting.sized(64, 8),
        hidden_sizes=setting.sized([256, 512, 1024, 2048], [16, 32]),
    )  # fmt: skip
    config.num_labels = labels = setting.sized(1000, 8)
    batch = _images(rows, side, labels)

    def blocks(model: nn.Module) -> list[nn.Module]:
        return [m for m in model.modules() if type(m).__name__ == "ResNetBottleNeckLayer"]

    size = f"ResNet, bottleneck layers {depths}, {rows} x 3 x {side} x {side}"
    return _to_workload(setting, size, ResNetForImageClassification(config), batch, blocks, half)


def vit(setting: Setting, *, rows: int = 64) -> Workload:
    """Return a ViT-B/16 workload with bfloat16 autocast."""
    from transformers import ViTConfig, ViTForImageClassification

    layers, width, heads = setting.sized((12, 768, 12), (2, 16, 2))
    rows, side, patch = setting.sized((rows, 224, 16), (8, 16, 4))
    config = ViTConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        intermediate_size=4 * width, image_size=side, patch_size=patch, hidden_dropout_prob=0.1,
    )  # fmt: skip
    config.num_labels = labels = setting.sized(1000, 8)
    batch = _images(rows, side, labels)

    def blocks(model: nn.Module) -> list[nn.Module]:
        return [m for m in model.modules() if type(m).__name__ == "ViTLayer"]

    size = f"ViT, {layers} layers of width {width}, {rows} x 3 x {side} x {side}"
    return _to_workload(setting, size, ViTForImageClassification(config), batch, blocks, True)


class Positional(nn.Module):
    """A model with a positional batch that returns its loss, as `make_graphed_callables` needs."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self._names = names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.module(**dict(zip(self._names, tensors, strict=True))).loss
