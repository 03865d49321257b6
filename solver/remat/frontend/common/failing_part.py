"""The part of a step that raised an error, where that is not the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_ATTRIBUTE = "__remat_part__"


@contextlib.contextmanager
def errors_of(part: str) -> Iterator[None]:
    """Within the context, errors are recorded as those of a part of a step."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, _ATTRIBUTE):  # an inner part is more exact
            with contextlib.suppress(AttributeError, TypeError):  # errors that cannot be changed
                setattr(error, _ATTRIBUTE, part)
        raise


def failing_part(error: BaseException) -> str | None:
    """Return the part of a step that raised an error, None if it was not recorded."""
    return getattr(error, _ATTRIBUTE, None)
