"""Budgets as users write them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import remat
from remat.errors import BudgetError, InfeasibleBudget
from remat.fitting.question import parse_memory
from remat.graph import Graph, Operation, Value
from remat.limits.budget import Budget, is_auto
from remat.limits.limits import Limits
from remat.limits.options import parse_host_budget, parse_reserve
from remat.limits.units import format_bytes, format_seconds

BASELINE = 1_000_000
UNITS = {"B": 1, "kB": 10**3, "GB": 10**9, "KiB": 2**10, "TiB": 2**40}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (123, 123),
        (8e9, 8_000_000_000),
        (1.9, 1),
        ("123", 123),
        ("900_000", 900_000),
        ("1_500 kB", 1_500_000),
        ("8GiB", 8 * 2**30),
        ("7.5 GB", 7_500_000_000),
        ("512MiB", 512 * 2**20),
        ("1.5kib", 1536),
        (".5 kB", 500),
        ("+2. B", 2),
        ("  10 kB ", 10_000),
        ("0.7 TB", 700_000_000_000),
        ("60%", 600_000),
        ("33.3333%", 333_333),
        ("120%", 1_200_000),
        ("min", None),
        (" MIN ", None),
    ],
)
def test_budgets_are_parsed(budget: int | float | str, expected: int | None) -> None:
    parsed = Budget.parse(budget)
    assert parsed.in_bytes(BASELINE) == expected
    assert parsed.requested is budget
    assert parsed.is_min is (expected is None)
    is_share = isinstance(budget, str) and budget.endswith("%")
    assert parsed.size_bytes == (None if is_share else expected), "no baseline is needed"


@pytest.mark.parametrize("integer", [np.int64(200), np.uint8(200), np.int32(200)])
def test_integers_of_numpy_are_bytes(integer: Any) -> None:
    budget = Budget.parse(integer)
    assert budget == Budget.parse(200)
    assert type(budget.size_bytes) is type(budget.requested) is int


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (True, "bool"),
        (np.bool_(True), "bool"),
        ("_900", "not a quantity"),
        ("9__00", "not a quantity"),
        (None, "NoneType"),
        ([8], "list"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (0, "positive"),
        (-5, "positive"),
        (0.6, 'pass "60%"'),
        (10**100, "more than any memory"),
        ("0 GB", "positive"),
        ("-3 GiB", "positive"),
        ("0%", "positive"),
        ("-5%", "positive"),
        ("9" * 99 + "%", "less than 1e80 peaks"),
        ("nan", "not a quantity"),
        ("", "not a quantity"),
        ("8 gigs", "unknown unit 'gigs'"),
        ("1e9", "not a quantity"),
        ("8 Gi B", "not a quantity"),
        ("٣GiB", "not a quantity"),
        ("9" * 5000, "not a quantity"),
        ("auto", "remat.optimize"),
        (" Auto", "remat.optimize"),
    ],
    ids=lambda budget: repr(budget)[:20],
)
def test_invalid_budgets_are_refused_with_advice(budget: object, message: str) -> None:
    with pytest.raises(BudgetError, match=message) as refused:
        Budget.parse(budget)  # pyright: ignore[reportArgumentType]
    assert len(str(refused.value)) < 400


def test_a_share_of_less_than_a_byte_is_no_memory() -> None:
    """Only a step without memory fits it: any other says what it needs."""
    budget = Budget.parse("0.00001%")
    assert budget.in_bytes(10 * BASELINE) == 1
    assert budget.in_bytes(BASELINE) == 0
    operations = (Operation("f", (), (0,), 1.0), Operation("b", (0,), (1,), 1.0, backward=True))
    for size_bytes in (0, 8):
        graph = Graph(operations, (Value("v", size_bytes), Value("w", size_bytes)))
        if size_bytes:
            with pytest.raises(InfeasibleBudget) as refused:
                remat.solve(graph, "0.00001%")
            assert refused.value.min_feasible_bytes == 2 * size_bytes
        else:
            assert remat.solve(graph, "50%").peak_bytes == 0


@pytest.mark.parametrize(
    ("word", "expected"), [("auto", True), (" AUTO ", True), ("min", False), (8, False)]
)
def test_auto_means_the_free_memory(word: object, expected: bool) -> None:
    assert is_auto(word) is expected


AMOUNTS = st.decimals(min_value=1, max_value=10**6, places=3).map(str)


@hypothesis.given(
    st.integers(1, 10**90)
    | st.floats(1, 1e90)
    | st.builds(str.__add__, AMOUNTS, st.sampled_from([*UNITS, "%", " kib"]))
    | st.just("min")
)
def test_parsing_the_text_of_a_budget_gives_the_same_budget(written: int | float | str) -> None:
    budget = Budget.parse(written)
    reread = Budget.parse(budget.requested)
    assert reread == budget
    assert hash(reread) == hash(budget)
    assert Budget.parse(budget) is budget
    if budget.size_bytes is not None:
        assert Budget.parse(budget.size_bytes) == budget
        assert Budget.parse(f" {budget.size_bytes} B ") == budget


@hypothesis.given(st.text(max_size=8) | st.text("0123456789.+-%kKMGiBmn ", max_size=8))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        budget = Budget.parse(text)
    except BudgetError:
        return
    size = budget.in_bytes(10**15)
    assert budget.is_min if size is None else size >= 0


@hypothesis.given(
    AMOUNTS, st.sampled_from(sorted(UNITS)), st.integers(0, 10**12), st.integers(0, 10**12)
)
def test_bytes_are_exact_and_need_no_baseline(
    number: str, unit: str, baseline: int, library: int
) -> None:
    budget = Budget.parse(number + unit)
    assert budget.size_bytes == Fraction(number) * UNITS[unit] // 1
    assert budget.in_bytes(baseline, library) == budget.size_bytes


@hypothesis.given(AMOUNTS, st.integers(100, 10**18), st.integers(0, 10**18))
def test_a_percentage_excludes_memory_that_no_plan_changes(
    number: str, rest: int, library: int
) -> None:
    budget = Budget.parse(number + "%")
    assert budget.size_bytes is None
    assert not budget.is_min
    assert budget.in_bytes(library + rest, library) == library + Fraction(number) * rest // 100


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
def test_bytes_are_formatted(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_seconds_are_formatted() -> None:
    assert format_seconds(0) == "0 s"
    assert format_seconds(1.5) == "1.5 s"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(5e-9) == "5 ns"
    assert format_seconds(42e-6) == "42 µs"
    assert format_seconds(0.9999e-6) == "1 µs"
    assert format_seconds(0.99996) == "1 s"
    assert format_seconds(-1234.5) == "-1,234 s"


@pytest.mark.parametrize("size", [0, 0.0, "0", "0 GiB", " 0.0MB", "-0", np.int64(0)])
def test_an_option_in_bytes_may_be_zero_where_a_budget_may_not(size: Any) -> None:
    assert parse_reserve(size) == parse_host_budget(size) == 0
    for parse in (Budget.parse, parse_memory):
        with pytest.raises(BudgetError):
            parse(size)


@pytest.mark.parametrize(
    "size", [False, True, np.bool_(False), "0%", "-1", -1, "min", "0 gigs", 0.5]
)
def test_an_option_in_bytes_is_a_number_of_bytes(size: Any) -> None:
    for parse in (parse_reserve, parse_host_budget, parse_memory):
        with pytest.raises(BudgetError):
            parse(size)


@pytest.mark.parametrize(
    ("limits", "used"),
    [
        (Limits(Budget.parse(1000), excess_bytes=2048), "2.00 KiB are what the kernels of an"),
        (Limits(Budget.parse(1000), external_bytes=1024), "1.00 KiB are used outside this graph"),
        (
            Limits(Budget.parse(1000), 512, external_bytes=512, excess_bytes=2048),
            r"1.00 KiB are used outside this graph .* and 2.00 KiB are what the kernels of an",
        ),
    ],
)
def test_an_exhausted_budget_names_what_uses_it(limits: Limits, used: str) -> None:
    with pytest.raises(InfeasibleBudget, match=f"1,?000 B leaves nothing for the step: {used}"):
        limits.available_bytes(10_000)


def test_the_share_of_a_part_of_nothing_is_nothing() -> None:
    assert Limits(Budget.parse("60%")).share_bytes(0, 0) == 0
