"""The memory of optimizers on the device of their parameters: their state, and what `step()`
allocates in addition.

The formulas follow torch.optim and bitsandbytes: `tests/torch/memory/test_optimizer_memory.py`
compares them with the optimizers. State has the dtype of its parameter, except in 8 bits. On CUDA,
torch computes on all parameters at once by default (`foreach`), and allocates as much as they take;
`fused` runs one kernel without temporary tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from remat.costs.devices import DeviceSpec
from remat.costs.layouts import HALF_DTYPES, converted_meta, tensor_bytes
from remat.costs.workspaces.call import OperatorCall, buffers_at_peak
from remat.costs.workspaces.reductions import accumulator_bytes, reduction_buffers
from remat.documents.records import TensorMeta
from remat.errors import RematError

_MIN_8BIT_ELEMENTS = 4096
"""Smaller parameters have a state in float32 (bitsandbytes: `min_8bit_size`)."""

_MIN_PAGED_ELEMENTS = 100_000
"""Smaller parameters have a state on the device, paged or not (`get_state_buffer`)."""

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
    is_reservable: bool = True

    @property
    def state_bytes(self) -> int:
        """The bytes of the state."""
        return sum(self.state_sizes_bytes)

    @property
    def temporary_bytes(self) -> int:
        """The largest number of bytes that a step allocates in addition to the state."""
        return sum(self.temporary_sizes_bytes)


_Sizes = tuple[int, ...]
_SizeFormula = Callable[[Sequence[TensorMeta], DeviceSpec | None], tuple[_Sizes, _Sizes]]
"""The sizes of state and temporary tensors, from the parameters in their order and the GPU, if that
is known."""

_Assignment = tuple[str, Sequence[int]]
"""A variable of a step's code, and the sizes of the tensors that it is assigned; () to delete it.
The tensors of its last assignment are live until those of the next exist."""

_AssignmentFormula = Callable[[Sequence[TensorMeta]], Iterable[_Assignment]]


def _sizes_at_peak(assignments: Iterable[_Assignment]) -> _Sizes:
    """Return the sizes of the tensors that are live at the peak of a step's assignments."""
    live: dict[str, Sequence[int]] = {}
    live_bytes = peak_bytes = 0
    at_peak: list[Sequence[int]] = []
    for variable, sizes in assignments:
        size_bytes = sum(sizes)
        if live_bytes + size_bytes > peak_bytes:
            peak_bytes, at_peak = live_bytes + size_bytes, [*live.values(), sizes]
        live_bytes += size_bytes - sum(live.get(variable, ()))
        live[variable] = sizes
    return tuple(size for sizes in at_peak for size in sizes)


def _formula(moments: int, assignments: _AssignmentFormula = lambda _: ()) -> _SizeFormula:
    """Return the formula of an optimizer with `moments` tensors of state for each parameter."""

    def formula(parameters: Sequence[TensorMeta], gpu: DeviceSpec | None) -> tuple[_Sizes, _Sizes]:
        state = tuple(tensor_bytes(p) for p in parameters for _ in range(moments))
        return state, _sizes_at_peak(assignments(parameters))

    return formula


def _all_at_once(*variables: str) -> _AssignmentFormula:
    """Return the assignments of tensors as large as all parameters to each variable."""

    def assignments(parameters: Sequence[TensorMeta]) -> Iterator[_Assignment]:
        return ((variable, list(map(tensor_bytes, parameters))) for variable in variables)

    return assignments


def _one_by_one(*variables: str) -> _AssignmentFormula:
    """Return the assignments of tensors as large as a parameter to each variable, which the update
    of the next parameter repeats. "-root" deletes the variable "root"."""

    def assignments(parameters: Sequence[TensorMeta]) -> Iterator[_Assignment]:
        for size_bytes in map(tensor_bytes, parameters):
            for variable in variables:
                yield variable.lstrip("-"), () if variable[0] == "-" else (size_bytes,)

    return assignments


_plain_adam = _one_by_one("root", "quotient", "-root")


