"""Reductions: sums, means, extrema, norms and variances in several layouts."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.software_gpu.workspaces.case import Case, tensor

from remat.documents.arguments import Literal
from remat.documents.records import TensorMeta

_MATRICES = ((2048, 4096), (8192, 32000), (64, 64), (8192, 64), (100_000, 64), (3, 1_000_003))
_FLOATS = ("float32", "bfloat16", "float16", "float64")


def cases() -> Iterator[Case]:
    for dtype in _FLOATS:
        for rows, columns in _MATRICES:
            for x in (
                tensor(rows, columns, dtype=dtype),
                tensor(rows, columns, dtype=dtype, order=(1, 0)),
            ):
                yield from _reductions_of(x, ((0,), (1,)))
        for shape, dims in (
            ((2, 2048, 4096), ((0, 1), (1,), (2,), (0,))),
            ((16, 256, 56, 56), ((0, 2, 3), (2, 3), (0,), (1,))),
            ((8, 64, 32, 32), ((0, 2, 3), (2, 3))),
            ((4, 1, 2048, 2048), ((0,), (3,), (0, 2))),
            ((1, 2048, 768), ((0,), (0, 1))),
            ((2048,), ((0,),)),
            ((5, 7, 11), ((1,), (0, 2))),
        ):
            x = tensor(*shape, dtype=dtype)
            yield from (Case("aten.sum.dim_IntList", (x, dim, True)) for dim in dims)
            yield from (Case("aten.sum.dim_IntList", (x, dim)) for dim in dims)
        channels_last = tensor(16, 256, 56, 56, dtype=dtype, order=(0, 2, 3, 1))
        yield Case("aten.sum.dim_IntList", (channels_last, (0, 2, 3)))
        yield Case("aten.sum.dim_IntList", (channels_last, (2, 3), True))
        expanded = tensor(8192, 4096, dtype=dtype, stride=(0, 1))
        yield Case("aten.sum.dim_IntList", (expanded, (0,), True))
        unaligned = tensor(8192, 4096, dtype=dtype, stride=(4099, 1), offset=1)
        yield Case("aten.sum.dim_IntList", (unaligned, (0,), True))
        half_aligned = tensor(8192, 4098, dtype=dtype, offset=2)
        yield Case("aten.sum.dim_IntList", (half_aligned, (0,), True))
        # More bytes than 32-bit offsets can address: reduced in parts.
        large = tensor(16384, 50304, dtype=dtype)
        for dim in ((0,), (1,), (0, 1)):
            yield Case("aten.sum.dim_IntList", (large, dim))
        yield Case("aten.mean.dim", (large, (0,)))
        yield Case("aten.amax.default", (large, (1,), True))
    for dtype in ("bfloat16", "float16"):
        for x in (tensor(2048, 4096, dtype=dtype), tensor(16384, 32768, dtype=dtype)):
            for dim in ((0,), (1,)):
                yield Case("aten.sum.dim_IntList", (x, dim), {"dtype": Literal("dtype", "float32")})
                yield Case("aten.mean.dim", (x, dim), {"dtype": Literal("dtype", "float32")})
    for dtype in ("bool", "int32", "int64", "uint8"):
        x = tensor(2048, 4096, dtype=dtype)
        yield Case("aten.sum.default", (x,))
        yield from (Case("aten.sum.dim_IntList", (x, dim)) for dim in ((0,), (1,)))
        yield from (Case("aten.any.dim", (x, dim)) for dim in (0, 1))
        yield from (Case("aten.all.dim", (x, dim)) for dim in (0, 1))
        yield Case("aten.any.default", (x,))
        yield Case("aten.all.default", (x,))
        yield Case("aten.max.default", (x,))
        yield Case("aten.argmax.default", (x, 0))


def _reductions_of(x: TensorMeta, dims: tuple[tuple[int, ...], ...]) -> Iterator[Case]:
    yield Case("aten.sum.default", (x,))
    yield Case("aten.mean.default", (x,))
    yield Case("aten.max.default", (x,))
    yield Case("aten.min.default", (x,))
    yield Case("aten.var.correction", (x,))
    yield Case("aten.prod.default", (x,))
    yield Case("aten.norm.Scalar", (x, 2))
    yield Case("aten.norm.ScalarOpt_dtype", (x, 2), {"dtype": Literal("dtype", x.dtype)})
    yield Case("aten.linalg_vector_norm.default", (x, 2.0))
    yield Case("aten.argmax.default", (x,))
    for dim in dims:
        yield Case("aten.sum.dim_IntList", (x, dim, True))
        yield Case("aten.mean.dim", (x, dim, True))
        yield Case("aten.amax.default", (x, dim, True))
        yield Case("aten.amin.default", (x, dim))
        yield Case("aten.max.dim", (x, dim[0]))
        yield Case("aten.min.dim", (x, dim[0], True))
        yield Case("aten.argmax.default", (x, dim[0]))
        yield Case("aten.argmin.default", (x, dim[0], True))
        yield Case("aten.var.correction", (x, dim))
        yield Case("aten.std.correction", (x, dim))
        yield Case("aten.std_mean.correction", (x, dim))
        yield Case("aten.any.dims", (x, dim))
        yield Case("aten.all.dims", (x, dim, True))
        yield Case(
            "aten.norm.ScalarOpt_dim_dtype",
            (x, 2, dim, True),
            {"dtype": Literal("dtype", x.dtype)},
        )
        yield Case("aten.var_mean.correction", (x, dim))
        yield Case("aten.linalg_vector_norm.default", (x, 2.0, dim))
        yield Case("aten.norm.ScalarOpt_dim", (x, 2, dim, True))
        yield Case("aten.prod.dim_int", (x, dim[0]))
        yield Case("aten.logsumexp.default", (x, dim))
        yield Case("aten.nansum.default", (x, dim))
        yield Case("aten.count_nonzero.dim_IntList", (x, dim))
