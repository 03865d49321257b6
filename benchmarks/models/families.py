"""Model families that users train, with their default dropout, for the benchmarks of torch.compile.

On the CPU they are small enough to compile in half a minute, with batches that make activations
most of the memory. On CUDA they are larger and run in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.models.workloads import (
    DenoisingLoss,
    Workload,
    labelled_images,
    modules_of_classes,
    noisy_images,
)


def small_gpt(device: torch.device, quick: bool) -> Workload:
    """Return a GPT-2 workload; its forward has one graph break."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, _, tokens, vocabulary = _text_model_sizes(device, quick)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=vocabulary, n_positions=tokens,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _language_workload("GPT-2", GPT2LMHeadModel(config), "transformer.h", device, quick)


def llama(device: torch.device, quick: bool) -> Workload:
    """Return a Llama workload: rotary embeddings, RMS norms, grouped queries, gated MLPs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, _, tokens, vocabulary = _text_model_sizes(device, quick)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128), max_position_embeddings=tokens, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _language_workload("Llama", LlamaForCausalLM(config), "model.layers", device, quick)


def qwen3_moe(device: torch.device, quick: bool) -> Workload:
    """Return a Qwen3-MoE workload: eight experts, two for each token, as batched matmuls.

    Batched matmuls copy the weights of two experts for each token, so the CPU gets few tokens.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    layers, width, rows, tokens, vocabulary = _text_model_sizes(device, quick)
    if device.type != "cuda":
        rows, tokens = 2, 64
    more: dict[str, Any] = {"head_dim": 64}  # not in the signature
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width,
        moe_intermediate_size=width // 2, num_experts=8, num_experts_per_tok=2,
        num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128), max_position_embeddings=tokens,
        use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("batched_mm")  # the default loops over experts: no graph
    batch = (rows, tokens)
    return _language_workload("Qwen3-MoE", model, "model.layers", device, quick, batch)


