"""Settings of Python and torch under which a capture takes less time, with the same result.

A capture creates some 50 Python objects for each operation, and nearly all of them live until its
end: collections of reference cycles would search them over and over, and find nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.fx._lazy_graph_module import _use_lazy_graph_module

from remat.frontend.common.garbage_collection import cycles_not_collected


@contextlib.contextmanager
def fast_tracing() -> Iterator[None]:
    """Within the context, no reference cycles are collected, and graphs are not written as Python
    code, since nothing runs them."""
    with cycles_not_collected(), _use_lazy_graph_module(True):
        yield
