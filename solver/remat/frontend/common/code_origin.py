"""Where code comes from: Python or torch, an installed package, or the user's project, which may be
in any folder; the line and the part of a step that an error is about.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_STANDARD_LIBRARY = Path(contextlib.__file__).parent
_FRAMEWORKS = (Path(torch.__file__).parent, Path(__file__).parents[1])
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


def is_framework_code(path: Path) -> bool:
    """True if a file belongs to Python's standard library, torch or remat, not to a model."""
    in_standard_library = path.is_relative_to(_STANDARD_LIBRARY) and not is_installed_package(path)
    return in_standard_library or is_torch_or_remat_code(str(path))


@functools.cache
def is_torch_or_remat_code(file: str) -> bool:
    """True if the file with this name belongs to torch or remat."""
    return any(Path(file).is_relative_to(folder) for folder in _FRAMEWORKS)


def is_installed_package(path: Path) -> bool:
    """True if a file is in a folder where this interpreter searches for installed packages."""
    folders = (Path(entry) for entry in sys.path)
    return any(f.name in _PACKAGE_FOLDERS and path.is_relative_to(f) for f in folders)


def is_user_code(path: Path) -> bool:
    """True if a file is neither framework code nor of an installed package."""
    return path.is_absolute() and not is_framework_code(path) and not is_installed_package(path)


def frame_line(frame: FrameType) -> str:
    """Return the line that a frame runs, as text for messages."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} (in {frame.f_code.co_name})"


_ATTRIBUTE = "__remat_part__"


@contextlib.contextmanager
def errors_name_part(part: str) -> Iterator[None]:
    """Within the context, an error that is raised records this part of the step, unless an inner
    context recorded another one; see `failing_part`."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, _ATTRIBUTE):  # an inner part is more exact
            with contextlib.suppress(AttributeError, TypeError):  # errors that cannot be changed
                setattr(error, _ATTRIBUTE, part)
        raise


def failing_part(error: BaseException) -> str | None:
    """Return the part of a step that `errors_name_part` recorded for an error; None if it recorded
    none."""
    return getattr(error, _ATTRIBUTE, None)
