"""What a `Trace` is made of: tensors, placeholders, operations, outputs, surroundings."""

from __future__ import annotations

from math import prod
from typing import Literal, Self

from pydantic import Field, model_validator

from remat.documents.arguments import Args, Kwargs
from remat.documents.base import Identifier, Path_, Record, Target

_MAX_DIMENSIONS = 64
"""As in torch."""


class TensorMeta(Record):
    """What the guards and the cost model know of a tensor. `stride` and `offset` in elements."""

    dtype: str = Field(max_length=40)
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = Field(default=0, ge=0)
    device: str = Field(max_length=40)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.shape) != len(self.stride) or min((*self.shape, *self.stride), default=0) < 0:
            raise ValueError("a tensor needs as many strides as sizes, and none below zero")
        if len(self.shape) > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor has up to {_MAX_DIMENSIONS} dimensions")
        if max(prod(self.shape), self.offset, *self.stride) >= 2**63:
            raise ValueError("a tensor's elements, strides and offset are below 2**63")
        return self


class Result(Record):
    """A named tensor that an operation returns; it lives in `Trace.storages[storage]`."""

    name: Identifier
    tensor: TensorMeta
    storage: int
    position: int = -1
    """Which element of the operation's tuple it is; -1 where the operation returns one tensor."""


class Placeholder(Record):
    """A tensor that exists before the step: what it is, and where to find it.

    `target` is a parameter's or buffer's name in the model, the number of an input's leaf, the
    number of the output whose gradient a tangent is, or "" for a constant, whose bytes are `data`.
    `aliases` are other names of the same parameter (tied weights).
    """

    name: Identifier
    kind: Literal["parameter", "buffer", "input", "tangent", "constant"]
    target: Path_
    tensor: TensorMeta
    storage: int
    requires_grad: bool = False
    aliases: tuple[Path_, ...] = ()
    data: str = Field(default="", max_length=2_000_000)


class Node(Record):
    """One operation, or one view (all of whose results look into storages that exist already)."""

    name: Identifier
    target: Target
    args: Args = ()
    kwargs: Kwargs = Field(default_factory=dict)
    results: tuple[Result, ...] = ()
    view: bool = False
    backward: bool = False
    seeded: bool = False
    """Draws random numbers: its generator state is replayed when it runs again."""
    recomputable: bool = True
    module: Path_ = ""
    cost_s: float | None = Field(default=None, ge=0)
    launch_s: float | None = Field(default=None, ge=0)
    """Of an accelerator: what the CPU takes to launch it, while the device is busy with others."""
    workspace_bytes: int | None = Field(default=None, ge=0)
    cost_source: str = Field(default="", max_length=100)


class Output(Record):
    """A tensor that the model returns. `tangent` names the placeholder of its gradient, or is ""
    where the step does not differentiate it."""

    name: Identifier
    differentiable: bool
    tangent: str = ""


class Gradient(Record):
    """The gradient of a placeholder: the tensor that holds it."""

    placeholder: Identifier
    name: Identifier


class Environment(Record):
    """What the capture assumed of its surroundings; checked again at each call."""

    torch: str = Field(max_length=100)
    training: bool
    training_exceptions: tuple[Path_, ...] = ()
    """Modules whose `training` flag differs from the model's own."""
    autocast: tuple[str, ...] = ()
    """Enabled autocast modes, as "cpu:bfloat16"."""
    frees_tangents: bool = False
    """Whether this torch lets a backward free the gradients that it was given (2.13 does)."""
