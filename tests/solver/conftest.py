"""Fixtures of the tests of solvers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from remat.strategies.search import eviction


@pytest.fixture(scope="module")
def short_eviction() -> Iterator[None]:
    """End the search by eviction after a few attempts on graphs of a dozen operations, where it
    leaves nothing for the program to find. With REMAT_EXAMPLES it ends as for users."""
    with pytest.MonkeyPatch.context() as patch:
        if "REMAT_EXAMPLES" not in os.environ:
            patch.setattr(eviction, "_MIN_RUNS", 1)
        yield
