"""Pictures of fixed plans have the structure that is written down in tests/data/references."""

from __future__ import annotations

from difflib import unified_diff

import pytest
from tests.helpers.picture_references import FOLDER, GRAPHS, PICTURES, network, plan, references

NAMES = [f"{size}_{name}.json" for size in GRAPHS for name in PICTURES] + ["style.json"]


@pytest.fixture(scope="module")
def pictures() -> dict[str, str]:
    return references()


@pytest.mark.parametrize("name", NAMES)
def test_each_picture_has_the_structure_of_its_reference(
    name: str, pictures: dict[str, str]
) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    lines = unified_diff(
        written.splitlines(), pictures[name].splitlines(), name, "now", "", "", 1, ""
    )
    difference = "\n".join(lines)
    if difference:
        pytest.fail(
            f"{difference}\n\nIf that is intended, run python -m tests.helpers.picture_references "
            "and commit the result.",
            pytrace=False,
        )


def test_every_reference_belongs_to_a_picture(pictures: dict[str, str]) -> None:
    assert {file.name for file in FOLDER.glob("*.json")} == set(pictures) == set(NAMES)


def test_the_plans_are_of_20_and_396_operations() -> None:
    assert [len(network(layers)) for layers in GRAPHS.values()] == [20, 396]
    small = plan(network(2), "norm", "act")
    assert sum(small.schedule.recomputed(small.graph).values()) == 4
    assert small.peak_bytes < small.baseline_peak_bytes
