"""The published figures, their addresses, and what we assume where they leave something open."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.sources.models import (
    Step,
    gpt2_step,
    gpt2_xl_step,
    gptj_step,
    head_step,
    llama_7b_step,
    llama_lora_step,
    qwen3_8b_step,
)
from remat.costs.devices import DeviceSpec, find_device
from remat.limits.options import PIECES

READ_ON = "2026-11-27"

GB = 10**9
"""Published gigabytes are taken as decimal ones."""

GIB = 2**30

A100_40GB = replace(
    find_device("a100"), name="a100-40gb", bytes_per_s=1.555e12, memory_bytes=40 * GIB
)
"""NVIDIA A100 data sheet, June 2021: the rates of the A100 80GB, with 1,555 GB/s."""

Build = partial[Step]


@dataclass(frozen=True, slots=True)
class Source:
    """Where figures are from. Without an address they are quoted from a user's request, and we
    know no document that has them."""

    title: str
    address: str = ""
    read_on: str = ""


QUOTED = Source("quoted by a user")


@dataclass(frozen=True, slots=True)
class Point:
    """A published figure: the method, its peak, and its time in addition to eager mode's, as a
    share. `as_published` has the figures in the source's words where we converted them."""

    method: str
    peak_bytes: int | None
    extra: float | None = None
    as_published: str = ""


@dataclass(frozen=True)
class PublishedCase:
    """One published comparison, and the step with which we reproduce it.

    `build` returns the step for a size: the batch, or the context, as `size_unit` says. `size` is
    that of the published figures. Figures of the largest size are multiples of `size_step`; there
    are none if that is 0.
    """

    name: str
    title: str
    source: Source
    points: tuple[Point, ...]
    device: DeviceSpec
    traced_device: str
    build: Build = field(repr=False)
    size: int
    size_unit: str
    size_step: int
    optimizer: str
    assumptions: tuple[str, ...]
    pieces: tuple[int, ...] = PIECES
    has_blocks: bool = True
    offloaded_bytes: int = 0
    """Inputs of layers that the published method has on the host."""

    @property
    def fingerprint(self) -> str:
        """A digest of everything but the code of the model."""
        build = self.build
        described = f"{self} {build.func.__name__} {build.args} {build.keywords}"
        return hashlib.sha256(described.encode()).hexdigest()[:12]

    @property
    def checkpoint_bytes(self) -> int | None:
        """The published peak of full checkpointing, or of what takes the least memory."""
        sizes = [p.peak_bytes for p in self.points if p.peak_bytes is not None]
        return min(sizes, default=None)


TRL_5575 = Source("TRL pull request 5575", "https://github.com/huggingface/trl/pull/5575", READ_ON)
TRANSFORMERS_48444 = Source(
    "Transformers pull request 48444",
    "https://github.com/huggingface/transformers/pull/48444",
    READ_ON,
)

_BFLOAT16 = "parameters and gradients in bfloat16"
_TOKENS = "the number of tokens, so that the peaks of eager mode and of checkpoints are near theirs"
_4090 = "the GPU: an RTX 4090"
_HEAD_MODEL = (
    "the GPU: an H100",
    "shapes, which the text does not state: from the differences of the published bytes",
    "a product in float32 without TF32, and its loss, alone",
)


def _head(
    name: str, title: str, tokens: int, width: int, points: tuple[Point, ...]
) -> PublishedCase:
    """Return a case of the head of a language model with its loss."""
    return PublishedCase(
        name=name,
        title=f"head, {title}",
        source=TRL_5575,
        points=points,
        device=find_device("h100"),
        traced_device="h100",
        build=partial(head_step, width=width),
        size=tokens,
        size_unit="{:,} tokens",
        size_step=0,
        optimizer="none",
        assumptions=(*_HEAD_MODEL, f"{tokens:,} tokens, width {width:,}, vocabulary 151,936"),
        pieces=(*PIECES, 32, 64),
        has_blocks=False,
    )


def _chunked(
    whole_gb: float, whole_ms: float, chunked_gb: float, chunked_ms: float | None
) -> tuple[Point, ...]:
    extra = None if chunked_ms is None else chunked_ms / whole_ms - 1
    took = "" if chunked_ms is None else f", {chunked_ms:.0f} ms"
    return (
        Point("whole", int(whole_gb * GB), 0.0, f"{whole_gb} GB, {whole_ms:.0f} ms"),
        Point("chunks of 256", int(chunked_gb * GB), extra, f"{chunked_gb} GB{took}"),
    )


