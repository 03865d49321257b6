"""What a graph is called: the module or the function that dynamo compiles."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch._guards import CompileContext

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<function>.+)_at_(?P<line>\d+)$")


def compiled_now() -> str:
    """The class of the module, or the function, that is compiled in this thread; with the line from
    which on, after a graph break. "" where torch does not tell."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        frame: Any = InstructionTranslator.current_tx()
        code, values = frame.f_code, frame.f_locals
    except (AttributeError, AssertionError):  # AOTAutograd by itself
        return ""
    if code.co_name == "inner" and isinstance(values.get("fn"), nn.Module):
        return type(values["fn"]).__name__  # dynamo calls torch's own modules by a function of its
    owner, _, function = code.co_qualname.rpartition(".")
    resumed = _RESUMED.match(function)
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


def number_now() -> str:
    """By what torch's own logs name the compilation: "0/1"; "" where there is none."""
    return str(CompileContext.current_compile_id() or "")
