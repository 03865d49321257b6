"""Sebastian Raschka's scripts on memory: ViT-L/16 of torchvision on images of 224 by 224 pixels.

Memory is what torch's allocator has reserved, in units of 1e9 bytes, with Adam unless the row says
otherwise. The GPU is not named. The loop calls `zero_grad()` between forward and backward, so that
the gradients of a step are in memory during the forward of the next one.
"""

from __future__ import annotations

from benchmarks.fit_world.measurement import Loop, Measurement, Source

_SOURCE = Source(
    "pytorch-memory-optim",
    "https://github.com/rasbt/pytorch-memory-optim/blob/main/logs.md",
    "2023-06-30",
    "torch 2.1.0.dev20230623",
)


def _row(
    name: str,
    published_gb: float,
    batch: int = 64,
    *,
    dtype: str = "float32",
    autocast: str = "",
    optimizer: str = "adam",
    accumulate: int = 1,
    reason: str = "",
) -> Measurement:
    loop = Loop(
        "vit_l_16",
        batch,
        197,
        library="torchvision",
        dtype=dtype,
        autocast=autocast,
        optimizer=optimizer,
        fit={"accumulate": accumulate, "outputs": "held", "keeps_gradients": True},
    )
    published_bytes = round(published_gb * 1e9)
    return Measurement(
        _SOURCE, name, "a100", loop, published_bytes, "reserved", 5_000_000, reason=reason
    )


ROWS = (
    _row("float32", 26.79),
    _row("float16, mixed", 18.21, autocast="float16"),
    _row("bfloat16", 13.82, dtype="bfloat16"),
    _row("bfloat16, batch 16", 5.69, 16, dtype="bfloat16"),
    _row(
        "bfloat16, 4 batches of 4",
        3.91,
        4,
        dtype="bfloat16",
        accumulate=4,
        reason="Adam of this torch allocated its denominators in addition, 0.6 GB",
    ),
    _row("bfloat16, SGD, 4 batches of 4", 2.02, 4, dtype="bfloat16", accumulate=4, optimizer="sgd"),
)
