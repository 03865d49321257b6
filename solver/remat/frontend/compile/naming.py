"""The name of the module or function that Dynamo compiles, for titles of plans."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch._guards import CompileContext

_RESUME_FUNCTION = re.compile(r"torch_dynamo_resume_in_(?P<function>.+)_at_(?P<line>\d+)$")


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
    if code.co_name == "inner" and isinstance(values.get("fn"), nn.Module):
        return type(values["fn"]).__name__  # Dynamo wraps torch's own modules in a function `inner`
    owner, _, function = code.co_qualname.rpartition(".")
    resumed = _RESUME_FUNCTION.match(function)
    function = resumed["function"] if resumed else function
    name = f"{owner}.{function}" if owner else function
    is_decorated = "<locals>" in owner
    if function == "forward" or is_decorated:
        first = values.get("self" if resumed or not code.co_varnames else code.co_varnames[0])
        if isinstance(first, nn.Module):
            name = type(first).__name__
        elif not is_decorated:
            name = owner or name
    return f"{name} from line {resumed['line']}" if resumed else name


def current_compile_id() -> str:
    """Return the id of the current compilation in torch's own logs, such as "0/1"; "" if there is
    none."""
    return str(CompileContext.current_compile_id() or "")
