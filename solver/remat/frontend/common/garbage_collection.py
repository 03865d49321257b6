"""Python's cyclic garbage collector, restricted while it would disturb.

The collector belongs to the process, not to a thread: a thread that ends earlier does not slow down
the others.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class ProcessChange:
    """A change of the process for as long as any thread needs it. `apply` returns the function that
    undoes it; None if the user had made the change already: then it stays."""

    apply: Callable[[], Callable[[], object] | None]
    _undo: Callable[[], object] | None = None
    _context_count: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)  # finalizers may enter it, too

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Within the context, the change is in force: the first context of several threads applies
        it, and the last one undoes it."""
        with self._lock:
            if self._context_count == 0:
                self._undo = self.apply()
            self._context_count += 1
        try:
            yield
        finally:
            with self._lock:
                self._context_count -= 1
                if self._context_count == 0 and self._undo is not None:
                    self._undo()


def _disable_collector() -> Callable[[], object] | None:
    """Turn the cyclic garbage collector off; return how to undo it, None if it was off already."""
    was_enabled = gc.isenabled()
    gc.disable()
    return gc.enable if was_enabled else None


def _freeze_older_objects() -> Callable[[], object] | None:
    """Exclude all existing objects from collection; return how to undo it. Do nothing and return
    None if some are excluded already."""
    if gc.get_freeze_count():  # they would be unfrozen with the others
        return None
    gc.freeze()
    return gc.unfreeze


_DISABLED = ProcessChange(_disable_collector)
_FROZEN = ProcessChange(_freeze_older_objects)


@contextlib.contextmanager
def cycles_not_collected() -> Iterator[None]:
    """Within the context, the cyclic garbage collector is off."""
    with _DISABLED.in_force():
        yield


@contextlib.contextmanager
def older_objects_not_collected() -> Iterator[None]:
    """Within the context, the cyclic garbage collector searches only objects that are created in
    it, in any thread. No change if some are frozen already."""
    with _FROZEN.in_force():
        yield
