"""The name of the module or function that Dynamo compiles, for titles of plans."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch._guards import CompileContext

_RESUME_FUNCTION = re.compile(r"torch_dynamo_resume_in_(?P<function>.+)_at_(?P<line>\d+)$")

_LOCAL = "<locals>"
"""Part of the qualified name of a function that is defined in another function."""


def current_object_name() -> str:
    """Return the name of what this thread compiles: the class of a module, or a function.

    After a graph break the line at which it resumes is added. "" if torch does not report it.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        frame: Any = InstructionTranslator.current_tx()
        code, values = frame.f_code, frame.f_locals
    except (AttributeError, AssertionError):  # AOTAutograd without Dynamo
        return ""
    return _object_name(code, values)


def current_compile_id() -> str:
    """Return the id of the current compilation in torch's own logs, such as "0/1"; "" if there is
    none."""
    return str(CompileContext.current_compile_id() or "")


def _object_name(code: CodeType, values: Mapping[str, Any]) -> str:
    """Return the name of the object that runs this code with these local and free variables.

    Decorators replace a function by a wrapper with its own code. The name is then that of the
    module that the wrapper calls or gets as its first argument, or of the function that it calls.
    """
    owner, _, function = code.co_qualname.rpartition(".")
    resumed = _RESUME_FUNCTION.match(function)
    function = resumed["function"] if resumed else function
    name = f"{owner}.{function}" if owner else function
    is_local = _LOCAL in owner
    wrapped = _wrapped(code, values)
    if isinstance(wrapped, nn.Module):
        name = type(wrapped).__name__
    elif function == "forward" or is_local or _takes_all_arguments(code):
        module = _first_module(code, values, is_resumed=resumed is not None)
        if module is not None:
            name = type(module).__name__
        elif wrapped is not None:
            name = _callable_name(wrapped)
        elif not is_local:
            name = owner or name
    return f"{name} from line {resumed['line']}" if resumed else name


def _first_module(
    code: CodeType, values: Mapping[str, Any], *, is_resumed: bool
) -> nn.Module | None:
    """Return the module that is the first argument, or the first item of `*args`; None if that is
    not a module. In resumed code, which has other arguments, it is `self` or the first item of
    `args`."""
    for name in ("self", "args") if is_resumed else code.co_varnames[:1]:
        value = values.get(name)
        first = value[0] if isinstance(value, tuple) and value else value
        if isinstance(first, nn.Module):
            return first
    return None


def _wrapped(code: CodeType, values: Mapping[str, Any]) -> object:
    """Return the function or module that a wrapper calls; a module in place of its method.

    It is the only callable among the free variables. None if the code is not a wrapper (it lacks
    `*args` or `**kwargs`), or has several callables. If the code has further arguments, only a
    module counts: such a function may call another function without being its wrapper.
    """
    if not _takes_all_arguments(code):
        return None
    free_values = map(values.get, code.co_freevars)
    callables = [v for v in free_values if callable(v) and not isinstance(v, type)]
    if len(callables) != 1:
        return None
    wrapped = callables[0]
    while isinstance(wrapped, functools.partial):
        wrapped = wrapped.func
    if isinstance(wrapped, MethodType) and isinstance(wrapped.__self__, nn.Module):
        wrapped = wrapped.__self__
    has_own_arguments = _original(code).co_argcount > 0
    return None if has_own_arguments and not isinstance(wrapped, nn.Module) else wrapped


def _takes_all_arguments(code: CodeType) -> bool:
    """True if the code has `*args` and `**kwargs`, as a wrapper has."""
    flags = _original(code).co_flags
    return bool(flags & inspect.CO_VARARGS and flags & inspect.CO_VARKEYWORDS)


def _original(code: CodeType) -> CodeType:
    """Return the original code of resumed code; other code unchanged."""
    from torch._dynamo.resume_execution import ContinueExecutionCache

    resumed = ContinueExecutionCache.generated_code_metadata.get(code)
    return code if resumed is None else resumed.code


def _callable_name(function: object) -> str:
    """Return the name of a function without its decorators (`inspect.unwrap`), or the class name of
    another callable object."""
    if not isinstance(function, (FunctionType, MethodType)):
        return type(function).__name__
    return inspect.unwrap(function).__qualname__.removesuffix(".forward")
