"""Whose code a line is, told by where the packages lie: a project may be in any folder."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

_PYTHON = Path(contextlib.__file__).parent
_MACHINERY = (Path(torch.__file__).parent, Path(__file__).parents[1])
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def is_machinery(path: Path) -> bool:
    """Python's own, torch's or remat's: nothing that a model is made of."""
    own = path.is_relative_to(_PYTHON) and not is_installed(path)
    return own or any(path.is_relative_to(package) for package in _MACHINERY)


def is_installed(path: Path) -> bool:
    """In one of the folders where this interpreter looks for installed packages."""
    folders = (Path(entry) for entry in sys.path)
    return any(f.name in _INSTALLED and path.is_relative_to(f) for f in folders)


def is_users(path: Path) -> bool:
    """Neither machinery nor installed."""
    return path.is_absolute() and not is_machinery(path) and not is_installed(path)
