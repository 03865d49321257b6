"""What a checkpointed block saves: against every set that could be saved."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.blockwise import saving
from remat.blockwise.policies import BlockPolicy, Policies
from remat.blockwise.saving import Candidate, selections
from remat.errors import DocumentError


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    count = draw(st.integers(1, 7))
    drawing = sorted(draw(st.sets(st.integers(0, count - 1), max_size=3)))
    pairs = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))))
    return [
        Candidate(
            time_s=draw(st.integers(1, 50)) * 1e-4,
            size_bytes=draw(st.integers(0, 40)) << 10,
            needs=tuple(i for i in drawing if number in drawing and i > number),
            excludes=tuple(b for a, b in pairs if a == number != b),
        )
        for number in range(count)
    ]


def is_allowed(chosen: frozenset[int], found: list[Candidate]) -> bool:
    return all(
        set(found[n].needs) <= chosen and chosen.isdisjoint(found[n].excludes) for n in chosen
    )


@settings(max_examples=30, deadline=None)
@given(candidates())
def test_no_set_of_candidates_saves_more_time_in_the_same_room(found: list[Candidate]) -> None:
    everything = [
        frozenset(own)
        for size in range(len(found) + 1)
        for own in combinations(range(len(found)), size)
    ]
    allowed = [own for own in everything if is_allowed(own, found)]
    total_bytes = sum(c.size_bytes for c in found)

    def saved_s(own: frozenset[int]) -> float:
        return sum(found[n].time_s for n in own)

    def held_bytes(own: frozenset[int]) -> int:
        return sum(found[n].size_bytes for n in own)

    told = selections(found)
    assert all(own in allowed for own in told)
    assert len(set(told)) == len(told)
    for share in saving._SHARES:
        room_bytes = share * total_bytes
        best_s = max(saved_s(own) for own in allowed if held_bytes(own) <= room_bytes)
        reached_s = max((saved_s(o) for o in told if held_bytes(o) <= room_bytes), default=0.0)
        assert reached_s >= best_s * (1 - 2 * saving._GAP) - 1e-12


def document(**more: object) -> Policies:
    blocks = (
        BlockPolicy(block="l.0", how="selective", operators={"aten.mm.default": (0, 2)}),
        BlockPolicy(block="l.1", how="selective", operators={"aten.mm.default": (0, 2)}),
        BlockPolicy(block="l.2", how="as it is"),
    )
    numbers = {"budget_bytes": 90, "peak_bytes": 80, "baseline_bytes": 160}
    times = {"time_s": 1.5, "baseline_time_s": 1.0}
    return Policies.model_validate({"blocks": blocks, **numbers, **times, **more})


def test_policies_travel_as_json_and_print_a_table(tmp_path: object) -> None:
    found = document(optimum_overhead=0.25)
    assert Policies.from_json(found.to_json()) == found
    text = str(found)
    assert "50.0% of 160 B without recomputation" in text
    assert "+50% over 1 s (timed as they ran)\nfreely  +25% within that peak" in text
    assert "l.0 to l.1  selective  mm 0+2" in text
    assert found.of("l.2") == found.blocks[2]
    assert found.of("l.3") is None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ('"rules":"regions"', "l.0 has what rules of operators say, which its policy rules out"),
        ('"rules":"everything"', "rules"),
        ('"peak_bytes":-1', "peak_bytes"),
    ],
)
def test_documents_that_say_other_things_are_refused(wrong: str, told: str) -> None:
    text = document().to_json()
    key = wrong.partition(":")[0]
    start = text.index(key)
    end = min(i for i in (text.find(",", start), text.find("}", start)) if i > 0)
    with pytest.raises(DocumentError, match=told):
        Policies.from_json(text[:start] + wrong + text[end:])


def test_two_policies_for_a_block_are_refused() -> None:
    text = document().to_json().replace("l.1", "l.0")
    with pytest.raises(DocumentError, match="two policies are for the same block"):
        Policies.from_json(text)
