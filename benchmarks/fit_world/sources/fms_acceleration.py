"""Benchmarks of fms-acceleration on A100 GPUs: full fine-tuning, LoRA and QLoRA, on one GPU and on
two with FSDP.

Alpaca, packed to 4,096 tokens (2,048 for SantaCoder), flash attention, checkpoints of each block,
AdamW of transformers' `Trainer`. QLoRA is "accelerated-peft-bnb": scales in 8 bits, and no other
parameters in float32. Memory is `torch.cuda.max_memory_allocated`, of the first rank.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.fit_world.measurement import Loop, Measurement, Source

_SOURCE = Source(
    "fms-acceleration",
    "https://github.com/foundation-model-stack/fms-acceleration/tree/main/scripts/benchmarks/refs",
    "2025-02-07",
    "torch 2.4.1, transformers 4.48.1, peft 0.13.2, trl 0.13.0, bitsandbytes 0.43.3",
)
_GRANITE = replace(_SOURCE, date="2024-11-14")

_LORA = (
    "LoraConfig",
    {
        "r": 16,
        "lora_alpha": 16,
        "lora_dropout": 0.1,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "task_type": "CAUSAL_LM",
    },
)
_LOSSES = {"santacoder": "shifted, half", "powerlm-3b": "shifted, logits replaced"}
"""GPTBigCode of transformers 4.48 computed its loss in half precision, and Granite of 4.45 in its
forward."""
_FSDP = {"gpus": 2, "shard": "full"}


def _row(
    model: str,
    method: str,
    batch: int,
    published_bytes: int,
    *,
    gpus: int = 1,
    source: Source = _SOURCE,
    reason: str = "",
) -> Measurement:
    is_adapter = method != "full"
    loop = Loop(
        model,
        batch,
        2048 if model == "santacoder" else 4096,
        adapter=_LORA if is_adapter else None,
        quantize="nf4-double" if method == "QLoRA" else "",
        autocast="bfloat16" if method == "QLoRA" else "",
        checkpoint=True,
        loss=_LOSSES.get(model, "shifted"),
        gpus=gpus,
        fit=_FSDP if gpus > 1 else {},
    )
    name = f"{model}, {method}, batch {batch}" + (f", {gpus} GPUs" if gpus > 1 else "")
    return Measurement(source, name, "a100", loop, published_bytes, "allocated", reason=reason)


ROWS = (
    _row("santacoder", "full", 4, 11_267_745_280),
    _row("santacoder", "full", 8, 15_193_274_880),
    _row("mistral-7b", "full", 4, 72_434_837_504),
    _row("mistral-7b", "full", 8, 72_435_230_720),
    _row("mistral-7b", "LoRA", 4, 26_704_571_904),
    _row("mistral-7b", "LoRA", 8, 38_742_912_512),
    _row("mistral-7b", "QLoRA", 4, 16_373_838_336),
    _row("mistral-7b", "QLoRA", 8, 28_412_178_944),
    _row("powerlm-3b", "full", 4, 35_134_836_736, source=_GRANITE),
    _row("powerlm-3b", "full", 8, 47_059_390_976, source=_GRANITE),
    _row("powerlm-3b", "LoRA", 4, 20_169_870_848, source=_GRANITE),
    _row("powerlm-3b", "LoRA", 8, 33_152_880_128, source=_GRANITE),
    _row("powerlm-3b", "QLoRA", 4, 15_151_677_952, source=_GRANITE),
    _row("powerlm-3b", "QLoRA", 8, 28_134_687_232, source=_GRANITE),
    _row("santacoder", "full", 2, 5_716_304_896, gpus=2),
    _row("santacoder", "full", 4, 7_819_433_984, gpus=2),
    _row("mistral-7b", "full", 2, 36_225_939_968, gpus=2),
    _row("mistral-7b", "full", 4, 36_226_136_576, gpus=2),
    _row("mistral-7b", "LoRA", 2, 15_144_870_400, gpus=2),
    _row("mistral-7b", "LoRA", 4, 21_959_827_968, gpus=2),
    _row("powerlm-3b", "full", 2, 17_626_672_128, gpus=2, source=_GRANITE),
    _row("powerlm-3b", "full", 4, 23_781_051_904, gpus=2, source=_GRANITE),
    _row("powerlm-3b", "LoRA", 2, 10_321_519_104, gpus=2, source=_GRANITE),
    _row("powerlm-3b", "LoRA", 4, 16_819_665_408, gpus=2, source=_GRANITE),
)
