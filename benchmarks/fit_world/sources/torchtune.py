"""Tables of torchtune: Llama 3.2 3B with one technique after the other, and LoRA of Llama 3.1 8B.

Packed batches of 2 sequences in bfloat16. Memory is the peak of active bytes
(`torch.cuda.memory_stats()["active_bytes.all.peak"]`), in GiB. Rows with torch.compile,
activation offloading or a baseline whose lengths vary are left out.
"""

from __future__ import annotations

from benchmarks.fit_world.measurement import Loop, Measurement, Source

_SOURCE = Source(
    "torchtune", "https://github.com/pytorch/torchtune#optimization-flags", "2024-12", "torch 2.5"
)

ROWS = (
    Measurement(
        _SOURCE,
        "Llama 3.2 3B, full, packed",
        "a100",
        Loop(
            "llama3_2.llama3_2_3b",
            2,
            4096,
            library="torchtune",
            optimizer="adamw",
            fit={"outputs": "held"},
        ),
        round(60.0 * 2**30),
        "allocated",
        round(0.05 * 2**30),
    ),
)
