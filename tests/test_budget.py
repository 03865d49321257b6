"""Budgets as people write them."""

from __future__ import annotations

import pytest

from remat.budget import format_bytes, format_seconds, parse_budget
from remat.errors import BudgetError

BASELINE = 1_000_000


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (123, 123),
        (8e9, 8_000_000_000),
        ("123", 123),
        ("8GiB", 8 * 2**30),
        ("7.5 GB", 7_500_000_000),
        ("512MiB", 512 * 2**20),
        ("1.5kib", 1536),
        ("  10 kB ", 10_000),
        ("0.7 TB", 700_000_000_000),
        ("60%", 600_000),
        ("33.3333%", 333_333),
        ("120%", 1_200_000),
        ("min", "min"),
        (" MIN ", "min"),
    ],
)
def test_budgets_are_read(budget: int | float | str, expected: int | str) -> None:
    assert parse_budget(budget, baseline_bytes=BASELINE) == expected


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (True, "bool"),
        (None, "NoneType"),
        ([8], "list"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (0, "positive"),
        (-5, "positive"),
        (0.6, 'pass "60%"'),
        ("0 GB", "positive"),
        ("-3 GiB", "positive"),
        ("nan", "not a quantity"),
        ("", "not a quantity"),
        ("8 gigs", "unknown unit 'gigs'"),
        ("1e9", "not a quantity"),
        ("8 Gi B", "not a quantity"),
        ("0.00001%", "positive"),
        ("auto", "remat.optimize"),
    ],
)
def test_the_rest_is_refused_with_advice(budget: object, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        parse_budget(budget, baseline_bytes=BASELINE)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (8 * 2**30, "8.00 GiB"),
        (-(2**20), "-1.00 MiB"),
        (700 * 2**20, "700 MiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes_are_written(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_seconds_are_written() -> None:
    assert format_seconds(0) == "0 s"
    assert format_seconds(1.5) == "1.5 s"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(5e-9) == "5 ns"
    assert format_seconds(42e-6) == "42 µs"
    assert format_seconds(0.9999e-6) == "1 µs"
    assert format_seconds(0.99996) == "1 s"
    assert format_seconds(-1234.5) == "-1,234 s"
