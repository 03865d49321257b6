"""The records of a `Trace`: tensors, placeholders, operations, outputs, gradients, environment."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from remat.documents.arguments import Args, Kwargs, referenced_names, rename_refs
from remat.documents.base import Cost, DottedPath, Identifier, Int64, Natural, Record, Size, Target
from remat.documents.structure import MAX_DEPTH, Structure
from remat.graph import Baseline, Split

_Sizes = Annotated[tuple[Int64, ...], Field(max_length=64)]
"""A number for each dimension of a tensor, of which torch allows 64."""


class TensorMeta(Record):
    """A tensor's dtype, shape, strides and device, for guards and cost models. `stride` and
    `offset` count elements."""

    dtype: str = Field(max_length=40)
    shape: _Sizes
    stride: _Sizes
    offset: Int64 = 0
    device: str = Field(max_length=40)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.shape) != len(self.stride):
            raise ValueError("a tensor needs as many strides as sizes")
        if prod(self.shape) >= 2**63:
            raise ValueError("a tensor has less than 2**63 elements")
        return self

    def is_row_major(self) -> bool:
        """True if the elements begin at the start of the storage and follow in the order of their
        indices, without gaps."""
        dense = [prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        strides = zip(self.shape, self.stride, dense, strict=True)
        return not self.offset and all(stride == d for size, stride, d in strides if size > 1)


class Result(Record):
    """A named tensor that an operation returns. `storage` is an index of `Trace.storage_bytes`."""

    name: Identifier
    tensor: TensorMeta
    storage: Natural
    position: int = -1
    """Its index in the tuple that the operation returns; -1 if the operation returns one tensor."""


class Placeholder(Record):
    """A graph input: a tensor that exists before the step, or, for a tangent, before the backward.

    `target` depends on the kind. It is the name of a parameter or buffer in the model, the leaf
    number of an input, or, for a tangent, the index of the output whose gradient it is. It is ""
    for a constant, whose bytes are `data`. `aliases` are other names of the same parameter (tied
    weights).
    """

    name: Identifier
    kind: Literal["parameter", "buffer", "input", "tangent", "constant"]
    target: DottedPath
    tensor: TensorMeta
    storage: Natural
    requires_grad: bool = False
    aliases: tuple[DottedPath, ...] = ()
    data: str = Field(default="", max_length=2_000_000)


class Node(Record):
    """One call of the graph: an operation, or, if `view` is true, a call all of whose results are
    views of existing storages."""

    name: Identifier
    target: Target
    args: Args = ()
    kwargs: Kwargs = Field(default_factory=dict)
    results: tuple[Result, ...] = ()
    view: bool = False
    backward: bool = False
    random: bool = False
    """True if it samples from a generator, whose state is replayed when it is recomputed."""
    recomputable: bool = True
    module: DottedPath = ""
    checkpoint: Natural = 0
    """The number of the call of `torch.utils.checkpoint` in the model's code that runs it, from 1;
    0 if none does. Only predictions of eager mode read it; plans do not."""
    is_saved: bool = False
    """True if that checkpoint, a selective one, saves its results."""
    frees: tuple[Identifier, ...] = ()
    """The tensors that eager mode frees after it, although it does not read them: local variables
    of the model's code hold them, or autograd. Only predictions of eager mode read it."""
    piece_of: DottedPath = ""
    """The operation before the split of which this is, or belongs to, one piece."""
    piece: Natural = 0
    """The index of the piece, from 0."""
    cost_s: Cost | None = None
    launch_s: float | None = Field(default=None, ge=0)
    """CPU time to launch it on an accelerator that is busy with other operations."""
    workspace_bytes: Size | None = None
    cost_source: str = Field(default="", max_length=100)

    @cached_property
    def operand_names(self) -> tuple[str, ...]:
        """The names of the tensors among its arguments."""
        return tuple(referenced_names((self.args, *self.kwargs.values())))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed, and the operand names of its arguments."""
        copied = super().model_copy(update=update, deep=deep)
        if update and not update.keys().isdisjoint(("args", "kwargs")):
            vars(copied).pop("operand_names", None)
        return copied

    def with_operands(self, names: Mapping[str, str], **changes: Any) -> Self:
        """Return a copy that reads other tensors: `names` has new names by the names until now.
        `changes` are changes of other fields."""

        def new_name(name: str) -> str:
            return names.get(name, name)

        arguments = {
            "args": tuple(rename_refs(item, new_name) for item in self.args),
            "kwargs": {key: rename_refs(item, new_name) for key, item in self.kwargs.items()},
        }
        return self.model_copy(update=arguments | changes)


class Output(Record):
    """An output tensor of the step. `tangent` is the name of its gradient's placeholder, or "" if
    the step does not differentiate it. `is_stored` is True if the model does not return this tensor
    but only stores it (`Store`)."""

    name: Identifier
    differentiable: bool
    tangent: str = ""
    is_stored: bool = False


class Store(Record):
    """A value that each call of the model stores in an attribute of a module, or in a list or dict
    among its arguments.

    `place` is where. For an attribute, it is the path of a module, then names of attributes and
    keys of containers; for an argument, it is the keys below the pair (args, kwargs). The leaves of
    `value` are outputs, or inputs of the step (kind "input"). With `is_content`, the container at
    `place` stays the same object and gets the content of `value`.
    """

    kind: Literal["attribute", "argument"]
    place: Annotated[tuple[str | int, ...], Field(max_length=2 * MAX_DEPTH)]
    value: Structure
    is_content: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "attribute" and len(self.place) < 2:
            raise ValueError("a stored value needs a module and the name of an attribute")
        if any(isinstance(s, str) and s.startswith("__") for s in self.place):
            raise ValueError("a stored value must not be in a name with two leading underscores")
        return self


class Gradient(Record):
    """The gradient of a placeholder, in the tensor `name`.

    `sources` are indices of the outputs that depend on the placeholder. If none of these outputs
    gets a gradient, the placeholder gets none. () means unknown, as in documents of earlier
    versions.
    """

    placeholder: Identifier
    name: Identifier
    sources: tuple[Natural, ...] = ()


class SplitRecord(Record):
    """The JSON form of a `remat.graph.Split`."""

    seed: Identifier
    first_dimension: Natural
    dimension_count: Annotated[int, Field(ge=1, le=64)]
    rows: Natural
    pieces: Annotated[int, Field(ge=2)]
    module: DottedPath = ""
    split_bytes: Size
    with_previous: bool = False

    def to_split(self) -> Split:
        """Return the split."""
        return Split(**dict(self))


class BaselineRecord(Record):
    """The JSON form of a `remat.graph.Baseline`."""

    peak_bytes: Size
    time_s: Cost

    def to_baseline(self) -> Baseline:
        """Return the peak and time."""
        return Baseline(**dict(self))


class Environment(Record):
    """The torch version and modes that the capture assumed; guards check them at each call."""

    torch: str = Field(max_length=100)
    training: bool
    training_exceptions: tuple[DottedPath, ...] = ()
    """Modules whose `training` flag differs from the model's."""
    autocast: tuple[str, ...] = ()
    """Enabled autocast modes, such as "cpu:bfloat16"."""
    frees_tangents: bool = False
    """True if this torch lets a backward free the tangents that it receives (2.13 does)."""
