"""Python's cyclic garbage collector, restricted while it would disturb.

The collector belongs to the process, not to a thread. Where contexts of several threads overlap,
the first one restricts it, and the last one restores it: a thread that ends earlier does not slow
down the others.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class _Restriction:
    """A restriction of the collector. `restrict` returns False if the user had set it already; then
    it stays."""

    restrict: Callable[[], bool]
    restore: Callable[[], None]
    _is_restored: bool = False
    _context_count: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)  # finalizers may enter it, too

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        with self._lock:
            if self._context_count == 0:
                self._is_restored = self.restrict()
            self._context_count += 1
        try:
            yield
        finally:
            with self._lock:
                self._context_count -= 1
                if self._context_count == 0 and self._is_restored:
                    self.restore()


def _disable() -> bool:
    was_enabled = gc.isenabled()
    gc.disable()
    return was_enabled


def _freeze() -> bool:
    if gc.get_freeze_count():  # they would be unfrozen with the others
        return False
    gc.freeze()
    return True


_DISABLED = _Restriction(_disable, gc.enable)
_FROZEN = _Restriction(_freeze, gc.unfreeze)


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