def _row_and_column_bytes(parameter: TensorMeta, size_bytes: int) -> tuple[int, ...]:
    """Return the bytes of the variances of rows and of columns of a parameter that takes
    `size_bytes`; () for a vector or scalar."""
    *_, rows, columns = (1, 0, *parameter.shape)
    is_factored = len(parameter.shape) > 1 and size_bytes > 0
    return (size_bytes // columns, size_bytes // rows) if is_factored else ()


def _adafactor_state(parameters: Sequence[TensorMeta], dtype: str | None = None) -> _Sizes:
    sizes = ((p, tensor_bytes(p, dtype)) for p in parameters)
    return tuple(b for p, size in sizes for b in _row_and_column_bytes(p, size) or (size,))


def _means(parameter: TensorMeta, gpu: DeviceSpec | None) -> Iterator[_Assignment]:
    """Yield the assignments of the means of rows and of columns of a matrix. On a GPU, thread
    blocks that reduce one result together have buffers, which may be larger than the matrix."""
    sizes = _row_and_column_bytes(parameter, tensor_bytes(parameter))
    for variable, dim, size_bytes in zip(("rows", "columns"), (-1, -2), sizes, strict=True):
        buffers: list[int] = []
        if gpu is not None:
            call = OperatorCall((), {}, (), gpu)
            reduction = reduction_buffers(call, parameter, (dim,), accumulator_bytes("float32"))
            buffers = buffers_at_peak(reduction)
        yield from ((variable, (size_bytes,)), ("buffers", buffers), ("buffers", ()))


def _adafactor_sizes(
    parameters: Sequence[TensorMeta], gpu: DeviceSpec | None
) -> tuple[_Sizes, _Sizes]:
    """Return the sizes of state and temporary tensors of Adafactor: variances of rows and columns,
    and the updates of two successive parameters, since one is live until the next is computed."""

    def assignments() -> Iterator[_Assignment]:
        for parameter in parameters:
            size_bytes = tensor_bytes(parameter)
            if _row_and_column_bytes(parameter, size_bytes):
                yield from _means(parameter, gpu)
            else:
                yield "square", (size_bytes,)
            yield "update", (size_bytes,)

    return _adafactor_state(parameters), _sizes_at_peak(assignments())


def _adafactor_foreach_sizes(
    parameters: Sequence[TensorMeta], gpu: DeviceSpec | None
) -> tuple[_Sizes, _Sizes]:
    """Return the sizes of state and temporary tensors of Adafactor on all matrices at once, and on
    all vectors."""
    groups: dict[bool, list[TensorMeta]] = {}
    for parameter in parameters:
        groups.setdefault(len(parameter.shape) > 1, []).append(parameter)

    def assignments() -> Iterator[_Assignment]:
        for is_matrix, group in groups.items():
            sizes = [tensor_bytes(parameter) for parameter in group]
            if is_matrix:
                yield from (mean for parameter in group for mean in _means(parameter, gpu))
                yield from (("rows", ()), ("columns", ()))
            else:
                yield from (("square", sizes), ("square", ()))
            yield "update", sizes

    return _adafactor_state(parameters), _sizes_at_peak(assignments())


def _transformers_adafactor(*, has_moment: bool) -> _SizeFormula:
    """Return the formula of Adafactor as transformers has it, which computes in float32; with
    `has_moment`, for a `beta1`."""

    def assignments(
        parameters: Sequence[TensorMeta], gpu: DeviceSpec | None
    ) -> Iterator[_Assignment]:
        for parameter in parameters:
            size = (tensor_bytes(parameter, "float32"),)
            converted = size if parameter.dtype in HALF_DTYPES else ()
            yield from (("gradient", ()), ("gradient", converted))
            yield from (("parameter", ()), ("parameter", converted))
            yield from (("square", size), ("update", size), ("square", ()))
            if _row_and_column_bytes(parameter, *size):
                yield from _means(converted_meta(parameter, "float32"), gpu)
            yield from (("update", size), ("rows", ()), ("columns", ()))
            if has_moment:
                yield "update", ()
            yield from (("negative", size), ("negative", ()))

    def formula(parameters: Sequence[TensorMeta], gpu: DeviceSpec | None) -> tuple[_Sizes, _Sizes]:
        moments = tuple(tensor_bytes(p, "float32") for p in parameters) if has_moment else ()
        state = moments + _adafactor_state(parameters, "float32")
        return state, _sizes_at_peak(assignments(parameters, gpu))

    return formula


_HALF_BYTES = 2


def _muon_assignments(parameters: Sequence[TensorMeta]) -> Iterator[_Assignment]:
    """Yield the assignments of Muon: it orthogonalizes an update in bfloat16, by products with
    matrices as large as the square of the smaller dimension."""
    for parameter in parameters:
        half = (_HALF_BYTES * prod(parameter.shape),)
        gram = (_HALF_BYTES * min(parameter.shape) ** 2,)
        yield from (("update", (tensor_bytes(parameter),)), ("result", ()))
        yield "result", half if parameter.dtype != "bfloat16" else ()
        for _ in range(2):  # of the iterations, which are alike from the second one on
            yield from (("gram", gram), ("gram update", gram), ("result", half))
        yield from (("gram", ()), ("gram update", ()), ("update", ()))


def _bitsandbytes_formula(moments: int, *, is_8bit: bool, is_paged: bool = False) -> _SizeFormula:
    """Return the formula of an optimizer of bitsandbytes, without temporary tensors: moments in
    float32, or in 8 bits with a scale in float32 for each block if parameters are not small. If
    paged, the moments of large parameters are in unified memory."""

    def formula(parameters: Sequence[TensorMeta], gpu: DeviceSpec | None) -> tuple[_Sizes, _Sizes]:
        state = list(_8BIT_TABLE_BYTES[:moments]) if is_8bit else []
        for elements in (prod(parameter.shape) for parameter in parameters):
            is_rounded = is_8bit and elements >= _MIN_8BIT_ELEMENTS
            if not (is_paged and elements >= _MIN_PAGED_ELEMENTS):
                state += [elements if is_rounded else 4 * elements] * moments
            if is_rounded:
                state += [4 * -(-elements // _8BIT_BLOCK_ELEMENTS)] * moments
        return tuple(state), ()

    return formula


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """An optimizer: the code that creates it, and its formula on CUDA and, if different, on a CPU.
    `is_reservable` if `remat.enable(reserve=)` predicts its state."""

    code: str
    formula: _SizeFormula
    cpu_formula: _SizeFormula | None = None
    is_reservable: bool = True


def _torch_optimizers(
    name: str,
    code: str,
    moments: int,
    plain: _AssignmentFormula = lambda _: (),
    foreach: _AssignmentFormula = lambda _: (),
    *,
    has_fused: bool = True,
) -> Iterator[tuple[str, _Optimizer]]:
    """Yield an optimizer of torch, which computes on all parameters at once on CUDA and on one
    after the other on a CPU, and its variants that do one of these anywhere, or have one kernel."""
    on_cuda, on_cpu = _formula(moments, foreach), _formula(moments, plain)

    def with_option(option: str) -> str:
        return f"torch.optim.{code[:-1]}, {option})"

    yield name, _Optimizer(f"torch.optim.{code}", on_cuda, on_cpu)
    yield f"{name}-foreach", _Optimizer(with_option("foreach=True"), on_cuda)
    yield f"{name}-plain", _Optimizer(with_option("foreach=False"), on_cpu)
    if has_fused:
        yield f"{name}-fused", _Optimizer(with_option("fused=True"), _formula(moments))


def _bitsandbytes_optimizers(
    name: str, code: str, moments: int
) -> Iterator[tuple[str, _Optimizer]]:
    """Yield the variants of an optimizer of bitsandbytes. On a CPU, nothing is paged."""
    variants = {"8bit": f"{code}8bit", "paged-8bit": f"Paged{code}8bit", "paged": f"Paged{code}"}
    for variant, optimizer in variants.items():
        is_8bit, is_paged = "8bit" in variant, "paged" in variant
        on_cuda = _bitsandbytes_formula(moments, is_8bit=is_8bit, is_paged=is_paged)
        on_cpu = _bitsandbytes_formula(moments, is_8bit=is_8bit)
        created = f"bitsandbytes.optim.{optimizer}(model.parameters())"
        yield f"{name}-{variant}", _Optimizer(created, on_cuda, on_cpu, not is_paged)


_ADAFACTOR = "transformers.optimization.Adafactor(model.parameters()"
_MUON = "torch.optim.Muon(hidden), torch.optim.AdamW(rest)"

_OPTIMIZERS: dict[str, _Optimizer] = dict(
    [
        *_torch_optimizers(
            "adamw", "AdamW(model.parameters())", 2, _plain_adam, _all_at_once("root")
        ),
        *_bitsandbytes_optimizers("adamw", "AdamW", 2),
        *_torch_optimizers(
            "adam", "Adam(model.parameters())", 2, _plain_adam, _all_at_once("root")
        ),
        *_bitsandbytes_optimizers("adam", "Adam", 2),
        ("adafactor", _Optimizer("torch.optim.Adafactor(model.parameters())", _adafactor_sizes)),
        (
            "adafactor-foreach",
            _Optimizer(
                "torch.optim.Adafactor(model.parameters(), foreach=True)", _adafactor_foreach_sizes
            ),
        ),
        (
            "adafactor-transformers",
            _Optimizer(
                f"{_ADAFACTOR})", _transformers_adafactor(has_moment=False), is_reservable=False
            ),
        ),
        (
            "adafactor-beta1",
            _Optimizer(
                f"{_ADAFACTOR}, beta1=0.9)",
                _transformers_adafactor(has_moment=True),
                is_reservable=False,
            ),
        ),
        *_torch_optimizers("sgd", "SGD(model.parameters())", 0),
        *_torch_optimizers("sgd-momentum", "SGD(model.parameters(), momentum=0.9)", 1),
        *_torch_optimizers(
            "rmsprop",
            "RMSprop(model.parameters())",
            1,
            _one_by_one("root"),
            _all_at_once("root"),
            has_fused=False,
        ),
        *_torch_optimizers(
            "adagrad",
            "Adagrad(model.parameters())",
            1,
            _one_by_one("root"),
            _all_at_once("root", "numerator"),
        ),
        (
            "lion",
            _Optimizer(
                "bitsandbytes.optim.Lion(model.parameters())",
                _bitsandbytes_formula(1, is_8bit=False),
            ),
        ),
        *_bitsandbytes_optimizers("lion", "Lion", 1),
        ("muon", _Optimizer(_MUON, _formula(1, _muon_assignments), is_reservable=False)),
        ("none", _Optimizer("", _formula(0))),
    ]
)

OPTIMIZERS = tuple(_OPTIMIZERS)
"""The names of optimizers whose memory is known."""


def check_optimizer(name: str) -> None:
    """Raise `RematError` for a name that is not in `OPTIMIZERS`."""
    if name not in _OPTIMIZERS:
        raise RematError(
            f"the memory of the optimizer {name!r} is not known; use one of {', '.join(OPTIMIZERS)}"
        )


def optimizer_memory(
    name: str,
    parameters: Sequence[TensorMeta],
    *,
    is_cuda: bool = True,
    gpu: DeviceSpec | None = None,
    embedding_shapes: Collection[tuple[int, ...]] = (),
) -> OptimizerMemory:
    """Return the memory of an optimizer for its parameters, in their order. Without a `gpu`, the
    buffers of reductions are not known.

    Muon updates the matrices that have none of the `embedding_shapes`, which are shapes of the head
    as well; AdamW the other parameters. Raises `RematError` for a name that is not in `OPTIMIZERS`.
    """
    check_optimizer(name)
    rest: list[TensorMeta] = []
    if name == "muon":
        rest = [p for p in parameters if len(p.shape) != 2 or p.shape in embedding_shapes]
        parameters = [
            p for p in parameters if len(p.shape) == 2 and p.shape not in embedding_shapes
        ]
    optimizer = _OPTIMIZERS[name]
    formula = optimizer.formula if is_cuda else optimizer.cpu_formula or optimizer.formula
    state, temporary = formula(parameters, gpu)
    if rest:
        adamw = optimizer_memory("adamw", rest, is_cuda=is_cuda)
        state += adamw.state_sizes_bytes
        temporary = max(temporary, adamw.temporary_sizes_bytes, key=sum)
    return OptimizerMemory(name, optimizer.code, state, temporary, optimizer.is_reservable)


_SMALLER_VARIANTS = {
    "adam": ("fused", "8bit", "paged-8bit"),
    "adamw": ("fused", "8bit", "paged-8bit"),
    "adagrad": ("fused",),
    "rmsprop": ("plain",),
    "lion": ("8bit", "paged-8bit"),
}


def smaller_optimizers(name: str) -> tuple[str, ...]:
    """Return the names of optimizers with the same update rule and less memory, the closest first:
    fused before 8 bits, which rounds the moments. () without any."""
    if name == "adafactor-foreach":
        return ("adafactor",)
    base, _, variant = name.partition("-")
    smaller = _SMALLER_VARIANTS.get(base, ())
    if variant == "paged":
        return ()
    start = smaller.index(variant) + 1 if variant in smaller else 0
    return tuple(f"{base}-{variant}" for variant in smaller[start:])
