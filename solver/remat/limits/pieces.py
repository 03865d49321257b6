"""The option `split`: into how many pieces operations may be split."""

from __future__ import annotations

from remat.errors import similar_names_hint

SPLIT_AUTO = "auto"
"""The number of pieces is chosen with the plan; nothing is split where that saves no time."""

SPLIT_OFF = "off"
"""No operation is split."""

PIECES = (2, 4, 8, 16)
"""The numbers of pieces that are tried."""

MAX_PIECES = 1024


def pieces_to_try(split: object) -> tuple[int, ...]:
    """Return the numbers of pieces to try for a value of the option: none for "off" and 1.

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
