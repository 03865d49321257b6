"""How the lifetimes of one value's copies change when a reader or a copy is added or removed.

`copies` are the slots that produce the value, `readers` those that read it, both sorted. A copy
lives from the slot that produces it to its last reader before the next copy. Each function appends
the changes to `spans`, as (first slot, slot after the last, additional bytes). Not for results,
whose first copy lives to the end.
"""

from __future__ import annotations

from bisect import bisect_left

Span = tuple[int, int, float]


def last_reader(copies: list[int], readers: list[int], copy: int, removed: int = -1) -> int:
    """Return the slot of the last reader of a copy, not counting the one in slot `removed`; the
    copy's own slot if nothing reads it. `copy` is its index."""
    last = (bisect_left(readers, copies[copy + 1]) if copy + 1 < len(copies) else len(readers)) - 1
    if last >= 0 and readers[last] == removed:
        last -= 1
    return max(copies[copy], readers[last]) if last >= 0 else copies[copy]


def add_reader(
    size: float,
    copies: list[int],
    readers: list[int],
    slot: int,
    spans: list[Span],
    removed: int = -1,
) -> None:
    """Add a reader; the one in slot `removed` no longer counts."""
    end = last_reader(copies, readers, bisect_left(copies, slot) - 1, removed)
    if slot > end:
        spans.append((end + 1, slot + 1, size))


def remove_reader(
    size: float, copies: list[int], readers: list[int], slot: int, spans: list[Span]
) -> None:
    """Remove a reader."""
    copy = bisect_left(copies, slot) - 1
    if last_reader(copies, readers, copy) == slot:
        spans.append((last_reader(copies, readers, copy, slot) + 1, slot + 1, -size))


def add_copy(
    size: float, copies: list[int], readers: list[int], slot: int, spans: list[Span]
) -> None:
    """Add a copy produced in `slot`, which takes over the readers up to the next copy."""
    copy = bisect_left(copies, slot) - 1
    if copy < 0:
        last = bisect_left(readers, copies[0]) - 1
        end = max(slot, readers[last]) if last >= 0 else slot
        spans.append((slot, end + 1, size))
        return
    if last_reader(copies, readers, copy) <= slot:
        spans.append((slot, slot + 1, size))
        return
    last = bisect_left(readers, slot) - 1
    trimmed = max(copies[copy], readers[last]) if last >= 0 else copies[copy]
    spans.append((trimmed + 1, slot, -size))


def remove_copy(
    size: float, copies: list[int], readers: list[int], slot: int, spans: list[Span]
) -> None:
    """Remove one copy of several. Its readers take the copy before it; those of the first copy,
    which have none, must get one next."""
    copy = bisect_left(copies, slot)
    end = last_reader(copies, readers, copy)
    if copy == 0:
        spans.append((slot, end + 1, -size))
    elif end == slot:
        spans.append((slot, slot + 1, -size))
    else:
        spans.append((last_reader(copies, readers, copy - 1) + 1, slot, size))
