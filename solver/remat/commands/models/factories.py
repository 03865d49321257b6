"""A model and its call from a function that the user wrote, and where in his file it fails."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from remat.errors import RematError, TraceError, one_line
from remat.frontend.common.code_origin import is_user_code

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_EXPECTED = "return (model, args), (model, kwargs) or (model, args, kwargs)"


def from_factory(place: str, name: str) -> Call:
    """Call `name` of `place`, a file or a dotted module. Raises `TraceError`, of one line."""
    source = f"{place}:{name}"
    module = _from_file(place) if _is_file(place) else _from_module(place)
    factory = _find(module, place, name)
    _check_callable(factory, source, module)
    with _located(f"{source} failed", _file_of(module)):
        made = factory()
    return _call(made, source)


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or os.sep in place


def _from_file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise TraceError(f"there is no file {place}")
    _search_first(path.parent)
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and _file_of(known) != path:
        # Its own classes are looked up by the module's name, so it must not hide another's.
        name = f"{name}_source"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TraceError(f"{place} is no Python file; name a .py file or a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _located(f"cannot import {place}", path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_module(place: str) -> ModuleType:
    _search_first(Path.cwd())
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(place)
    except ModuleNotFoundError as error:
        # A parent is missing, or imports something that is.
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise TraceError(f"cannot import {place}: {_where(error)}{one_line(error)}") from error
        spec = None
    except Exception as error:
        raise TraceError(f"cannot import {place}: {_where(error)}{one_line(error)}") from error
    if spec is None:
        raise TraceError(
            f"there is no module {place!r} in {Path.cwd()} or the environment; check its name, or "
            "name a file: path/to/script.py:factory"
        )
    file = Path(spec.origin) if spec.origin and spec.has_location else None
    with _located(f"cannot import {place}", file):
        return importlib.import_module(place)


def _search_first(directory: Path) -> None:
    """As Python does for the directory of a script."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _find(module: ModuleType, place: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            own = sorted(
                key
                for key, value in vars(module).items()
                if inspect.isfunction(value) and value.__module__ == module.__name__
            )
            defined = f"it defines {', '.join(own)}" if own else "it defines no function"
            raise TraceError(f"{place} has no {name!r}; {defined}") from error
    return found


def _check_callable(factory: Any, source: str, module: ModuleType) -> None:
    if not callable(factory):
        raise TraceError(
            f"{source} is a {type(factory).__name__} and not a function; name a function that "
            f"takes no arguments and does {_EXPECTED}"
        )
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        # Callables made in C do not tell.
        return
    try:
        signature.bind()
    except TypeError as error:
        line = inspect.getsourcelines(factory)[1] if inspect.isfunction(factory) else None
        file = _file_of(module)
        at = f" ({_shown(file)}:{line})" if file and line else ""
        raise TraceError(
            f"{source}{signature}{at} needs arguments, and is called without any; give them "
            "defaults, or name a function that calls it"
        ) from error


def _call(made: object, source: str) -> Call:
    if isinstance(made, nn.Module):
        raise TraceError(
            f"{source} returned a {type(made).__name__} without the arguments of its call; it must "
            f"{_EXPECTED}"
        )
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3):
        what = type(made).__name__
        if isinstance(made, (tuple, list)):
            what += f" of {len(made)}"
        raise TraceError(f"{source} returned a {what}; it must {_EXPECTED}")
    model, given, *rest = made
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"{source} returned a {type(model).__name__} where the model belongs, which must be a "
            f"torch.nn.Module: {_EXPECTED}"
        )
    if not rest and isinstance(given, Mapping):
        return model, (), _keywords(given, source)
    if isinstance(given, torch.Tensor):
        given = (given,)
    if not isinstance(given, (tuple, list)):
        raise TraceError(
            f"{source} returned a {type(given).__name__} where the model's arguments belong; use a "
            "tuple of positional ones, a dict of keyword ones, or one tensor"
        )
    return model, tuple(given), _keywords(rest[0], source) if rest else {}


def _keywords(given: object, source: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise TraceError(
            f"{source} returned a {type(given).__name__} where the keyword arguments belong; use a "
            "dict from names to values"
        )
    return {str(key): value for key, value in given.items()}


# -- where it failed ------------------------------------------------------------------------------


@contextmanager
def _located(what: str, file: Path | None) -> Iterator[None]:
    """Everything raised inside as a `TraceError` that names the place in the user's code."""
    try:
        yield
    except TraceError:
        raise
    except (Exception, SystemExit) as error:
        # A script that reads its arguments when imported leaves by SystemExit.
        said = str(error) if isinstance(error, RematError) else one_line(error)
        raise TraceError(f"{what}: {_where(error, file)}{said}") from error


def _where(error: BaseException, file: Path | None = None) -> str:
    """ "file:line: " of the innermost frame in the user's code, "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{_shown(Path(error.filename))}:{error.lineno}: "
    found = ""
    step = error.__traceback__
    while step is not None:
        path = Path(step.tb_frame.f_code.co_filename)
        if path == file or is_user_code(path):
            found = f"{_shown(path)}:{step.tb_lineno}: "
        step = step.tb_next
    return found


def _shown(path: Path) -> str:
    """As the user would write it: from the current directory where it lies below that."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None
