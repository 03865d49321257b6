"""The memory of optimizers on the device of their parameters: their state, and what `step()`
allocates in addition.

The formulas follow torch.optim and bitsandbytes: `tests/torch/memory/test_optimizer_memory.py`
compares them with the optimizers. State has the dtype of its parameter, except in 8 bits. On CUDA,
torch computes on all parameters at once by default (`foreach`), and allocates as much as they take;
`fused` runs one kernel without temporary tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from remat.costs.layouts import tensor_bytes
from remat.documents.records import TensorMeta
from remat.errors import RematError

_MIN_8BIT_ELEMENTS = 4096
"""Smaller parameters have a state in float32 (bitsandbytes: `min_8bit_size`)."""

_8BIT_BLOCK_ELEMENTS = 256
_8BIT_TABLE_BYTES = (1024, 1024)
"""The values of the 256 codes of each moment, which all parameters share."""


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """The memory of one optimizer for given parameters.

    `state_sizes_bytes` are the tensors of the state, which the first step allocates and all later
    ones retain; `temporary_sizes_bytes` those that are live at once while a step runs. `code`
    creates the optimizer, for a model called `model`.
    """

    name: str
    code: str
    state_sizes_bytes: tuple[int, ...] = ()
    temporary_sizes_bytes: tuple[int, ...] = ()

    @property
    def state_bytes(self) -> int:
        """The bytes of the state."""
        return sum(self.state_sizes_bytes)

    @property
    def temporary_bytes(self) -> int:
        """The largest number of bytes that a step allocates in addition to the state."""
        return sum(self.temporary_sizes_bytes)


_Sizes = tuple[int, ...]
_SizeFormula = Callable[[Sequence[TensorMeta], bool], tuple[_Sizes, _Sizes]]
"""The sizes of state and temporary tensors, from the parameters and whether they are on CUDA."""


def _moment_formula(count: int) -> _SizeFormula:
    """Return the formula of an optimizer with `count` tensors of state for each parameter, and no
    temporary tensors."""

    def formula(parameters: Sequence[TensorMeta], is_cuda: bool) -> tuple[_Sizes, _Sizes]:
        return tuple(tensor_bytes(p) for p in parameters for _ in range(count)), ()

    return formula


def _adam_sizes(parameters: Sequence[TensorMeta], is_cuda: bool) -> tuple[_Sizes, _Sizes]:
    """Return the sizes of state and temporary tensors of Adam: two moments, and the square roots of
    the second one. On CUDA the roots of all parameters exist at once, on the CPU the root of one
    parameter and a quotient as large."""
    sizes = tuple(map(tensor_bytes, parameters))
    state = tuple(size for size in sizes for _ in range(2))
    return state, sizes if is_cuda else (max(sizes, default=0),) * 2


def _adafactor_sizes(parameters: Sequence[TensorMeta], is_cuda: bool) -> tuple[_Sizes, _Sizes]:
    """Return the sizes of state and temporary tensors of Adafactor: variances of rows and columns,
    and the updates of two successive parameters, since one is live until the next is computed."""
    state: list[int] = []
    for parameter in parameters:
        size, shape = tensor_bytes(parameter), parameter.shape
        matrix = len(shape) > 1
        state += [size // shape[-1], size // shape[-2]] if matrix and size else [size]
    sizes = list(map(tensor_bytes, parameters))
    first, second = max(pairwise([0, *sizes]), key=sum, default=(0, 0))
    return tuple(state), (first, second)


def _adam_8bit_sizes(parameters: Sequence[TensorMeta], is_cuda: bool) -> tuple[_Sizes, _Sizes]:
    """Return the sizes of state and temporary tensors of Adam in 8 bits: two moments with a scale
    in float32 for each block, in float32 for small parameters; no temporary tensors."""
    state = list(_8BIT_TABLE_BYTES)
    for parameter in parameters:
        elements = prod(parameter.shape)
        if elements < _MIN_8BIT_ELEMENTS:
            state += [4 * elements] * 2
        else:
            state += [elements, 4 * -(-elements // _8BIT_BLOCK_ELEMENTS)] * 2
    return tuple(state), ()


_OPTIMIZERS: dict[str, tuple[str, _SizeFormula]] = {
    "adamw": ("torch.optim.AdamW(model.parameters())", _adam_sizes),
    "adamw-fused": (
        "torch.optim.AdamW(model.parameters(), fused=True)",
        _moment_formula(2),
    ),
    "adamw-8bit": ("bitsandbytes.optim.AdamW8bit(model.parameters())", _adam_8bit_sizes),
    "adam": ("torch.optim.Adam(model.parameters())", _adam_sizes),
    "adam-fused": (
        "torch.optim.Adam(model.parameters(), fused=True)",
        _moment_formula(2),
    ),
    "adam-8bit": ("bitsandbytes.optim.Adam8bit(model.parameters())", _adam_8bit_sizes),
    "adafactor": ("torch.optim.Adafactor(model.parameters())", _adafactor_sizes),
    "sgd": ("torch.optim.SGD(model.parameters())", _moment_formula(0)),
    "sgd-momentum": (
        "torch.optim.SGD(model.parameters(), momentum=0.9)",
        _moment_formula(1),
    ),
    "none": ("", _moment_formula(0)),
}

OPTIMIZERS = tuple(_OPTIMIZERS)
"""The names of optimizers whose memory is known."""


def check_optimizer(name: str) -> None:
    """Raise `RematError` for a name that is not in `OPTIMIZERS`."""
    if name not in _OPTIMIZERS:
        raise RematError(
            f"the memory of the optimizer {name!r} is not known; use one of {', '.join(OPTIMIZERS)}"
        )


def optimizer_memory(
    name: str, parameters: Sequence[TensorMeta], *, is_cuda: bool = True
) -> OptimizerMemory:
    """Return the memory of an optimizer for its parameters, in their order. Raises `RematError` for
    a name that is not in `OPTIMIZERS`."""
    check_optimizer(name)
    code, formula = _OPTIMIZERS[name]
    return OptimizerMemory(name, code, *formula(parameters, is_cuda))


def smaller_optimizers(name: str) -> tuple[str, ...]:
    """Return the names of optimizers with the same update rule and less memory, the closest first:
    fused before 8 bits, which rounds the moments. () without any."""
    base = name.partition("-")[0]
    order = (base, f"{base}-fused", f"{base}-8bit")
    smaller = order[order.index(name) + 1 :] if name in order else ()
    return tuple(candidate for candidate in smaller if candidate in _OPTIMIZERS)
