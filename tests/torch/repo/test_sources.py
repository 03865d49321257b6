"""`benchmarks.sources`: published figures next to those of plans for the same step."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.harness import report
from benchmarks.sources import __main__ as command
from benchmarks.sources.cases import CASES, Point, PublishedCase, Source
from benchmarks.sources.figures import case_figures, largest_size
from benchmarks.sources.models import Step
from torch import nn

from remat.costs.devices import find_device


def small_step(rows: int, width: int) -> Step:
    """Return three blocks with activations of `rows` x `width`."""
    blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))
    return nn.Sequential(*blocks), {"input": torch.empty(rows, width)}


SMALL = PublishedCase(
    name="small",
    title="three blocks",
    source=Source("this test"),
    points=(Point("eager", 170_000_000, 0.0), Point("checkpoints", 150_000_000, 0.3)),
    device=find_device("a100"),
    traced_device="a100",
    build=partial(small_step, width=64),
    size=65536,
    size_unit="{:,} rows",
    size_step=0,
    optimizer="sgd",
    assumptions=("all of it",),
    pieces=(2,),
)


@pytest.mark.slow
def test_figures_of_a_case_are_within_the_published_peak() -> None:
    row = case_figures(SMALL, lambda line: None)
    assert row["checkpoints"]["peak_bytes"] <= row["eager"]["peak_bytes"]
    feasible = [plan for plan in row["plans"] if plan["is_feasible"]]
    assert {plan["method"] for plan in feasible} == {"recompute", "pieces", "offload"}
    for plan in feasible:
        assert plan["peak_bytes"] <= plan["at_bytes"]
        assert plan["bound"] <= plan["overhead"]
    assert row["largest"] is None


@pytest.mark.parametrize("limit", [3, 7, 10, 63, 1000])
def test_the_largest_size_is_exact_to_a_sixteenth(limit: int) -> None:
    row = largest_size(lambda size: {"fits": size} if size <= limit else None, size=8, step=1)
    assert row is not None
    assert row["fits"] == row["size"] <= limit
    if limit < 64:
        assert row["size"] < row["too_large"] <= row["size"] + max(1, row["size"] // 16)
    else:
        assert (row["size"], row["too_large"]) == (64, None)


def test_no_size_fits() -> None:
    assert largest_size(lambda size: None, size=8, step=1) is None


def test_figures_of_the_docs_are_those_of_the_cases() -> None:
    """After a change of a case: python -m benchmarks.sources."""
    newest = sorted(report.RESULTS.glob("*-sources.json"))[-1]
    names = {row["case"] for row in json.loads(newest.read_text())["rows"]}
    assert names == command.stored_rows(report.RESULTS).keys() <= CASES.keys()
    assert "llama-7b" in names


def test_figures_of_a_case_that_has_changed_are_not_taken(tmp_path: Path) -> None:
    newest = sorted(report.RESULTS.glob("*-sources.json"))[-1]
    result = json.loads(newest.read_text())
    changed = result["rows"][0]
    changed["fingerprint"] = "another"
    (tmp_path / newest.name).write_text(json.dumps(result))
    stored = command.stored_rows(tmp_path)
    assert stored.keys() == {row["case"] for row in result["rows"]} - {changed["case"]}
    assert command.stored_rows(tmp_path / "none") == {}
