"""Model families for the software GPU: real architectures, small, with random weights.

A batch of 32 x 64 tokens or 32 images, a width of 256: a plan takes about a second, activations are
most of the memory, and few tensors are smaller than the 512 bytes that torch allocates at least.
Dropout is that of each architecture's default configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.models.workloads import DenoisingLoss

ROWS, TOKENS, WIDTH, HEADS, VOCABULARY, LABELS = 32, 64, 256, 4, 1024, 10

Batch = dict[str, Any]

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "use_cache": False,
    "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2}
_HEAD_DIM: dict[str, Any] = {**_GROUPED, "head_dim": WIDTH // HEADS}
_IMAGE: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH, "image_size": 64, "patch_size": 8, "num_labels": LABELS,
}  # fmt: skip
_ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "use_cache": False,
    "encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def _text_model(name: str, sizes: Batch, class_suffix: str = "ForCausalLM") -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}{class_suffix}")(config)


def _token_batch() -> Batch:
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _text(
    name: str, sizes: Batch, class_suffix: str = "ForCausalLM"
) -> Callable[[], tuple[nn.Module, Batch]]:
    return lambda: (_text_model(name, sizes, class_suffix), _token_batch())


def _image(name: str, sizes: Batch) -> Callable[[], tuple[nn.Module, Batch]]:
    def build() -> tuple[nn.Module, Batch]:
        pixels = torch.randn(ROWS, 3, sizes["image_size"], sizes["image_size"])
        batch = {"pixel_values": pixels, "labels": torch.arange(ROWS) % LABELS}
        return _text_model(name, sizes, "ForImageClassification"), batch

    return build


def _bart() -> tuple[nn.Module, Batch]:
    # Without a mask for the decoder, transformers makes one and branches on its values, but only in
    # eager mode: the captured code would be another.
    batch = _token_batch()
    batch["decoder_attention_mask"] = batch["attention_mask"].clone()
    return _text_model("Bart", _ENCODER_DECODER, "ForConditionalGeneration"), batch


def _whisper() -> tuple[nn.Module, Batch]:
    sizes = {**_ENCODER_DECODER, "num_mel_bins": 20, "max_source_positions": TOKENS}
    sizes |= {"max_target_positions": TOKENS, "suppress_tokens": [], "begin_suppress_tokens": []}
    labels = torch.randint(3, VOCABULARY, (ROWS, TOKENS))
    model = _text_model("Whisper", sizes, "ForConditionalGeneration")
    return model, {"input_features": torch.randn(ROWS, 20, 2 * TOKENS), "labels": labels}


def _t5() -> tuple[nn.Module, Batch]:
    sizes = {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "num_layers": 2, "num_decoder_layers": 2,
        "num_heads": HEADS, "d_kv": WIDTH // HEADS, "d_ff": 2 * WIDTH, "use_cache": False,
        "decoder_start_token_id": 0,
    }  # fmt: skip
    return _text_model("T5", sizes, "ForConditionalGeneration"), _token_batch()


def _clip() -> tuple[nn.Module, Batch]:
    import transformers

    text = {**_TEXT, "max_position_embeddings": TOKENS}
    vision = {k: v for k, v in _IMAGE.items() if k != "num_labels"}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(ROWS, 3, 64, 64),
        "return_loss": True,
    }
    return transformers.CLIPModel(config), batch


def _unet() -> tuple[nn.Module, Batch]:
    from diffusers import UNet2DModel

    unet = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1,
        block_out_channels=(WIDTH // 2, WIDTH), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    images, noise = torch.randn(ROWS, 3, 16, 16), torch.randn(ROWS, 3, 16, 16)
    return DenoisingLoss(unet), {
        "noisy": images,
        "steps": torch.randint(0, 1000, (ROWS,)),
        "noise": noise,
    }


_GPT2 = {
    "n_layer": 2, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": 128,
    "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_SWIN = {
    "image_size": 64, "patch_size": 4, "embed_dim": WIDTH // 2, "depths": [1, 1],
    "num_heads": [2, 4], "window_size": 4, "num_labels": LABELS,
}  # fmt: skip
_OPT = {**_TEXT, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}
_MIXTRAL = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA = {k: _TEXT[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "use_cache")}
_GEMMA = {**_HEAD_DIM, "query_pre_attn_scalar": WIDTH // HEADS}

FAMILIES: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt2": _text("GPT2", _GPT2, "LMHeadModel"),
    "llama": _text("Llama", _GROUPED),
    "qwen3": _text("Qwen3", _HEAD_DIM),
    "mistral": _text("Mistral", _GROUPED),
    "gemma2": _text("Gemma2", _GEMMA),
    "phi": _text("Phi", _TEXT),
    "neox": _text("GPTNeoX", _TEXT),
    "opt": _text("OPT", _OPT),
    "bert": _text("Bert", _TEXT, "ForMaskedLM"),
    "roberta": _text("Roberta", {**_TEXT, "max_position_embeddings": 132}, "ForMaskedLM"),
    "deberta": _text("DebertaV2", _TEXT, "ForMaskedLM"),
    "t5": _t5,
    "bart": _bart,
    "whisper": _whisper,
    "vit": _image("ViT", _IMAGE),
    "swin": _image("Swin", _SWIN),
    "clip": _clip,
    "mixtral": _text("Mixtral", _MIXTRAL),
    "mamba": _text("Mamba", _MAMBA),
    "unet2d": _unet,
}
"""Builders of a model and its batch, on the CPU."""

CONVOLUTIONAL = frozenset({"clip", "mamba", "swin", "unet2d", "vit", "whisper"})
"""Families with convolutions. Without cuDNN, these take workspaces that a GPU does not."""

NAMESPACES = ("aten", "prims", "transformers")
"""Namespaces of operations: transformers has one of its own for mixtures of experts."""

DTYPES = ("float32", "bfloat16", "autocast")
"""Precisions: of the parameters, or float32 parameters under autocast to bfloat16."""


def build(
    family: str, dtype: str, device: str | torch.device = "cuda", seed: int = 0
) -> tuple[nn.Module, Batch]:
    """Return the model of a family in training mode and its batch, on `device`."""
    torch.manual_seed(seed)
    model, batch = FAMILIES[family]()
    parameter_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = model.to(device, parameter_dtype).train()
    moved = {
        name: value.to(device, parameter_dtype if value.is_floating_point() else None)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in batch.items()
    }
    return model, moved
