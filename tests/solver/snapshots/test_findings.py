"""Faults that were planted in training scripts and recorded on the software GPU
(`benchmarks/why_faults`): kind, line, and what the remedy names."""

from __future__ import annotations

import gzip
import json

import pytest
from tests.helpers.paths import DATA

from remat.snapshots.explain import Explanation, explain_snapshot
from remat.snapshots.findings import Kind
from remat.snapshots.read import read_snapshot

EXPECTED = {
    "batch_too_large": (Kind.STEP, "forward", "blocks", "gradient accumulation"),
    "buffers_of_a_side_stream": (Kind.OTHER_STREAM, "", "", "record_stream"),
    "checkpoints_too_long": (Kind.RECOMPUTATION, "forward", "blocks", "smaller regions"),
    "data_on_the_device": (Kind.RESIDENT_DATA, "data_on_the_device", "", "CPU's memory"),
    "lengths_that_grow": (Kind.FRAGMENTS, "lengths_that_grow", "", "expandable_segments:True"),
    "logits_in_float32": (Kind.LOSS, "logits_in_float32", "", "chunks"),
    "losses_of_micro_batches_summed": (
        Kind.SEVERAL_FORWARDS, "losses_of_micro_batches_summed", "", "backward() for each",
    ),
    "state_that_does_not_fit": (
        Kind.OPTIMIZER_STATE, "state_that_does_not_fit", "", "SGD with momentum",
    ),
    "tensor_of_all_pairs": (Kind.ONE_LINE, "_distance_sum", "PairwiseNet", "in pieces"),
}  # fmt: skip
"""The kind, the function of the line, the module, and words of the remedy."""


def explained(name: str) -> Explanation:
    content = (DATA / "snapshots" / f"{name}.pickle.gz").read_bytes()
    return explain_snapshot(read_snapshot(gzip.decompress(content)))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_planted_fault_is_the_first_finding(name: str) -> None:
    kind, function, module, remedy = EXPECTED[name]
    explanation = explained(name)
    cause = explanation.cause
    assert cause is not None
    assert cause.kind == kind
    assert cause.place.module == module
    assert (cause.place.frame.function if cause.place.frame else "") == function
    assert remedy in cause.remedy
    assert not any(finding.kind.is_leak for finding in explanation.findings)


@pytest.mark.parametrize("name", EXPECTED)
def test_reports_are_one_screen(name: str) -> None:
    explanation = explained(name)
    lines = explanation.describe().splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 120
    assert sum(explanation.parts.values()) == explanation.live_bytes
    data = json.loads(explanation.to_json())
    assert data["findings"][0]["kind"] == explanation.findings[0].kind
    page = explanation.html()
    assert "<svg" in page
    assert "request failed" in page
