"""Folders that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""

DATA = ROOT / "tests" / "data"
"""Documents, records and references that tests compare with."""
