"""How the lives of one value's copies change when a reader or a maker comes or goes.

`own` are the slots that make the value, `readers` those that read it, both sorted. A copy lives
from the slot that makes it to its last reader before the next copy. Each function appends what
changes to `spans`, as (first slot, slot after the last, bytes more). Not for results, whose first
copy lives for ever.
"""

from __future__ import annotations

from bisect import bisect_left

Span = tuple[int, int, float]


def last_read(own: list[int], readers: list[int], k: int, gone: int = -1) -> int:
    """The last reader of copy `k` other than that in `gone`, or the slot that makes the copy."""
    last = (bisect_left(readers, own[k + 1]) if k + 1 < len(own) else len(readers)) - 1
    if last >= 0 and readers[last] == gone:
        last -= 1
    return max(own[k], readers[last]) if last >= 0 else own[k]


def read(
    size: float,
    own: list[int],
    readers: list[int],
    slot: int,
    spans: list[Span],
    gone: int = -1,
) -> None:
    """One reader more; that in `gone` counts no more."""
    end = last_read(own, readers, bisect_left(own, slot) - 1, gone)
    if slot > end:
        spans.append((end + 1, slot + 1, size))


def unread(size: float, own: list[int], readers: list[int], slot: int, spans: list[Span]) -> None:
    """One reader less."""
    k = bisect_left(own, slot) - 1
    if last_read(own, readers, k) == slot:
        spans.append((last_read(own, readers, k, slot) + 1, slot + 1, -size))


def make(size: float, own: list[int], readers: list[int], slot: int, spans: list[Span]) -> None:
    """One copy more, made in `slot`; it takes over the readers up to the next."""
    k = bisect_left(own, slot) - 1
    if k < 0:
        last = bisect_left(readers, own[0]) - 1
        end = max(slot, readers[last]) if last >= 0 else slot
        spans.append((slot, end + 1, size))
        return
    if last_read(own, readers, k) <= slot:
        spans.append((slot, slot + 1, size))
        return
    last = bisect_left(readers, slot) - 1
    trimmed = max(own[k], readers[last]) if last >= 0 else own[k]
    spans.append((trimmed + 1, slot, -size))


def unmake(size: float, own: list[int], readers: list[int], slot: int, spans: list[Span]) -> None:
    """One copy less of several. Its readers take the one before; those of the first copy, which
    have none, are about to get one."""
    k = bisect_left(own, slot)
    end = last_read(own, readers, k)
    if k == 0:
        spans.append((slot, end + 1, -size))
    elif end == slot:
        spans.append((slot, slot + 1, -size))
    else:
        spans.append((last_read(own, readers, k - 1) + 1, slot, size))
