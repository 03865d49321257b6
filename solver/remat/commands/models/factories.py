"""Calls a user's function that returns a model and its arguments; locates errors in it."""

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

from remat.errors import RematError, TraceError, one_line, similar_names_hint
from remat.frontend.common.code_origin import is_user_code

ModelCall = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_EXPECTED_RESULT = "return (model, args), (model, kwargs) or (model, args, kwargs)"


def step_from_factory(place: str, name: str) -> ModelCall:
    """Call `name` of `place`, a file or a dotted module; return its model and arguments.

    Raises `TraceError` with one line.
    """
    source = f"{place}:{name}"
    module = _import_factory_file(place) if _is_file_path(place) else _import_factory_module(place)
    factory = _find_factory(module, place, name)
    _check_factory_callable(factory, source, module)
    with _errors_located(f"{source} failed", _module_file(module)):
        result = factory()
    return _parse_factory_result(result, source)


def _is_file_path(place: str) -> bool:
    """True if a place names a file, not a dotted module."""
    return place.endswith(".py") or "/" in place or os.sep in place


def _import_factory_file(place: str) -> ModuleType:
    """Import a Python file as a module. Raises `TraceError` with the line that fails."""
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        similar = similar_names_hint(path.name, _python_files(path.parent), lead="; near is ")
        raise TraceError(
            f"there is no file {place}: {path.parent} has no {path.name}{similar}; check the path, "
            "which is relative to the current directory"
        )
    _put_first_on_path(path.parent)
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and _module_file(loaded) != path:
        # Classes are looked up by their module's name, so the file must not replace another module.
        name = f"{name}_source"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TraceError(f"{place} is not a Python file; name a .py file or a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _errors_located(f"cannot import {place}", path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _python_files(folder: Path) -> list[str]:
    """Return the names of the Python files of a folder; none if it does not exist."""
    return sorted(file.name for file in folder.glob("*.py"))


def _import_factory_module(place: str) -> ModuleType:
    """Import a dotted module, also from the current directory. Raises `TraceError` with the line
    that fails."""
    _put_first_on_path(Path.cwd())
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(place)
    except ModuleNotFoundError as error:
        # A parent is missing, or imports something that is.
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise TraceError(
                f"cannot import {place}: {_error_location(error)}{one_line(error)}"
            ) from error
        spec = None
    except Exception as error:
        raise TraceError(
            f"cannot import {place}: {_error_location(error)}{one_line(error)}"
        ) from error
    if spec is None:
        raise TraceError(
            f"there is no module {place!r} in {Path.cwd()} or the environment; check its name, or "
            "name a file: path/to/script.py:factory"
        )
    file = Path(spec.origin) if spec.origin and spec.has_location else None
    with _errors_located(f"cannot import {place}", file):
        return importlib.import_module(place)


def _put_first_on_path(directory: Path) -> None:
    """Put a directory first on `sys.path`, as Python does for the directory of a script."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _find_factory(module: ModuleType, place: str, name: str) -> Any:
    """Return the attribute `name` of a module, which may be dotted. Raises `TraceError` if there is
    none."""
    value: Any = module
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            functions = sorted(
                key
                for key, item in vars(module).items()
                if inspect.isfunction(item) and item.__module__ == module.__name__
            )
            defined = (
                f"it defines {', '.join(functions)}" if functions else "it defines no function"
            )
            raise TraceError(f"{place} has no {name!r}; {defined}") from error
    return value


def _check_factory_callable(factory: Any, source: str, module: ModuleType) -> None:
    """Raise `TraceError` unless a factory can be called without arguments."""
    if not callable(factory):
        raise TraceError(
            f"{source} is a {type(factory).__name__} and not a function; name a function that "
            f"takes no arguments and does {_EXPECTED_RESULT}"
        )
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        # Callables written in C may have no signature.
        return
    try:
        signature.bind()
    except TypeError as error:
        line = inspect.getsourcelines(factory)[1] if inspect.isfunction(factory) else None
        file = _module_file(module)
        location = f" ({_relative_path(file)}:{line})" if file and line else ""
        raise TraceError(
            f"{source}{signature}{location} needs arguments, but is called without any; give "
            "them defaults, or name a function that calls it"
        ) from error


def _parse_factory_result(result: object, source: str) -> ModelCall:
    """Return the model and the arguments that a factory returned. Raises `TraceError` for other
    results."""
    if isinstance(result, nn.Module):
        raise TraceError(
            f"{source} returned a {type(result).__name__} without the arguments of a call; it must "
            f"{_EXPECTED_RESULT}"
        )
    if not isinstance(result, (tuple, list)) or len(result) not in (2, 3):
        description = type(result).__name__
        if isinstance(result, (tuple, list)):
            description += f" of {len(result)}"
        raise TraceError(f"{source} returned a {description}; it must {_EXPECTED_RESULT}")
    model, arguments, *rest = result
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"{source} returned a {type(model).__name__} instead of a model, which must be a "
            f"torch.nn.Module: {_EXPECTED_RESULT}"
        )
    if not rest and isinstance(arguments, Mapping):
        return model, (), _keyword_arguments(arguments, source)
    if isinstance(arguments, torch.Tensor):
        arguments = (arguments,)
    if not isinstance(arguments, (tuple, list)):
        raise TraceError(
            f"{source} returned a {type(arguments).__name__} instead of the model's arguments; use "
            "a tuple of positional arguments, a dict of keyword arguments, or one tensor"
        )
    return model, tuple(arguments), _keyword_arguments(rest[0], source) if rest else {}


def _keyword_arguments(arguments: object, source: str) -> dict[str, Any]:
    """Return keyword arguments as a dict; none for None. Raises `TraceError` for other objects."""
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise TraceError(
            f"{source} returned a {type(arguments).__name__} instead of the keyword arguments; use "
            "a dict from names to values"
        )
    return {str(key): value for key, value in arguments.items()}


# -- where it failed ------------------------------------------------------------------------------


@contextmanager
def _errors_located(failure: str, file: Path | None) -> Iterator[None]:
    """Raise errors of the block as a `TraceError` that names the line in the user's code."""
    try:
        yield
    except TraceError:
        raise
    except (Exception, SystemExit) as error:
        # A script that parses its arguments on import raises SystemExit.
        message = str(error) if isinstance(error, RematError) else one_line(error)
        raise TraceError(f"{failure}: {_error_location(error, file)}{message}") from error


def _error_location(error: BaseException, file: Path | None = None) -> str:
    """Return "file:line: " for the innermost frame in the user's code; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{_relative_path(Path(error.filename))}:{error.lineno}: "
    location = ""
    entry = error.__traceback__
    while entry is not None:
        path = Path(entry.tb_frame.f_code.co_filename)
        if path == file or is_user_code(path):
            location = f"{_relative_path(path)}:{entry.tb_lineno}: "
        entry = entry.tb_next
    return location


def _relative_path(path: Path) -> str:
    """Return the path relative to the current directory if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _module_file(module: ModuleType) -> Path | None:
    """Return the file of a module; None if it has none."""
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None
