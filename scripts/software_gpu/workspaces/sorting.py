"""Scans, sorts and selections."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.software_gpu.workspaces.case import Case, tensor


def cases() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16", "int64", "int32", "bool"):
        for shape in ((48,), (4096,), (1_000_000,), (8, 2048), (16384, 128), (8, 32000), (2, 24)):
            x = tensor(*shape, dtype=dtype)
            last = len(shape) - 1
            yield Case("aten.cumsum.default", (x, last))
            yield Case("aten.cumprod.default", (x, last))
            if dtype != "bool":
                yield Case("aten.cummax.default", (x, last))
                yield Case("aten.logcumsumexp.default", (x, last))
            if len(shape) > 1:
                yield Case("aten.cumsum.default", (x, 0))
                transposed = tensor(*shape, dtype=dtype, order=(1, 0))
                yield Case("aten.cumsum.default", (transposed, last))
            yield Case("aten.sort.default", (x, last, True))
            yield Case("aten.sort.stable", (x,), {"stable": True, "dim": last, "descending": False})
            if dtype == "bool":
                continue
            for count in (1, 2, 8):
                if count <= shape[-1]:
                    yield Case("aten.topk.default", (x, count, last))
            yield Case("aten.kthvalue.default", (x, 2, last))
            yield Case("aten.flip.default", (x, (last,)))
            yield Case("aten.roll.default", (x, (1,), (last,)))
            if len(shape) > 1:
                yield Case("aten.tril.default", (x,))
    for size in (48, 4096, 1_000_000):
        yield Case("aten.searchsorted.Tensor", (tensor(64), tensor(size)))
        yield Case("aten.bucketize.Tensor", (tensor(size), tensor(64)))