_CASES = (
    PublishedCase(
        name="llama-7b",
        title="LLaMA-7B on an A100 80GB",
        source=QUOTED,
        points=(
            Point("eager", 45 * GB, 0.0),
            Point("selective", 24 * GB, 1 / 0.85 - 1, "24 GB, throughput -15%"),
            Point("checkpoints", 18 * GB, 1 / 0.72 - 1, "18 GB, throughput -28%"),
        ),
        device=find_device("a100"),
        traced_device="a100",
        build=partial(llama_lora_step, tokens=1408),
        size=4,
        size_unit="{:,} x 1,408 tokens",
        size_step=1,
        optimizer="adamw",
        assumptions=(
            "LoRA (rank 16, of the query and value products) on frozen weights in bfloat16: 18 GB "
            "leave no room for 13.5 GB of gradients",
            _TOKENS,
        ),
    ),
    PublishedCase(
        name="125m",
        title="125M parameters, batch 32",
        source=QUOTED,
        points=(Point("eager", 16 * GB, 0.0), Point("checkpoints", 8 * GB, 0.30)),
        device=find_device("rtx4090"),
        traced_device="rtx4090",
        build=partial(gpt2_step, tokens=272),
        size=32,
        size_unit="{:,} x 272 tokens",
        size_step=1,
        optimizer="adamw",
        assumptions=("GPT-2 in float32 without TF32, with AdamW", _4090, _TOKENS),
    ),
    PublishedCase(
        name="1.5b",
        title="1.5B parameters, batch 16, on 24 GB",
        source=QUOTED,
        points=(
            Point("eager", None, None, "out of memory"),
            Point("checkpoints", 20 * GB, 0.35),
        ),
        device=find_device("rtx4090"),
        traced_device="rtx4090",
        build=partial(gpt2_xl_step, tokens=832),
        size=16,
        size_unit="{:,} x 832 tokens",
        size_step=1,
        optimizer="adamw",
        assumptions=(f"GPT-2 XL, {_BFLOAT16}, and the moments of AdamW too", _4090, _TOKENS),
    ),
    PublishedCase(
        name="6b",
        title="6B parameters, batch 8, on 40 GB",
        source=QUOTED,
        points=(
            Point("eager", None, None, "out of memory"),
            Point("checkpoints", 32 * GB, 0.40),
        ),
        device=A100_40GB,
        traced_device="a100",
        build=partial(gptj_step, tokens=1792),
        size=8,
        size_unit="{:,} x 1,792 tokens",
        size_step=1,
        optimizer="adafactor",
        assumptions=(
            f"GPT-J, {_BFLOAT16}, with Adafactor: AdamW needs more than 40 GB",
            "the GPU: an A100 40GB",
            _TOKENS,
        ),
    ),
    PublishedCase(
        name="7b-8k",
        title="7B parameters, 8k context",
        source=QUOTED,
        points=(Point("eager", 120 * GB, 0.0), Point("checkpoints", 35 * GB, 0.28)),
        device=find_device("h100"),
        traced_device="h100",
        build=partial(llama_7b_step, rows=2),
        size=8192,
        size_unit="2 x {:,} tokens",
        size_step=512,
        optimizer="none",
        assumptions=(
            f"LLaMA-7B, {_BFLOAT16}, a batch of 2, no state of an optimizer on the GPU",
            "the GPU: an H100",
        ),
    ),
    PublishedCase(
        name="qwen3-8b-128k",
        title="Qwen3-8B, 131,072 tokens",
        source=TRANSFORMERS_48444,
        points=(Point("checkpoints, offloaded inputs", None, None, "36 GB less"),),
        device=find_device("h100"),
        traced_device="h100",
        build=partial(qwen3_8b_step),
        size=131072,
        size_unit="1 x {:,} tokens",
        size_step=0,
        optimizer="none",
        assumptions=(
            f"{_BFLOAT16}, no state of an optimizer on the GPU",
            "a vocabulary of 1,024, since whole logits of 131,072 tokens take 80 GB in float32",
        ),
        offloaded_bytes=36 * GIB,
    ),
    _head("head-small", "small model", 4096, 1024, _chunked(8.29, 82, 2.07, 151)),
    _head(
        "head-small-long",
        "small model, long sequence",
        16384,
        1024,
        _chunked(30.25, 323, 2.14, 604),
    ),
    _head("head-medium", "medium model", 4096, 2560, _chunked(9.70, 193, 4.84, 337)),
    _head("head-big", "big model", 4096, 5120, _chunked(12.04, 376, 9.47, 658)),
)

CASES: dict[str, PublishedCase] = {case.name: case for case in _CASES}
"""The cases by name."""
