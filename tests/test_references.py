"""Pictures of fixed plans have the structure that is written down in tests/references."""

from __future__ import annotations

from difflib import unified_diff

import pytest
from tests.references import FOLDER, GRAPHS, PICTURES, network, plan, references

NAMES = [f"{size}_{name}.json" for size in GRAPHS for name in PICTURES] + ["style.json"]


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return references()


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_as_its_reference(name: str, drawn: dict[str, str]) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    lines = unified_diff(written.splitlines(), drawn[name].splitlines(), name, "now", "", "", 1, "")
    difference = "\n".join(lines)
    if difference:
        pytest.fail(
            f"{difference}\n\nIf that is meant: python -m tests.references, and commit the result.",
            pytrace=False,
        )


def test_every_reference_is_of_a_picture(drawn: dict[str, str]) -> None:
    assert {file.name for file in FOLDER.glob("*.json")} == set(drawn) == set(NAMES)


def test_the_plans_are_of_the_sizes_that_matter() -> None:
    assert [len(network(layers)) for layers in GRAPHS.values()] == [20, 396]
    small = plan(network(2), "norm", "act")
    assert sum(small.schedule.recomputed(small.graph).values()) == 4
    assert small.peak_bytes < small.baseline_peak_bytes
