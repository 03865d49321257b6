"""`Measurement`: one published row, with the training loop that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Measured = Literal["allocated", "reserved", "driver"]
"""`torch.cuda.max_memory_allocated`, `max_memory_reserved`, or what the driver reports for the
process (nvidia-smi, NVML)."""

Extras = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """Where rows were published. `date` is that of the figures as far as it is known, and `code`
    the versions that produced them."""

    name: str
    url: str
    date: str
    code: str = ""


@dataclass(frozen=True)
class Loop:
    """A training loop.

    `model` is the name of a configuration in the `library`. `options` are further arguments of the
    configuration. `dtype` is that of the weights, and `autocast` that of mixed precision. `adapter`
    is the name of a configuration class of PEFT with its arguments, and `quantize` the format of
    the frozen weights. With `padded` there is a mask of padding. `loss` is that of transformers
    before 4.50, which copies the shifted logits: "shifted" in float32, "shifted, logits replaced"
    where the float32 logits replace those in half precision, and "shifted, half" without float32.
    `fit` are arguments of `remat.fit`.
    """

    model: str
    batch: int
    tokens: int
    library: str = "transformers"
    options: Extras = field(default_factory=dict)
    dtype: str = "bfloat16"
    autocast: str = ""
    optimizer: str = "adamw"
    checkpoint: bool = False
    padded: bool = False
    adapter: tuple[str, Extras] | None = None
    quantize: str = ""
    loss: str = ""
    gpus: int = 1
    fit: Extras = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """A published row. `rounding_bytes` is half a unit of the last published digit.
    `other_bytes` are bytes in the published figure that the source itself reports apart, such as
    the context of CUDA. `reason` says why a prediction is more than 5% off: a fact about the
    source."""

    source: Source
    name: str
    gpu: str
    loop: Loop
    published_bytes: int
    measured: Measured
    rounding_bytes: int = 0
    other_bytes: int = 0
    needs: tuple[str, ...] = ()
    reason: str = ""

    @property
    def key(self) -> str:
        """A name that identifies the row."""
        return f"{self.source.name}: {self.name}"

    @property
    def compared_bytes(self) -> int:
        """The published bytes that a prediction is compared with."""
        return self.published_bytes - self.other_bytes
