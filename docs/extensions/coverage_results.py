"""Tables of Transformers' architectures: which train under `remat.enable`, and how."""

from __future__ import annotations

from collections import Counter
from typing import Any

from measured import Table, load

_KINDS = {
    "causal": "causal language models",
    "seq2seq": "sequence to sequence",
    "masked": "masked language models",
    "image": "image classification",
}
_NOT_EAGER = "not in eager mode"


def coverage() -> Table:
    """Return the number of architectures of each kind by way of planning and error of gradients."""
    rows: list[tuple[str, ...]] = []
    kinds = {row["kind"] for row in load("coverage-cpu")["rows"]}
    for kind, words in _KINDS.items():
        if kind in kinds:
            rows.append(
                (words, *_counts([r for r in _trained() if r["kind"] == kind]))
            )
    rows.append(("all", *_counts(_trained())))
    header = (
        "architectures", "train in eager mode", "planned whole", "by blocks", "nothing planned",
        "refused or failed", "gradients bit for bit", "within 1e-5", "others",
    )  # fmt: skip
    return Table(("coverage-cpu",), header, tuple(rows))


def coverage_left() -> Table:
    """Return the models that are not planned as a whole, with their parts in eager mode."""
    rows = [
        (row["kind"], row["model"], row.get("planned", row["outcome"]), _left(row))
        for row in _trained()
        if row.get("planned") != "whole" or row["outcome"] not in ("equal", "close")
    ]
    header = ("kind", "model", "planned", "left to eager mode, or what was raised")
    return Table(("coverage-cpu",), header, tuple(rows))


def _trained() -> list[dict[str, Any]]:
    return [r for r in load("coverage-cpu")["rows"] if r["outcome"] != _NOT_EAGER]


def _counts(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    planned = Counter(row.get("planned", "no") for row in rows)
    outcomes = Counter(row["outcome"] for row in rows)
    counts = (
        len(rows), planned["whole"], planned["blocks"], planned["nothing"], planned["no"],
        outcomes["equal"], outcomes["close"], outcomes["wrong"],
    )  # fmt: skip
    return tuple(map(str, counts))


def _left(row: dict[str, Any]) -> str:
    if "left" not in row:
        return row["why"][:120] or f"off by {row['error']:.0e}"
    return ", ".join(row["left"]) or "nothing inside of blocks"
