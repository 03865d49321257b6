"""Turn right results for CUDA tensors on and off."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from scripts.software_gpu.numbers import cuda_graphs, interpreter
from scripts.software_gpu.numbers.operators import Operator, replaced_operators, sparse_operators
from scripts.software_gpu.numbers.replacement import MissingCounterpartError, Replacement

_libraries: list[torch.library.Library] = []


def is_enabled() -> bool:
    """True if CUDA tensors get right results."""
    return bool(_libraries)


def enable() -> None:
    """Replace the kernels of CUDA tensors, in all threads, until `disable` or the process ends."""
    if is_enabled():
        return
    torch.backends.cudnn.enabled = False  # the software GPU has none
    torch.backends.cuda.enable_cudnn_sdp(False)
    library = torch.library.Library("aten", "IMPL")
    replacements = [
        Replacement(operator, torch.library.get_kernel(operator.overload, "CUDA"))
        for operator in replaced_operators()
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*previously registered kernel.*", UserWarning)
        for replacement in replacements:
            overload = replacement.operator.overload
            library.impl(overload, replacement, "CUDA", with_keyset=True)
        for operator, key in sparse_operators():
            library.impl(operator.overload, _failing(operator, key), key)
    cuda_graphs.patch()
    interpreter.patch()
    _libraries.append(library)


def disable() -> None:
    """Restore torch's own kernels."""
    if is_enabled():
        _libraries.pop()._destroy()
        interpreter.restore()
        cuda_graphs.restore()


@contextmanager
def right_numbers() -> Iterator[None]:
    """Give CUDA tensors right results inside a `with` block."""
    was_enabled = is_enabled()
    enable()
    try:
        yield
    finally:
        if not was_enabled:
            disable()


def _failing(operator: Operator, key: str) -> Any:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MissingCounterpartError(operator.name, f"its tensors are of the kind {key}")

    return fail
