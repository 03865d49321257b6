"""Base classes of all JSON documents: versions, strict validation, types of fields, files.

Documents are data only: no pickle, no code. A range is part of a field's type, so the JSON schema
of a document has it, and pydantic checks it.
"""

from __future__ import annotations

import gzip
import json
import os
import reprlib
import secrets
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from remat.documents.names import check_identifier, check_target, check_variable
from remat.errors import DocumentError, wrong_type

MAX_BYTES = 256 << 20
"""Upper limit of a document's size. A model with a hundred layers takes about 10 MB."""

MAX_KEYS = 10_000
"""Upper limit of the number of keys in one JSON object of a document."""

NAMESPACES = frozenset({"aten", "prims"})
"""The torch namespaces whose operations a document may name."""

_DAMAGED = "the document is damaged or was not written by remat"
_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxlevel, _SHORT_REPR.maxdict, _SHORT_REPR.maxlist = 2, 3, 3
_SHORT_REPR.maxstring = 80


@dataclass(frozen=True, slots=True)
class DescribedBy:
    """Annotation of a field: its JSON schema is that of a class of `remat.documents.json_forms`,
    which is loaded for it."""

    form: str

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> dict[str, Any]:
        """Return a reference to the definition of the class."""
        from remat.documents import json_forms

        form = getattr(json_forms, self.form)
        described: Any = form.__pydantic_core_schema__
        if described["type"] != "definitions":
            name = f"{form.__module__}.{form.__qualname__}:{id(form)}"
            reference = core_schema.definition_reference_schema(name)
            definition = cast(CoreSchema, {**described, "ref": name})
            described = core_schema.definitions_schema(reference, [definition])
        return handler(described)


Keyword = Annotated[str, AfterValidator(check_identifier), DescribedBy("Keyword")]
"""The name of a keyword argument."""

Identifier = Annotated[str, AfterValidator(check_variable), DescribedBy("Identifier")]
"""The name of a tensor: a variable of generated code."""

Target = Annotated[str, AfterValidator(check_target), DescribedBy("Target")]
"""The name of an operation: namespace, operation and overload."""

DottedPath = Annotated[str, StringConstraints(max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A dotted path, such as a module's, which is looked up or displayed, but never executed."""


# -- numbers --------------------------------------------------------------------------------------

_LIMIT_BYTES = 2**62
"""Limit of the sizes in a graph: see `remat.graph`, which limits their sum."""

_LIMIT_S = 1e100
"""Limit of a cost, and the inverse of the smallest cost that is not zero: see `remat.graph`."""


def _check_cost(cost: float) -> float:
    """Return the cost. Raises ValueError if it is positive and too small for the solver."""
    if 0 < cost < 1 / _LIMIT_S:
        raise ValueError(f"costs are zero, or at least {1 / _LIMIT_S:g} s")
    return cost


Natural = Annotated[int, Field(ge=0)]
"""A whole number from zero."""

Int64 = Annotated[int, Field(ge=0, lt=2**63)]
"""A whole number from zero that a signed integer of 64 bits can hold."""

Size = Annotated[int, Field(ge=0, lt=_LIMIT_BYTES)]
"""A size in bytes."""

Amount = Annotated[float, Field(ge=0)]
"""A number from zero."""

Cost = Annotated[
    float,
    Field(ge=0, lt=_LIMIT_S),
    AfterValidator(_check_cost),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": 0},
                {"type": "number", "minimum": 1 / _LIMIT_S, "exclusiveMaximum": _LIMIT_S},
            ]
        }
    ),
]
"""The time of an operation in seconds."""


def _accept_whole_floats(schema: object) -> None:
    """Let every integer of a pydantic core schema accept a number such as 2.0 in JSON.

    JSON has one kind of number, and its schemas call 2.0 an integer, too. Values from Python code
    are not converted. An integer that may also be a float stays what it is.
    """
    if isinstance(schema, list):
        for part in schema:
            _accept_whole_floats(part)
    if not isinstance(schema, dict) or _is_converted_schema(schema):
        return
    for key, part in schema.items():
        if schema.get("type") == "union" and key == "choices" and _has_float_schema(part):
            continue
        if isinstance(part, dict) and part.get("type") == "int":
            schema[key] = _schema_with_whole_floats(part)
        elif isinstance(part, list):
            part[:] = [
                _schema_with_whole_floats(item) if _is_int_schema(item) else item for item in part
            ]
            _accept_whole_floats(part)
        else:
            _accept_whole_floats(part)


def _is_int_schema(schema: object) -> bool:
    """True if a pydantic core schema is the one of an integer."""
    return isinstance(schema, dict) and schema.get("type") == "int"


def _has_float_schema(choices: Any) -> bool:
    """True if one of the core schemas of a union is the one of a float."""
    return any(isinstance(choice, dict) and choice.get("type") == "float" for choice in choices)


def _is_converted_schema(schema: dict[str, Any]) -> bool:
    """True if a core schema is a result of `_schema_with_whole_floats`."""
    function = schema.get("function")
    return isinstance(function, dict) and function.get("function") is _to_whole_number


def _schema_with_whole_floats(schema: Any) -> Any:
    """Return the core schema, preceded by `_to_whole_number`."""
    return core_schema.with_info_before_validator_function(_to_whole_number, schema)


def _to_whole_number(value: object, info: ValidationInfo) -> object:
    """Return the integer that a float of a JSON document stands for; any other value unchanged."""
    if type(value) is float and info.mode == "json" and value.is_integer():
        return int(value)
    return value


# -- records and documents ------------------------------------------------------------------------


