"""Attributes are as before after a context that could not set all of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from remat.frontend.common.torch_modes import attributes_set


class Fixed:
    """An object whose attribute cannot be set."""

    @property
    def value(self) -> int:
        return 1


def test_attributes_that_cannot_be_set_leave_the_others_as_they_were() -> None:
    first = SimpleNamespace(value=1)
    with pytest.raises(AttributeError), attributes_set((first, "value", 2), (Fixed(), "value", 2)):
        pass
    assert first.value == 1
