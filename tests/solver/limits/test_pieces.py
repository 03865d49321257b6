"""The option `split`."""

from __future__ import annotations

import pytest

from remat.limits.options import pieces_to_try


def test_numbers_of_pieces() -> None:
    assert pieces_to_try("auto") == (2, 4, 8, 16)
    assert pieces_to_try("off") == pieces_to_try(1) == ()
    assert pieces_to_try(6) == (6,)


@pytest.mark.parametrize("value", ["automatic", "of", 0, -2, 1025, True, 2.0, None])
def test_anything_else_is_an_error(value: object) -> None:
    with pytest.raises(ValueError, match=r"split is .*; it is 'auto'"):
        pieces_to_try(value)
