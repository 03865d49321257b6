"""The guide to efficient training of transformers (2022): BERT large, sequences of 512 tokens, on a
V100 with 16 GB.

Memory is what NVML reports when training has ended, so what torch has reserved, with a context of
CUDA of 1,343 MiB, which the guide measured apart. The optimizer is transformers' own AdamW of
those days, one parameter after the other, and `zero_grad()` of torch 1.10 kept the gradients.
"""

from __future__ import annotations

from typing import Any

from benchmarks.fit_world.measurement import Loop, Measurement, Source

_SOURCE = Source(
    "transformers guide",
    "https://huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one",
    "2022-01-11",
    "torch 1.10, transformers 4.19",
)
_MIB = 2**20
_CONTEXT_BYTES = 1343 * _MIB
_SOFTMAX = "softmax of torch 1.10 saved its input as well, 64 MiB in each of 24 layers at batch 4"
_ADAMW = "adamw-plain"


def _row(
    name: str,
    published_mib: int,
    *,
    batch: int = 4,
    optimizer: str = _ADAMW,
    autocast: str = "",
    checkpoint: bool = False,
) -> Measurement:
    options: dict[str, Any] = {"head": "SequenceClassification", "attn_implementation": "eager"}
    loop = Loop(
        "bert-large",
        batch,
        512,
        options=options,
        dtype="float32",
        autocast=autocast,
        optimizer=optimizer,
        checkpoint=checkpoint,
        fit={"accumulate": 4 // batch, "keeps_gradients": True},
    )
    return Measurement(
        _SOURCE,
        name,
        "v100-16gb",
        loop,
        published_mib * _MIB,
        "driver",
        _MIB // 2,
        other_bytes=_CONTEXT_BYTES,
        reason="" if checkpoint else _SOFTMAX,
    )


ROWS = (
    _row("batch 4", 14949),
    _row("4 batches of 1", 8681, batch=1),
    _row("4 batches of 1, checkpoints", 6775, batch=1, checkpoint=True),
    _row("batch 4, float16", 13939, autocast="float16"),
    _row(
        "4 batches of 1, checkpoints, float16", 7275, batch=1, checkpoint=True, autocast="float16"
    ),
    _row("batch 4, Adafactor", 12295, optimizer="adafactor-transformers"),
    _row(
        "4 batches of 1, checkpoints, float16, Adafactor",
        4847,
        batch=1,
        checkpoint=True,
        autocast="float16",
        optimizer="adafactor-transformers",
    ),
    _row("batch 4, Adam in 8 bits", 13085, optimizer="adamw-8bit"),
    _row(
        "4 batches of 1, checkpoints, float16, Adam in 8 bits",
        5363,
        batch=1,
        checkpoint=True,
        autocast="float16",
        optimizer="adamw-8bit",
    ),
)
