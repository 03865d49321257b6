"""Places of copies: when each starts and ends, by the times of operations and the bandwidth.

The copy to the host starts right behind the producer, and ends at the first point of the schedule
where it will be complete. The copy back starts as late as it can and still end in time, or right
behind that point.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from remat.costs.devices import Link
from remat.errors import RematError
from remat.passes.offload.candidates import Candidate

HANDLE_BYTES = 8
"""The bytes of a handle, the number of a slot on the host. It is in the memory of the CPU."""


class CopyPlaces(NamedTuple):
    """Where a tensor's copies start and end: indices of operations, in which the forward comes
    first.

    The tensor is result number `result` of the operation `producer`. Its memory is free after the
    operation `released`; the copy back starts before `start`, and has ended before `needed`.
    """

    producer: int
    result: int
    released: int
    start: int
    needed: int


class TimedOperation(NamedTuple):
    """An operation of the step with its seconds."""

    name: str
    cost_s: float


@dataclass(frozen=True, slots=True)
class HostStay:
    """A tensor that is on the host for a part of the step.

    It has left the device before the operation `gone_by` runs, and starts to come back at the
    operation `away_until` or later; "" leaves this to the times of the copies. It is back before
    the operation `needed_by` of the backward, or before the reader that ends its idle span if that
    is earlier or `needed_by` is "": recomputations may read it before. A tensor of the forward that
    the backward does not read requires it.
    """

    tensor: str
    gone_by: str = ""
    away_until: str = ""
    needed_by: str = ""


def copy_places(
    operations: Sequence[TimedOperation],
    first_backward: int,
    candidates: Iterable[Candidate],
    stays: Iterable[HostStay],
    link: Link,
    recomputed_s: Mapping[str, float],
) -> Iterator[CopyPlaces]:
    """Yield the places of the copies of these stays, those that are needed last first.

    The forward comes first; the backward starts at the index `first_backward`. `recomputed_s` are
    seconds of recomputation that are expected before operations. A tensor that is needed before its
    copy to the host has ended stays on the device. Raises `RematError` for a tensor that is none of
    the `candidates`, or that nothing needs, and `KeyError` for an unknown operation.
    """
    by_name = {candidate.tensor: candidate for candidate in candidates}
    index = {operation.name: i for i, operation in enumerate(operations)}
    absences = {stay.tensor: _absence(stay, by_name, index) for stay in stays}
    end_s = [*accumulate(o.cost_s + recomputed_s.get(o.name, 0.0) for o in operations)]
    return _places(end_s, first_backward, list(absences.values()), link)


def _absence(
    stay: HostStay, by_name: Mapping[str, Candidate], index: Mapping[str, int]
) -> _Absence:
    if stay.tensor not in by_name:
        raise RematError(
            f"{stay.tensor} cannot be offloaded: it is an input, an output or a gradient, is "
            "written over, or does not fill its storage"
        )
    candidate = by_name[stay.tensor]
    needs = [index[stay.needed_by]] if stay.needed_by else []
    if candidate.idle.next_reader is not None:
        needs.append(candidate.idle.next_reader)
    if not needs:
        raise RematError(
            f"{stay.tensor} cannot be offloaded: no operation of the backward reads it, and "
            "nothing says before which operation a recomputation does; set needed_by"
        )
    gone = index[stay.gone_by] if stay.gone_by else None
    until = index[stay.away_until] if stay.away_until else 0
    return _Absence(candidate, gone, until, min(needs))


class _Absence(NamedTuple):
    """A tensor to offload, with the operations before which it has left, at which it may start to
    come back, and before which it is back."""

    candidate: Candidate
    gone: int | None
    until: int
    needed: int


def _places(
    end_s: Sequence[float], first_backward: int, absences: list[_Absence], link: Link
) -> Iterator[CopyPlaces]:
    """Yield the places of the copies of each tensor, those that are needed last first. `end_s` are
    the seconds at which operations end."""
    released: dict[str, int] = {}  # the operation after which the memory is free
    free_s = 0.0
    for candidate, gone, _, needed in sorted(absences, key=lambda a: a.candidate.producer):
        copied_s = max(free_s, end_s[candidate.producer])
        copied_s += candidate.size_bytes / link.to_host_bytes_per_s
        index = bisect_left(end_s, copied_s)
        if gone is not None:
            index = min(index, gone - 1)
        index = max(index, candidate.idle.last_use)
        if index < needed - 1:
            released[candidate.tensor] = index
            free_s = copied_s
    next_start_s = end_s[-1]
    for candidate, _, until, needed in sorted(absences, key=lambda a: -a.needed):
        if candidate.tensor not in released or needed < first_backward:
            continue
        needed_s = min(next_start_s, end_s[needed - 1])
        start_s = needed_s - candidate.size_bytes / link.to_device_bytes_per_s
        start = bisect_right(end_s, start_s)  # starts at or before start_s
        start = max(start, released[candidate.tensor] + 1, first_backward, until)
        start = min(start, needed)
        if start > released[candidate.tensor]:
            next_start_s = start_s
            yield CopyPlaces(
                candidate.producer, candidate.result, released[candidate.tensor], start, needed
            )
