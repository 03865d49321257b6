"""Names and arguments as JSON has them, each with a definition of its own in a JSON schema.

Nothing but the generation of schemas uses these classes: `base` and `arguments` check names and
arguments faster than pydantic would.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from remat.documents.names import (
    IDENTIFIER_PATTERN,
    LITERAL_PATTERN,
    MAX_LITERAL_LENGTH,
    MAX_NAME_LENGTH,
    MAX_STRING_LENGTH,
    RESERVED_BY_FX,
    TARGET_PATTERN,
)

_Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]
_Text = Annotated[str, Field(max_length=MAX_STRING_LENGTH)]
_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_ConstantName = Annotated[str, Field(max_length=MAX_LITERAL_LENGTH, pattern=f"^{LITERAL_PATTERN}$")]


def _name_schema(reserved: Iterable[str]) -> dict[str, Any]:
    """Return the JSON schema of names that are not reserved."""
    return {"pattern": f"^({IDENTIFIER_PATTERN})$", "not": {"enum": sorted(reserved)}}


class Identifier(RootModel[_Name]):
    """The name of a tensor: a variable of generated code."""

    model_config = ConfigDict(json_schema_extra=_name_schema({*keyword.kwlist, *RESERVED_BY_FX}))


class Keyword(RootModel[_Name]):
    """The name of a keyword argument."""

    model_config = ConfigDict(json_schema_extra=_name_schema(keyword.kwlist))


class Target(RootModel[_Name]):
    """The name of an operation: namespace, operation and overload."""

    model_config = ConfigDict(json_schema_extra={"pattern": f"^{TARGET_PATTERN}$"})


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TensorArgument(_Form):
    """The tensor with this name."""

    ref: Identifier


class SpecialFloat(_Form):
    """A floating-point number that JSON cannot represent."""

    float: Literal["inf", "-inf", "nan"]


class Complex(_Form):
    """A complex number: its real and its imaginary part."""

    complex: Annotated[list[float | SpecialFloat], Field(min_length=2, max_length=2)]


class Dtype(_Form):
    """A torch.dtype, such as "float32"."""

    dtype: _ConstantName


class Device(_Form):
    """A torch.device, such as "cuda:0"."""

    device: _ConstantName


class Layout(_Form):
    """A torch.layout, such as "strided"."""

    layout: _ConstantName


class MemoryFormat(_Form):
    """A torch.memory_format, such as "channels_last"."""

    memory_format: _ConstantName


_Constant = Dtype | Device | Layout | MemoryFormat
_Leaf = bool | _Int64 | float | _Text | TensorArgument | SpecialFloat | Complex | _Constant | None


class Argument(RootModel[_Leaf | list["Argument"]]):
    """An argument of an operation."""


class Arguments(RootModel[list[Argument]]):
    """The positional arguments of an operation."""


class KeywordArguments(RootModel[dict[Keyword, Argument]]):
    """The keyword arguments of an operation."""