def bert(device: torch.device, quick: bool) -> Workload:
    """Return a BERT workload: masked language modelling, a quarter of the rows padded."""
    from transformers import BertConfig, BertForMaskedLM

    layers, width, rows, tokens, vocabulary = _text_model_sizes(device, quick)
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=width // 64, intermediate_size=4 * width,
        max_position_embeddings=tokens,
    )  # fmt: skip
    workload = _language_workload(
        "BERT", BertForMaskedLM(config), "bert.encoder.layer", device, quick
    )
    mask = torch.ones(rows, tokens, dtype=torch.long, device=device)
    mask[: rows // 4, tokens // 2 :] = 0
    workload.batch["attention_mask"] = mask
    return workload


def t5(device: torch.device, quick: bool) -> Workload:
    """Return a T5 workload with encoder and decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    layers, width, rows, tokens, vocabulary = _text_model_sizes(device, quick)
    more: dict[str, Any] = {"decoder_start_token_id": 0}  # not in the signature
    config = T5Config(
        vocab_size=vocabulary, d_model=width, d_kv=64, d_ff=4 * width,
        num_layers=max(1, layers // 2), num_heads=width // 64, use_cache=False,
        **more,
    )  # fmt: skip
    model: Any = T5ForConditionalGeneration(config)
    ids = torch.randint(1, vocabulary, (rows, tokens), device=device)
    size = f"T5, {layers // 2} + {layers // 2} layers of width {width}, batch {rows} x {tokens}"
    return Workload(
        f"{size} tokens, dropout 0.1",
        model.to(device).train(),
        {"input_ids": ids, "labels": ids},
        modules_of_classes("T5Block"),
        _autocast_dtype(device),
    )


def vit(device: torch.device, quick: bool) -> Workload:
    """Return a ViT workload: images of 197 tokens on CUDA, of 65 tokens on the CPU."""
    from transformers import ViTConfig, ViTForImageClassification

    layers, width, *_ = _text_model_sizes(device, quick)
    rows, side, patch = (128, 224, 16) if device.type == "cuda" and not quick else (64, 64, 8)
    if device.type != "cuda":
        width = 128
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        intermediate_size=4 * width, image_size=side, patch_size=patch, hidden_dropout_prob=0.1,
    )  # fmt: skip
    config.num_labels = 100
    model: Any = ViTForImageClassification(config)
    return Workload(
        f"ViT, {layers} layers of width {width}, batch {rows} x 3 x {side} x {side}, dropout 0.1",
        model.to(device).train(),
        labelled_images(rows, side, 100, device),
        modules_of_classes("ViTLayer"),
        _autocast_dtype(device),
    )


def resnet(device: torch.device, quick: bool) -> Workload:
    """Return a ResNet workload with convolutions and batch norms."""
    from transformers import ResNetConfig, ResNetForImageClassification

    large = device.type == "cuda" and not quick
    rows, side = (128, 224) if large else (16 if quick else 128, 64)
    config = (
        ResNetConfig(depths=[3, 4, 6, 3], layer_type="bottleneck")
        if large
        else ResNetConfig(
            embedding_size=32,
            hidden_sizes=[32, 64, 128],
            depths=[2, 2, 2] if quick else [8, 4, 4],
            layer_type="basic",
        )
    )
    config.num_labels = 100
    model: Any = ResNetForImageClassification(config)
    return Workload(
        f"ResNet, layers {config.depths}, batch {rows} x 3 x {side} x {side}",
        model.to(device).train(),
        labelled_images(rows, side, 100, device),
        modules_of_classes("ResNetBasicLayer", "ResNetBottleNeckLayer"),
        _autocast_dtype(device),
    )


def unet2d(device: torch.device, quick: bool) -> Workload:
    """Return the workload of a diffusion U-Net with attention."""
    from diffusers import UNet2DModel

    large = device.type == "cuda" and not quick
    rows, side, widths = (32, 64, (128, 256, 512)) if large else (8 if quick else 16, 32, (32, 64))
    layers = 1 if quick else 2 if large else 3
    down, up = ["DownBlock2D"] * len(widths), ["UpBlock2D"] * len(widths)
    down[1], up[-2] = "AttnDownBlock2D", "AttnUpBlock2D"
    unet = UNet2DModel(
        sample_size=side, in_channels=3, out_channels=3, layers_per_block=layers,
        block_out_channels=widths, norm_num_groups=16,
        down_block_types=tuple(down), up_block_types=tuple(up),
    )  # fmt: skip
    shape = f"{rows} x 3 x {side} x {side}"
    return Workload(
        f"U-Net, widths {list(widths)}, {layers} layers a block, batch {shape}",
        DenoisingLoss(unet).to(device).train(),
        noisy_images(rows, side, device),
        modules_of_classes("ResnetBlock2D", "Attention"),
        _autocast_dtype(device),
    )


def _text_model_sizes(device: torch.device, quick: bool) -> tuple[int, int, int, int, int]:
    """Return layers, width, rows, tokens and vocabulary of a text model."""
    if device.type == "cuda" and not quick:
        return 12, 768, 16, 1024, 50304
    return (1 if quick else 4), 256, 8, 128 if quick else 256, 1000


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype: bfloat16 on CUDA, None on the CPU."""
    return torch.bfloat16 if device.type == "cuda" else None


def _language_workload(
    name: str,
    model: Any,
    layers_path: str,
    device: torch.device,
    quick: bool,
    batch: tuple[int, int] | None = None,
) -> Workload:
    """Return the workload of a language model whose blocks are the children of `layers_path`."""
    layers, width, rows, tokens, vocabulary = _text_model_sizes(device, quick)
    rows, tokens = batch or (rows, tokens)
    ids = torch.randint(0, vocabulary, (rows, tokens), device=device)
    return Workload(
        f"{name}, {layers} layers of width {width}, batch {rows} x {tokens} tokens",
        model.to(device).train(),
        {"input_ids": ids, "labels": ids},
        lambda model: list(model.get_submodule(layers_path).children()),
        _autocast_dtype(device),
    )


FAMILIES: dict[str, Callable[[torch.device, bool], Workload]] = {
    "gpt2": small_gpt,
    "llama": llama,
    "qwen3_moe": qwen3_moe,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "resnet": resnet,
    "unet2d": unet2d,
}
