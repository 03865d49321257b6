"""Python's cyclic garbage collector, switched off while it would disturb."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def cycles_not_collected() -> Iterator[None]:
    """Within the context, the cyclic garbage collector is off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
