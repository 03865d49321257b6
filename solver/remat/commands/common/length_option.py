"""The option `--lengths`: lengths of batches, on the command line or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remat.commands.common.exits import UsageError
from remat.documents.base import parse_strict_json
from remat.errors import DocumentError, RematError
from remat.fitting.lengths import LengthDistribution

_MAX_DIGITS = 15

Lengths = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="LENGTHS",
        help="Lengths of batches, in tokens, instead of --tokens: 512,1024,2048, or with shares or "
        "counts 512:70,2048:30, or a .json file with a list or an object.",
        show_default=False,
    ),
]


def parse_lengths(text: str) -> LengthDistribution:
    """Return the distribution that `--lengths` describes. Raises `UsageError`."""
    try:
        if not text.endswith(".json"):
            return LengthDistribution.of(_parse_list(text))
        data = parse_strict_json(Path(text).expanduser().read_bytes(), "lengths")
        if isinstance(data, dict):
            pairs = [(_whole_number(length), weight) for length, weight in data.items()]
            if len(dict(pairs)) < len(pairs):
                raise RematError("a length occurs twice in the file, such as 512 and 0512")
            data = dict(pairs)
        return LengthDistribution.of(data)  # type: ignore[arg-type]  # it checks the type
    except OSError as error:
        raise UsageError(f"cannot read {text}, the file of --lengths: {error.strerror}") from None
    except (DocumentError, RematError) as error:
        raise UsageError(f"in --lengths, {error}") from None


def _parse_list(text: str) -> list[int] | dict[int, float]:
    """Return lengths, or a mapping if one of them has a share."""
    pairs = [part.partition(":") for part in text.split(",")]
    lengths = [_whole_number(length.strip()) for length, _, _ in pairs]
    if not any(colon for _, colon, _ in pairs):
        return lengths
    weights: dict[int, float] = {}
    for length, (part, colon, weight) in zip(lengths, pairs, strict=True):
        try:
            weights[length] = weights.get(length, 0.0) + float(weight)
        except ValueError:
            raise RematError(
                f"{(part + colon + weight)[:40]!r} has no number as its share; give each length "
                "one, as in 512:70,2048:30"
            ) from None
    return weights


def _whole_number(text: str) -> int:
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise RematError(f"{text[:40]!r} is not a number of tokens, such as 2048")
    return int(text)
