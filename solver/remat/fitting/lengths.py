"""The longest sequences that fit, where batches have several lengths.

The memory of a step grows with the length of its sequences, so a binary search over the lengths
traces few of them: nothing is interpolated.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import SupportsIndex

from remat.errors import RematError
from remat.fitting.answer import find_options, search_options
from remat.fitting.question import FitQuestion
from remat.report.fit import ExcludedOption, Fit, FitOption, LongestFit

_LARGEST = 10**15
"""The largest length, and the largest count of batches, that is taken for one."""

_EXAMPLES = "[512, 1024, 2048] or {512: 0.7, 2048: 0.3}"


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lengths of batches in ascending order, and the share of batches of each length."""

    lengths: tuple[int, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, lengths: Sequence[int] | Mapping[int, float]) -> LengthDistribution:
        """Return the distribution of a list, in which a length may occur several times, or of a
        mapping from lengths to shares or counts. Raises `RematError`."""
        if isinstance(lengths, str) or not isinstance(lengths, (Sequence, Mapping)) or not lengths:
            raise RematError(
                f"the lengths are {str(lengths)[:80]!r}; pass a list or a mapping to shares or "
                f"counts, such as {_EXAMPLES}"
            )
        pairs = lengths.items() if isinstance(lengths, Mapping) else ((n, 1) for n in lengths)
        weights: Counter[int] = Counter()
        for length, weight in pairs:
            _check_length_and_share(length, weight)
            weights[operator.index(length)] += weight  # type: ignore[assignment]  # a float
        total = math.fsum(weights.values())
        if total <= 0:
            raise RematError("all lengths have a share of 0; pass shares or counts above 0")
        ascending = sorted(length for length, weight in weights.items() if weight)
        return cls(tuple(ascending), tuple(weights[length] / total for length in ascending))

    @property
    def longest(self) -> int:
        """The longest length."""
        return self.lengths[-1]

    @property
    def weights(self) -> dict[int, float]:
        """The share of each length."""
        return dict(zip(self.lengths, self.shares, strict=True))

    def fit(self, option: str, count: int) -> LongestFit:
        """Return a `LongestFit` that says that the first `count` lengths fit with an option; 0 for
        none."""
        share = math.fsum(self.shares[:count])
        return LongestFit(option, self.lengths[count - 1] if count else None, min(1.0, share))


def _check_length_and_share(length: object, weight: object) -> None:
    """Raise `RematError` unless a length and its share, or count, are numbers in their ranges."""
    if (
        isinstance(length, bool)
        or not isinstance(length, SupportsIndex)
        or not 1 <= operator.index(length) <= _LARGEST
    ):
        raise RematError(
            f"the length {str(length)[:40]} is not a number of tokens: pass integers from 1 on, "
            f"such as {_EXAMPLES}"
        )
    if (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or not 0 <= weight <= _LARGEST
    ):
        raise RematError(
            f"the share of the length {length} is {repr(weight)[:40]}; pass a share or a count "
            f"from 0 to {_LARGEST:g}"
        )


def longest_fits(
    distribution: LengthDistribution,
    answer: Fit,
    question_of_length: Callable[[int], FitQuestion],
) -> tuple[LongestFit, ...]:
    """Return the longest length that fits in eager mode and, if others are longer, with an option
    on one device. `answer` is for the longest length, and `question_of_length` returns the question
    for a length."""
    lengths = distribution.lengths
    if answer.fits:
        return (distribution.fit("", len(lengths)),)
    question = cache(question_of_length)

    def is_eager(length: int) -> bool:
        step = question(length).step
        return question(length).is_usable(step.memory(question(length).optimizer))

    eager_count = _count_of_fitting_lengths(is_eager, lengths[:-1])
    eager = distribution.fit("", eager_count)
    best = next((o for o in answer.options if _is_on_one_device(o)), None)
    if best is not None:
        return eager, distribution.fit(best.name, len(lengths))
    more = _count_of_fitting_lengths(
        lambda n: _has_fitting_option(question(n)), lengths[eager_count:-1]
    )
    if not more:
        return (eager,)
    count = eager_count + more
    options, _ = find_options(question(lengths[count - 1]))
    best = next((o for o in options if _is_on_one_device(o)), None)
    # A solve within a time limit may miss the plan that an earlier one has.
    return (eager,) if best is None else (eager, distribution.fit(best.name, count))


def _count_of_fitting_lengths(is_true: Callable[[int], bool], lengths: Sequence[int]) -> int:
    """Return how many of the lengths, in ascending order, satisfy a predicate. It must hold for all
    up to some length, and for none above."""
    return bisect_left(lengths, True, key=lambda length: not is_true(length))


def _has_fitting_option(question: FitQuestion) -> bool:
    """True if the loop fits on one device with an option; those that take no solver are tried
    first."""
    return any(_is_on_one_device(option) for _, option in search_options(question))


def _is_on_one_device(option: FitOption | ExcludedOption) -> bool:
    return isinstance(option, FitOption) and option.fits and option.gpus == 1
