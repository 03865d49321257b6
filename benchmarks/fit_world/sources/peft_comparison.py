"""PEFT's comparison of methods on an L40S: Llama 3.2 3B on MetaMathQA, and FLUX.2 klein on images.

Memory is what torch's allocator reserved, at most. The cache is emptied every 10 steps of the
language model. The lengths of its batches are not published: 710 tokens is the length at which the
prediction of "LoRA, rank 32" is 22.3 GB, as published, and that row is left out. Gradients of each
batch are in memory until the next one starts. FLUX.2 has checkpoints, and batches of two images of
512 by 512 pixels.
"""

from __future__ import annotations

from typing import Any

from benchmarks.fit_world.measurement import Loop, Measurement, Source

_URL = "https://github.com/huggingface/peft/tree/main/method_comparison/"
_TEXT = Source(
    "PEFT MetaMathQA", f"{_URL}MetaMathQA", "2026-07-16", "torch 2.13.0, transformers 5.13.1"
)
_IMAGES = Source(
    "PEFT image generation", f"{_URL}image-gen", "2026-06-09", "torch 2.12.0, diffusers 0.38.0"
)

LONGEST_TOKENS = 710
_LENGTHS = "lengths and their order, on which fragments of gradients depend, are not published"
_QV = ["q_proj", "v_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]
_FLUX = [
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"),
    *("to_add_out", "to_qkv_mlp_proj", "linear_in", "linear_out"),
]


def _text(name: str, published_bytes: int, adapter: Any = None, reason: str = "") -> Measurement:
    if adapter is not None:
        adapter = (adapter[0], {"task_type": "CAUSAL_LM"} | adapter[1])
    loop = Loop("llama-3.2-3b", 4, LONGEST_TOKENS, adapter=adapter, padded=True)
    return Measurement(_TEXT, name, "l40s", loop, published_bytes, "reserved", reason=reason)


def _images(name: str, published_bytes: int, adapter: Any = None, reason: str = "") -> Measurement:
    loop = Loop("flux.2-klein", 2, 1024, library="diffusers", checkpoint=True, adapter=adapter)
    return Measurement(_IMAGES, name, "l40s", loop, published_bytes, "reserved", reason=reason)


def _lora(rank: int, alpha: int, targets: list[str], **others: Any) -> Any:
    return "LoraConfig", {"r": rank, "lora_alpha": alpha, "target_modules": targets} | others


ROWS = (
    _text("full", 38_868_615_168, reason=_LENGTHS),
    _text("LoRA, rank 64", 22_552_772_608, _lora(64, 128, _QV)),
    _text("LoRA, rank 64, rsLoRA", 22_561_161_216, _lora(64, 64, _QV, use_rslora=True)),
    _text("LoRA of MLPs, rank 10", 24_698_159_104, _lora(10, 20, _MLP)),
    _text("DoRA, rank 32", 24_532_484_096, _lora(32, 64, _QV, use_dora=True)),
    _text(
        "IA3",
        23_234_347_008,
        (
            "IA3Config",
            {
                "target_modules": ["k_proj", "v_proj", "down_proj"],
                "feedforward_modules": ["down_proj"],
            },
        ),
    ),
    _text(
        "layer norms",
        21_181_235_200,
        (
            "LNTuningConfig",
            {"target_modules": ["input_layernorm", "post_attention_layernorm", "norm"]},
        ),
    ),
    _text("LoHa, rank 32", 23_907_532_800, ("LoHaConfig", {"r": 32, "target_modules": _QV})),
    _text("VeRA, rank 256", 21_621_637_120, ("VeraConfig", {"r": 256, "target_modules": _QV})),
    _text(
        "RandLoRA, rank 32",
        22_785_556_480,
        ("RandLoraConfig", {"r": 32, "randlora_alpha": 640, "target_modules": _QV}),
    ),
    _text("MiSS, rank 64", 20_271_071_232, ("MissConfig", {"r": 64, "target_modules": _QV})),
    _text("HiRA, rank 32", 23_597_154_304, ("HiraConfig", {"r": 32, "target_modules": _QV})),
    _text("DeLoRA, rank 32", 22_351_446_016, ("DeloraConfig", {"r": 32, "target_modules": _QV})),
    _images("full", 39_873_150_976),
    _images("LoRA, rank 32", 10_708_058_112, _lora(32, 32, _FLUX)),
    _images("LoRA, rank 64", 11_383_341_056, _lora(64, 64, _FLUX)),
    _images("DoRA, rank 64", 13_176_406_016, _lora(64, 64, _FLUX, use_dora=True)),
    _images(
        "layer norms", 9_609_150_464, ("LNTuningConfig", {"target_modules": ["norm_q", "norm_k"]})
    ),
    _images("LoHa, rank 32", 12_691_963_904, ("LoHaConfig", {"r": 32, "target_modules": _FLUX})),
    _images("MiSS, rank 32", 10_561_257_472, ("MissConfig", {"r": 32, "target_modules": _FLUX})),
)
