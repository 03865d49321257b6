"""The options `split`, `outputs`, `offload` with `host_budget`, and `reserve`.

`outputs` says which of a step's outputs are in memory during the backward. The logits of a language
model are often its largest tensor. Most training loops only use the loss and release the logits
before the backward, so that a plan need not count them. A step that does not return them at all
need not even have them in one piece. The loss itself is always in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from remat.errors import BudgetError, RematError, similar_names_hint
from remat.limits.budget import Budget

SPLIT_AUTO = "auto"
"""The number of pieces is chosen with the plan; nothing is split where that saves no time."""

SPLIT_OFF = "off"
"""No operation is split."""

PIECES = (2, 4, 8, 16)
"""The numbers of pieces that are tried."""

MAX_PIECES = 1024


def pieces_to_try(split: object) -> tuple[int, ...]:
    """Return the numbers of pieces to try for a value of the option `split`: all of `PIECES` for
    "auto", none for "off" and 1.

    Raises ValueError for anything else than "auto", "off", and a number from 1 to 1,024.
    """
    if split == SPLIT_AUTO:
        return PIECES
    if split == SPLIT_OFF:
        return ()
    if isinstance(split, int) and not isinstance(split, bool) and 1 <= split <= MAX_PIECES:
        return () if split == 1 else (split,)
    near = similar_names_hint(split, (SPLIT_AUTO, SPLIT_OFF)) if isinstance(split, str) else ""
    raise ValueError(
        f"split is {split!r}{near}; it is {SPLIT_AUTO!r} for as many pieces as the plan needs, "
        f"{SPLIT_OFF!r} for none, or their number, up to {MAX_PIECES:,}"
    )


OUTPUTS_HELD = "held"
"""The caller references the outputs until the backward has ended."""

OUTPUTS_DROPPED = "dropped"
"""The caller releases all outputs but the loss before the backward."""

OUTPUTS_LOSS = "loss"
"""A training step returns only what gradients come from, and tensors of one element."""

OUTPUTS = (OUTPUTS_HELD, OUTPUTS_DROPPED, OUTPUTS_LOSS)


SCALARS = "scalars"
"""The value of `differentiate` for all outputs of one element that require a gradient. It is
internal: the meaning of "auto" with `outputs="loss"`."""

CRITERION = "criterion"
"""The value of `differentiate` for steps with `loss=`: the scalar output `loss`, else a scalar
first output, else every output that requires a gradient. It is internal, in place of "auto"."""


def differentiated_with(outputs: str, differentiate: str | Sequence[str]) -> str | Sequence[str]:
    """Return the option `differentiate` for a step with this option `outputs`: where only the loss
    is returned, "auto" is all scalars, not all outputs."""
    return SCALARS if outputs == OUTPUTS_LOSS and differentiate == "auto" else differentiate


def are_dropped(outputs: object) -> bool:
    """True if no output but the loss is in memory during the backward, False if `outputs` is
    "held". Raises ValueError for a value that is none of `OUTPUTS`."""
    if outputs not in OUTPUTS:
        near = similar_names_hint(outputs, OUTPUTS) if isinstance(outputs, str) else ""
        raise ValueError(
            f"outputs is {outputs!r}{near}; they are {OUTPUTS_HELD!r} if a variable references "
            f"them during the backward, {OUTPUTS_DROPPED!r} if only the loss is referenced, or "
            f"{OUTPUTS_LOSS!r} if the model is to return only the loss in training"
        )
    return outputs != OUTPUTS_HELD


OFFLOAD_AUTO = "auto"
"""Tensors are offloaded where that makes the step faster, or the budget feasible."""

OFFLOAD_OFF = "off"
"""No tensor is offloaded."""


def is_offload_allowed(offload: object) -> bool:
    """True if `offload` is "auto", False if it is "off". Raises ValueError for anything else."""
    if offload in (OFFLOAD_AUTO, OFFLOAD_OFF):
        return offload == OFFLOAD_AUTO
    names = (OFFLOAD_AUTO, OFFLOAD_OFF)
    near = similar_names_hint(offload, names, "; near: ") if isinstance(offload, str) else ""
    raise ValueError(
        f"offload is {offload!r}{near}; it is {OFFLOAD_AUTO!r} to copy tensors to the host where "
        f"that pays, or {OFFLOAD_OFF!r}"
    )


def parse_host_budget(host_budget: int | str | None) -> int | None:
    """Return the bytes that may be on the host at once; None for the default. Raises `BudgetError`
    unless it is a number of bytes, such as "16GiB"; 0 is valid."""
    if host_budget is None:
        return None
    return parse_bytes(host_budget, "host budget", "16GiB")


def parse_reserve(reserve: int | str) -> int:
    """Return the reserve in bytes. Raises `BudgetError` unless it is a number of bytes, such as
    "2GiB"."""
    return parse_bytes(reserve, "reserve", "2GiB")


def parse_bytes(size: int | str, name: str, example: str) -> int:
    """Return an option in bytes; 0 is valid, too. Raises `BudgetError` with the option's name and
    an example unless it is a number of bytes."""
    try:
        if (size_bytes := Budget.parse(size, may_be_zero=True).size_bytes) is not None:
            return size_bytes
    except BudgetError:
        pass
    raise BudgetError(
        f'the {name} {str(size)[:80]!r} is not a number of bytes; pass bytes, such as "{example}"'
    )


QUANTIZATIONS = ("nf4", "nf4-double", "fp4", "int8")
"""Values of the option `quantize`, by bitsandbytes; "nf4-double" has scales in 8 bits."""


def check_quantization(quantize: str) -> None:
    """Raise `RematError` for a quantization that is not in `QUANTIZATIONS`."""
    if quantize not in QUANTIZATIONS:
        raise RematError(
            f"quantize is {str(quantize)[:40]!r}; pass one of {', '.join(QUANTIZATIONS)}"
        )


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """LoRA adapters (Hu et al., 2021): two matrices of `rank` at each linear layer in `targets`,
    which are names of layers, or "all-linear"."""

    rank: int = 8
    targets: tuple[str, ...] = ("all-linear",)
    alpha: int = 16
    dropout: float = 0.0
    is_dora: bool = False

    @classmethod
    def parse(cls, text: str) -> LoraOptions:
        """Return the options that a text names, such as "r=16,targets=q_proj+v_proj,alpha=32".
        Raises `RematError`."""
        options: dict[str, object] = {}
        for part in text.split(","):
            name, _, value = (item.strip() for item in part.partition("="))
            try:
                match name:
                    case "r" | "alpha":
                        options["rank" if name == "r" else name] = _integer_in(value, 1, 65536)
                    case "targets":
                        names = tuple(filter(None, value.split("+"))) or _fail()
                        options["targets"] = names
                        if len(names) > 1 and "all-linear" in names:
                            _fail()
                    case "dropout":
                        options["dropout"] = float(value) if 0 <= float(value) < 1 else _fail()
                    case "dora":
                        options["is_dora"] = True if not value else _fail()
                    case _:
                        _fail()
            except ValueError:
                raise RematError(
                    f"{part[:40]!r} is not a valid option of LoRA: r and alpha are integers from 1 "
                    "to 65536, 0 <= dropout < 1, and dora takes no value; for example "
                    "r=16,targets=q_proj+v_proj,alpha=32"
                ) from None
        return cls(**options)  # type: ignore[arg-type]


def _integer_in(text: str, smallest: int, largest: int) -> int:
    number = int(text)
    return number if text.isascii() and smallest <= number <= largest else _fail()


def _fail() -> NoReturn:
    raise ValueError
