"""Folders that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder of the repository."""

DATA = ROOT / "tests" / "data"
"""Documents, records and references that tests compare with."""
