"""The tables of the atlas on its pages."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from benchmarks.atlas import results
from tests.helpers.doc_snippets import ROOT


def test_pages_without_results_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    extensions = ROOT / "docs" / "extensions"
    monkeypatch.setattr(sys, "path", [str(extensions), *sys.path])
    monkeypatch.delitem(sys.modules, "atlas_tables", raising=False)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    pages = runpy.run_path(str(extensions / "atlas.py"))
    del sys.modules["atlas_tables"]  # it has these results, and undoing would restore it
    assert "no results" in pages["_summary"]()[0].astext()
    assert pages["_models"]()
    assert pages["_leaderboard"]()
