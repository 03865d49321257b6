"""What every JSON document of remat shares: versioning, strict validation, safe names, files.

Documents are data only: no pickle, no code. A name that ends up in generated source (fx turns
node names into Python) must be a plain identifier; see `check_variable`.
"""

from __future__ import annotations

import builtins
import gzip
import json
import keyword
import os
import re
import reprlib
import secrets
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    StringConstraints,
    ValidationError,
)
from pydantic_core import CoreSchema

from remat.errors import DocumentError

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
_TARGET = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*")

_OF_GENERATED_CODE = frozenset(dir(builtins)) | {
    *("self", "args_list", "args_iter"),
    *("torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree"),
}
"""Names that mean something else in the source that fx generates; fx itself never gives them."""

MAX_BYTES = 256 << 20
"""No document is larger; that of a model with a hundred layers takes about 10 MB."""

MAX_KEYS = 10_000
"""No object of a document has more keys."""

NAMESPACES = frozenset({"aten", "prims"})
"""The torch namespaces whose operations a document may name."""

_DAMAGED = "the document is damaged or was not written by remat"
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring = 2, 3, 3, 80


@lru_cache(maxsize=1 << 12)
def check_identifier(name: str) -> str:
    """`name` itself, if it may name a keyword argument in generated code."""
    reserved = keyword.iskeyword(name) or name.startswith("__")
    if reserved or not _IDENTIFIER.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not a plain identifier")
    return name


@lru_cache(maxsize=1 << 16)
def check_variable(name: str) -> str:
    """`name` itself, if it may become a variable of generated code."""
    if name in _OF_GENERATED_CODE:
        raise ValueError(
            f"{name!r} is not a plain identifier: generated code has another use of it"
        )
    return check_identifier(name)


@lru_cache(maxsize=1 << 12)
def check_target(target: str) -> str:
    """`target` itself, if it has the form `namespace.operation.overload`."""
    if len(target) > 200 or not _TARGET.fullmatch(target) or "__" in target.split(".")[0]:
        raise ValueError(f"{target[:80]!r} is not of the form namespace.operation.overload")
    return target


Identifier = Annotated[str, AfterValidator(check_variable)]
Target = Annotated[str, AfterValidator(check_target)]
Path_ = Annotated[str, StringConstraints(max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A dotted path that is only ever looked up or shown, never executed."""


def _fail_fast(schema: object) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("tuple", "list"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list):
        for part in schema:
            _fail_fast(part)


class Record(BaseModel):
    """A frozen, strictly validated piece of a document."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        """A list of a million wrong items would be reported as often: the first is enough."""
        schema = handler(source)
        _fail_fast(schema)
        return schema


class Document(Record):
    """A Record with `format` and `version` that knows how to travel as JSON text and as a file."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]

    format: str = ""
    version: int = 0

    def model_post_init(self, context: object, /) -> None:
        """Stamp documents that are made in process."""
        object.__setattr__(self, "format", self.format or self.FORMAT)
        object.__setattr__(self, "version", self.version or self.VERSION)

    def to_json(self) -> str:
        """JSON text; `from_json` gives back an equal document."""
        return self.model_dump_json(exclude_defaults=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read and validate. Raises `DocumentError` that names what is wrong."""
        header = parse_plain_json(text, cls.FORMAT)
        try:
            check_header(header, cls.FORMAT, cls.VERSION)
        except ValueError as error:
            raise DocumentError(str(error)) from None
        return validated(cls, text, cls.FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document; gzipped where the name ends in `.gz`. All or nothing."""
        write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a document from a file (gzipped or not). Raises `DocumentError`."""
        return cls.from_json(read_bytes(Path(path)))


R = TypeVar("R", bound=Record)


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside `path`, then rename: a reader never sees half a file."""
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        with beside.open("xb") as file:  # with the permissions of any new file
            file.write(data)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def read_bytes(path: Path) -> bytes:
    """The file's bytes, gunzipped where they are gzip. Raises `DocumentError`."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else path.open("rb") as file:
            return file.read(MAX_BYTES + 1)  # `from_json` refuses what is longer
    except (OSError, EOFError, zlib.error) as error:
        raise DocumentError(f"cannot read {path}: {error}") from None


def parse_plain_json(text: str | bytes, what: str) -> object:
    """JSON without tricks: not too long, not too deep, no key twice in an object.

    Raises `DocumentError` that says what is wrong with `what`.
    """
    if len(text) > MAX_BYTES:
        raise DocumentError(f"{what}: over {MAX_BYTES:,} bytes, too long to be a real document")
    try:
        return json.loads(text, object_pairs_hook=_plain_object)
    except RecursionError:
        raise DocumentError(f"{what}: nested too deeply to be a real document") from None
    except ValueError as error:
        raise DocumentError(
            f"this is no JSON document ({error}); expected a {what} document as written by "
            "remat, complete and as UTF-8 text"
        ) from None


def check_header(header: object, expected: str, version: int) -> None:
    """Raises ValueError where a parsed document is not of the expected format and version."""
    if not isinstance(header, dict) or header.get("format") != expected:
        found = header.get("format") if isinstance(header, dict) else type(header).__name__
        raise ValueError(f"expected a {expected} document, found {str(found)[:80]!r}")
    if header.get("version") != version:
        raise ValueError(
            f"this {expected} document has version {str(header.get('version'))[:20]}, this remat "
            f"reads version {version}: make it again with this remat, or use the one that wrote it"
        )


def validated(kind: type[R], text: str | bytes, what: str, remedy: str = _DAMAGED) -> R:
    """The record that the JSON text is. Raises `DocumentError` that names what is wrong."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise DocumentError(_explain(what, error, remedy)) from None
    except RecursionError:
        raise DocumentError(f"{what}: nested too deeply to be a real document") from None


def _plain_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuses duplicate keys, of which two readers of one text may see different ones."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has two values for one key")
    if len(found) > MAX_KEYS:
        raise ValueError(f"an object has {len(found)} keys")
    return found


def _explain(expected: str, error: ValidationError, remedy: str) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "document"
    more = error.error_count() - 1
    return (
        f"{expected}: {where[:200]}: {first['msg'][:300]} (found {_SHORT.repr(first.get('input'))})"
        + (f", and {more} more problems" if more else "")
        + f"; {remedy}"
    )
