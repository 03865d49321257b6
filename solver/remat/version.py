"""The version of remat."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("remat")
except PackageNotFoundError:  # run from a source tree that is not installed
    VERSION = "0+unknown"
