"""Tensors and RNG states that a capture must not change: parameters, buffers, generators."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from remat.errors import TraceError
from remat.frontend.common.code_origin import is_framework_code

_CAPTURE_TYPES = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of values that are meaningless after the capture."""


@contextmanager
def rng_state_preserved() -> Iterator[None]:
    """Restore the state of torch's random generators, of all devices, at the end of the context."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


_RNG_FUNCTIONS: list[tuple[Any, str]] = [
    (torch, "manual_seed"),
    (torch, "get_rng_state"),
    (torch, "set_rng_state"),
    (torch.random, "manual_seed"),
    (torch.random, "get_rng_state"),
    (torch.random, "set_rng_state"),
    (torch.cuda, "get_rng_state"),
    (torch.cuda, "set_rng_state"),
    (torch.cuda.random, "get_rng_state"),
    (torch.cuda.random, "set_rng_state"),
]
"""Functions of torch that seed, read or set the state of its generators."""


@contextmanager
def rng_changes_forbidden(model: nn.Module) -> Iterator[None]:
    """Raise `TraceError` if the model's code uses random numbers of Python or NumPy within the
    context, or seeds, reads or sets torch's generators: a plan would do it once instead of in each
    step. The generators of Python and NumPy are restored."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    thread = threading.get_ident()
    originals = [(m, name, getattr(m, name)) for m, name in _RNG_FUNCTIONS]

    def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            caller = Path(sys._getframe(1).f_code.co_filename)
            if threading.get_ident() != thread or is_framework_code(caller):
                return original(*args, **kwargs)
            raise TraceError(rng_error(model, f"calls torch's {name}"))

        return refuse

    for module, name, original in originals:
        setattr(module, name, refusing(name, original))
    use = ""
    try:
        yield
        if random.getstate() != python_state:
            use = "draws Python's random numbers"
        if not all(map(np.array_equal, np.random.get_state(), numpy_state)):
            use = "draws NumPy's random numbers"
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    if use:
        raise TraceError(rng_error(model, use))


def rng_error(model: nn.Module, use: str) -> str:
    """Return the error message for a forward that uses random numbers other than torch's."""
    return (
        f"the forward of {type(model).__name__} {use}, which a plan would do once for all steps. "
        "Remedy: do so outside of the model, and pass the result as an argument; or use torch.rand "
        'and torch.where; or plan the blocks inside: remat.enable(model, budget, scope="blocks")'
    )


@contextmanager
def model_state_preserved(model: nn.Module) -> Iterator[None]:
    """Restore parameters, buffers and random generators at the end of the context. A capture
    computes on fake tensors, but the model's code may assign to buffers or draw a seed, and torch
    does not restore the parameters of a module that has two names."""
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (table, dict(table))
        for module in model.modules()
        for table in (module._parameters, module._buffers)
    ]
    try:
        with rng_state_preserved():
            yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)


def is_of_capture(leaf: object) -> bool:
    """True for a fake tensor, a wrapper of one, and a symbol."""
    is_wrapper = isinstance(leaf, torch.Tensor) and torch._is_functional_tensor(leaf)
    return is_wrapper or isinstance(leaf, _CAPTURE_TYPES)


def is_same_scalar(a: object, b: object) -> bool:
    """True for equal scalars or strings of one type."""
    return isinstance(a, (bool, int, float, str)) and type(a) is type(b) and a == b


def registered_buffers(model: nn.Module) -> dict[tuple[nn.Module, str], torch.Tensor | None]:
    """Return all registered buffers, by the module that owns them and their name there."""
    return {
        (module, name): buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
    }
