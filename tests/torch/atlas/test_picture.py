"""The picture of a model in the atlas."""

from __future__ import annotations

import runpy
import sys
from xml.etree import ElementTree

import pytest
from benchmarks.atlas.results import OFFLOAD, RECOMPUTE, ModelResult, Row
from tests.helpers.doc_snippets import ROOT


def test_lines_and_points_are_at_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    extensions = ROOT / "docs" / "extensions"
    monkeypatch.setattr(sys, "path", [str(extensions), *sys.path])
    picture = runpy.run_path(str(extensions / "atlas_picture.py"))["picture"]
    rows = (
        Row(gpu="h100", budget="50%", method=RECOMPUTE, peak_bytes=50, overhead=0.2, bound=0.1),
        Row(gpu="h100", budget="30%", method=OFFLOAD, peak_bytes=30, overhead=0.05),
        Row(gpu="h100", budget="30%", method="selective", note="no plan"),
    )
    result = ModelResult(
        model="m", title="a model", graph="0", date="2026-11-27", remat="0", machine={},
        operations=4, baseline_peak_bytes=100, constant_bytes=10, library_bytes=0,
        step_s={"h100": 1.0}, rows=rows,
    )  # fmt: skip
    svg = picture(result, "h100")
    tips = [
        element.text
        for element in ElementTree.fromstring(svg).iter()
        if element.tag.endswith("title")
    ]
    assert f"{RECOMPUTE}: +20.0% at 50.0%" in tips
    assert f"{OFFLOAD}: +5.0% at 30.0%" in tips
    assert not any(tip and tip.startswith("selective") for tip in tips)
