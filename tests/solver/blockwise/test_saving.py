"""The tensors that a checkpointed block saves, compared with every possible set."""

from __future__ import annotations

from itertools import combinations

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from remat.blockwise import choose
from remat.blockwise.choose import SaveCandidate, selections_to_save
from remat.blockwise.policies import BlockPolicy, Policies
from remat.errors import DocumentError


@st.composite
def candidates(draw_from: st.DrawFn) -> list[SaveCandidate]:
    count = draw_from(st.integers(1, 7))
    drawing = sorted(draw_from(st.sets(st.integers(0, count - 1), max_size=3)))
    pairs = draw_from(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))))
    return [
        SaveCandidate(
            time_s=draw_from(st.integers(1, 50)) * 1e-4,
            size_bytes=draw_from(st.integers(0, 40)) << 10,
            needs=tuple(i for i in drawing if number in drawing and i > number),
            excludes=tuple(b for a, b in pairs if a == number != b),
        )
        for number in range(count)
    ]


def is_allowed(chosen: frozenset[int], save_candidates: list[SaveCandidate]) -> bool:
    return all(
        set(save_candidates[n].needs) <= chosen and chosen.isdisjoint(save_candidates[n].excludes)
        for n in chosen
    )


# 70% of 90 KiB are a whole number of bytes, which three of the four take.
EXACT_SHARE = [
    SaveCandidate(time_s, kib << 10)
    for time_s, kib in ((1e-4, 10), (1e-4, 27), (2e-4, 40), (1e-4, 13))
]


@settings(max_examples=30, deadline=None)
@hypothesis.given(candidates())
@hypothesis.example(EXACT_SHARE)
def test_no_other_subset_saves_more_time_in_the_same_bytes(
    save_candidates: list[SaveCandidate],
) -> None:
    everything = [
        frozenset(subset)
        for size in range(len(save_candidates) + 1)
        for subset in combinations(range(len(save_candidates)), size)
    ]
    allowed = [subset for subset in everything if is_allowed(subset, save_candidates)]
    total_bytes = sum(c.size_bytes for c in save_candidates)

    def saved_s(subset: frozenset[int]) -> float:
        return sum(save_candidates[n].time_s for n in subset)

    def held_bytes(subset: frozenset[int]) -> int:
        return sum(save_candidates[n].size_bytes for n in subset)

    selections = selections_to_save(save_candidates)
    assert all(subset in allowed for subset in selections)
    assert len(set(selections)) == len(selections)
    for share in choose._LIMIT_FRACTIONS:
        room_bytes = round(share * total_bytes)
        best_s = max(saved_s(subset) for subset in allowed if held_bytes(subset) <= room_bytes)
        reached_s = max(
            (saved_s(o) for o in selections if held_bytes(o) <= room_bytes), default=0.0
        )
        assert reached_s >= best_s * (1 - 2 * choose._GAP) - 1e-12


def document(**more: object) -> Policies:
    blocks = (
        BlockPolicy(block="l.0", how="selective", operators={"aten.mm.default": (0, 2)}),
        BlockPolicy(block="l.1", how="selective", operators={"aten.mm.default": (0, 2)}),
        BlockPolicy(block="l.2", how="as it is"),
    )
    numbers = {"budget_bytes": 90, "peak_bytes": 80, "baseline_bytes": 160}
    times = {"time_s": 1.5, "baseline_time_s": 1.0}
    return Policies.model_validate({"blocks": blocks, **numbers, **times, **more})


def test_policies_survive_json_and_print_as_a_table(tmp_path: object) -> None:
    policies = document(optimum_overhead=0.25)
    assert Policies.from_json(policies.to_json()) == policies
    text = str(policies)
    assert "50.0% of 160 B without recomputation" in text
    assert "+50% over 1 s (measured by running the blocks)\nremat     +25% within that peak" in text
    assert "l.0 to l.1  selective  mm 0+2" in text
    assert policies.for_block("l.2") == policies.blocks[2]
    assert policies.for_block("l.3") is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ('"rules":"regions"', "the policy of l.0 lists what rules='operators'"),
        ('"rules":"everything"', "rules"),
        ('"peak_bytes":-1', "peak_bytes"),
    ],
)
def test_documents_with_wrong_fields_are_refused(wrong: str, message: str) -> None:
    text = document().to_json()
    key = wrong.partition(":")[0]
    start = text.index(key)
    end = min(i for i in (text.find(",", start), text.find("}", start)) if i > 0)
    with pytest.raises(DocumentError, match=message):
        Policies.from_json(text[:start] + wrong + text[end:])


def test_two_policies_for_a_block_are_refused() -> None:
    text = document().to_json().replace("l.1", "l.0")
    with pytest.raises(DocumentError, match="two policies are for the same block"):
        Policies.from_json(text)
