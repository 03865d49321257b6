"""Logs of the libraries that build models: their warnings are about random weights and packages
that no capture needs, and would be printed above a command's answer."""

from __future__ import annotations

import logging
import os
import sys

_IMPORTED_BY_TRANSFORMERS = ("bitsandbytes",)


def silence_warnings_of(package: str) -> None:
    """Let transformers or diffusers log errors only, for as long as the process runs, unless their
    environment variable says otherwise: `TRANSFORMERS_VERBOSITY=warning`."""
    variable = f"{package.upper()}_VERBOSITY"
    if variable in os.environ:
        return
    os.environ[variable] = "error"  # their import sets the level
    if package in sys.modules:
        logging.getLogger(package).setLevel(logging.ERROR)
    for name in _IMPORTED_BY_TRANSFORMERS:
        logging.getLogger(name).setLevel(logging.ERROR)
