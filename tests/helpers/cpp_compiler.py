"""A mark for tests that need a C++ compiler, as Inductor does for CPUs."""

from __future__ import annotations

import shutil
from pathlib import Path
from sysconfig import get_path

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or not (Path(get_path("include")) / "Python.h").exists(),
    reason="Inductor needs g++ and Python's headers",
)