def _set_fail_fast(schema: object) -> None:
    """Let every list of a pydantic core schema stop at its first wrong item."""
    if isinstance(schema, dict):
        if schema.get("type") in ("tuple", "list"):
            schema["fail_fast"] = True
        for part in schema.values():
            _set_fail_fast(part)
    elif isinstance(schema, list):
        for part in schema:
            _set_fail_fast(part)


class Record(BaseModel):
    """A frozen, strictly validated piece of a document."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        """Report only the first wrong item of a list: there may be a million of them. Accept 2.0
        where an integer is expected, as JSON schemas do."""
        schema = handler(source)
        _set_fail_fast(schema)
        _accept_whole_floats(schema)
        return schema


class Document(Record):
    """A Record with `format` and `version`, which converts to JSON text and files, and back."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]

    format: str = ""
    version: int = 0

    def model_post_init(self, context: object, /) -> None:
        """Set `format` and `version` of documents that do not name them, such as documents that are
        created in Python."""
        for name, value in (("format", self.FORMAT), ("version", self.VERSION)):
            if name not in self.model_fields_set:
                object.__setattr__(self, name, value)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> dict[str, Any]:
        """Describe `format` and `version` as the constants that they are."""
        described = handler(schema)
        properties = handler.resolve_ref_schema(described)["properties"]
        for name, value in (("format", cls.FORMAT), ("version", cls.VERSION)):
            properties[name] |= {"const": value, "default": value}
        return described

    def __repr_args__(self) -> Iterator[tuple[str | None, object]]:
        """Yield what `repr` shows: some figures, because a document has thousands of parts."""
        yield "format", self.format
        yield "version", self.version

    def to_json(self) -> str:
        """Return the document as JSON text, from which `from_json` reads an equal document."""
        return self.model_dump_json(exclude_defaults=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read and validate JSON text. Raises `DocumentError`, which says what is wrong."""
        if not isinstance(text, str | bytes):
            remedy = f"pass the text, or {cls.__name__}.load(path)"
            raise wrong_type("from_json", "JSON text", text, remedy)
        header = parse_strict_json(text, cls.FORMAT)
        try:
            check_header(header, cls.FORMAT, cls.VERSION)
        except ValueError as error:
            raise DocumentError(str(error)) from None
        return validate_json(cls, text, cls.FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document to a file atomically; gzipped if the name ends in `.gz`."""
        write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a document from a file (gzipped or not). Raises `DocumentError`."""
        return cls.from_json(read_bytes(Path(path)))


R = TypeVar("R", bound=Record)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a temporary file next to `path`, then rename it: no reader sees a part of a file. The
    data is gzipped if the name ends in `.gz`."""
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:  # with the permissions of any new file
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file, decompressed if they are gzip: of a longer file, the first
    `MAX_BYTES` + 1, which `from_json` refuses. Raises `DocumentError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_gzip else path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DocumentError(f"cannot read {path}: {error}") from None


def parse_strict_json(text: str | bytes, document_name: str) -> object:
    """Return parsed JSON. Raises `DocumentError` for text that is no JSON, too long or nested too
    deeply, and for an object that has a key twice or over `MAX_KEYS` keys. Errors call the document
    `document_name`."""
    if len(text) > MAX_BYTES:
        raise DocumentError(
            f"{document_name}: over {MAX_BYTES:,} bytes, too long to be a real document"
        )
    try:
        return json.loads(text, object_pairs_hook=_object_without_duplicates)
    except RecursionError:
        raise DocumentError(f"{document_name}: nested too deeply to be a real document") from None
    except ValueError as error:
        raise DocumentError(
            f"this is no JSON document ({error}); expected a {document_name} document as written "
            "by remat, complete and as UTF-8 text"
        ) from None


def check_header(header: object, expected_format: str, version: int) -> None:
    """Raise ValueError if a parsed document does not have the expected format and version."""
    if not isinstance(header, dict) or header.get("format") != expected_format:
        actual = header.get("format") if isinstance(header, dict) else type(header).__name__
        raise ValueError(f"expected a {expected_format} document, found {str(actual)[:80]!r}")
    if header.get("version") != version:
        raise ValueError(
            f"this {expected_format} document has version {str(header.get('version'))[:20]}, this "
            f"remat reads version {version}: write it with this remat, or read it with the remat "
            "that wrote it"
        )


def validate_json(
    kind: type[R], text: str | bytes, document_name: str, remedy: str = _DAMAGED
) -> R:
    """Return the record of type `kind` in the JSON text. Raises `DocumentError`, which says what
    is wrong with `document_name`, and `remedy`: what to do about it."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise DocumentError(validation_text(document_name, error, remedy)) from None
    except RecursionError:
        raise DocumentError(f"{document_name}: nested too deeply to be a real document") from None


def _object_without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the object with these pairs. Raises ValueError for a duplicate key, because two JSON
    parsers may pick different values for it, and for more than `MAX_KEYS` keys."""
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        raise ValueError("an object has two values for one key")
    if len(parsed) > MAX_KEYS:
        raise ValueError(f"an object has {len(parsed)} keys")
    return parsed


def validation_text(document_name: str, error: ValidationError, remedy: str = _DAMAGED) -> str:
    """Describe the first problem of a failed validation, and count the others."""
    first = error.errors(include_url=False, include_context=False)[0]
    field_path = ".".join(str(part) for part in first["loc"]) or "document"
    others = error.error_count() - 1
    return (
        f"{document_name}: {field_path[:200]}: {first['msg'][:300]} "
        f"(found {_SHORT_REPR.repr(first.get('input'))})"
        + (f", and {others} more problems" if others else "")
        + f"; {remedy}"
    )
