"""Offload tensors: when their copies start and end, by the times of operations and the bandwidth.

The copy to the host starts right behind the producer, and ends at the first point of the schedule
where it will be complete. The copy back starts as late as it can and still end in time, or right
behind that point.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from remat.costs.link import Link
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.passes.offload.candidates import Candidate, offload_candidates
from remat.passes.offload.copies_in_trace import CopyPlaces, forward_first, insert_copies


@dataclass(frozen=True, slots=True)
class HostStay:
    """A tensor that is on the host for a part of the step.

    It has left the device before the operation `gone_by` runs, and starts to come back at the
    operation `away_until` or later; "" leaves this to the times of the copies. It is back before
    the operation `needed_by` of the backward, or before its first reader there if that is earlier
    or `needed_by` is "": recomputations may read it before. A tensor that the backward
    does not read requires it.
    """

    tensor: str
    gone_by: str = ""
    away_until: str = ""
    needed_by: str = ""


def offload_tensors(
    trace: Trace,
    stays: Iterable[HostStay],
    link: Link,
    recomputed_s: Mapping[str, float] = MappingProxyType({}),
) -> Trace:
    """Return the trace in which these tensors are offloaded; the costs of its operations decide
    where copies start and end.

    `recomputed_s` are seconds of recomputation that are expected before operations. A tensor that
    is needed before its copy to the host has ended stays on the device. Raises `RematError` for a
    tensor that is not one of `offload_candidates(trace)`, or that nothing needs, and `KeyError` for
    an unknown operation.
    """
    trace = forward_first(trace)
    by_name = {candidate.tensor: candidate for candidate in offload_candidates(trace)}
    index = {node.name: i for i, node in enumerate(trace.nodes)}
    absences: dict[str, _Absence] = {}
    for stay in stays:
        if stay.tensor not in by_name:
            raise RematError(
                f"{stay.tensor} cannot be offloaded: it is an input, an output or a gradient, is "
                "written over, or does not fill its storage"
            )
        candidate = by_name[stay.tensor]
        needs = [index[stay.needed_by]] if stay.needed_by else []
        if candidate.first_backward_reader is not None:
            needs.append(candidate.first_backward_reader)
        if not needs:
            raise RematError(
                f"{stay.tensor} cannot be offloaded: no operation of the backward reads it, and "
                "nothing says before which operation a recomputation does; set needed_by"
            )
        needed = min(needs)
        gone = index[stay.gone_by] if stay.gone_by else None
        until = index[stay.away_until] if stay.away_until else 0
        absences[stay.tensor] = _Absence(candidate, gone, until, needed)
    places = _places(trace, list(absences.values()), link, recomputed_s)
    return insert_copies(trace, places)


class _Absence(NamedTuple):
    """A tensor to offload, with the nodes before which it has left, at which it may start to come
    back, and before which it is back."""

    candidate: Candidate
    gone: int | None
    until: int
    needed: int


def _places(
    trace: Trace, absences: list[_Absence], link: Link, recomputed_s: Mapping[str, float]
) -> Iterator[CopyPlaces]:
    """Yield the places of the copies of each tensor, those that are needed last first."""
    first_backward = next(i for i, n in enumerate(trace.nodes) if n.backward)
    costs = (
        (0.0 if node.view else node.cost_s or 0.0) + recomputed_s.get(node.name, 0.0)
        for node in trace.nodes
    )
    end_s = list(accumulate(costs))
    released: dict[str, int] = {}  # the node after which the memory is free
    free_s = 0.0
    for candidate, gone, _, needed in sorted(absences, key=lambda a: a.candidate.producer):
        copied_s = max(free_s, end_s[candidate.producer])
        copied_s += candidate.size_bytes / link.to_host_bytes_per_s
        index = bisect_left(end_s, copied_s)
        if gone is not None:
            index = min(index, gone - 1)
        index = max(index, candidate.last_forward_reader)
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
