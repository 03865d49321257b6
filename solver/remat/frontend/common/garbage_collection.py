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


@contextlib.contextmanager
def older_objects_not_collected() -> Iterator[None]:
    """Within the context, the cyclic garbage collector searches only objects that are created in
    it. No change if some are frozen already, since they would be unfrozen with the others."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
