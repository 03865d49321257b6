"""Matrix products of operands with dense and other layouts."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.software_gpu.workspaces.case import Case, tensor

from remat.documents.arguments import Literal


def cases() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16"):
        bias = tensor(4096, dtype=dtype)
        for left in (
            tensor(2048, 1024, dtype=dtype),
            tensor(2048, 1024, dtype=dtype, order=(1, 0)),
            tensor(2048, 1024, dtype=dtype, stride=(2048, 2)),
            tensor(2048, 1024, dtype=dtype, stride=(0, 0)),
            tensor(2048, 1024, dtype=dtype, stride=(0, 1)),
            tensor(2048, 1024, dtype=dtype, stride=(1024, 0)),
            tensor(2048, 1024, dtype=dtype, stride=(3072, 1), offset=1024),
        ):
            for right in (
                tensor(1024, 4096, dtype=dtype),
                tensor(1024, 4096, dtype=dtype, order=(1, 0)),
                tensor(1024, 4096, dtype=dtype, stride=(0, 0)),
                tensor(1024, 4096, dtype=dtype, stride=(8192, 2)),
            ):
                yield Case("aten.mm.default", (left, right))
                yield Case("aten.addmm.default", (bias, left, right))
                yield Case("aten._addmm_activation.default", (bias, left, right))
                if dtype != "float32":
                    yield Case("aten.mm.dtype", (left, right, Literal("dtype", "float32")))
        for left in (
            tensor(192, 512, 64, dtype=dtype),
            tensor(192, 512, 64, dtype=dtype, order=(0, 2, 1)),
            tensor(192, 512, 64, dtype=dtype, order=(1, 0, 2)),
            tensor(192, 512, 64, dtype=dtype, order=(1, 2, 0)),
            tensor(192, 512, 64, dtype=dtype, stride=(0, 64, 1)),
            tensor(192, 512, 64, dtype=dtype, stride=(0, 0, 0)),
            tensor(192, 512, 64, dtype=dtype, stride=(65536, 128, 2)),
        ):
            for right in (
                tensor(192, 64, 512, dtype=dtype),
                tensor(192, 64, 512, dtype=dtype, order=(0, 2, 1)),
                tensor(192, 64, 512, dtype=dtype, stride=(65536, 1024, 2)),
            ):
                yield Case("aten.bmm.default", (left, right))
                if dtype != "float32":
                    yield Case("aten.bmm.dtype", (left, right, Literal("dtype", "float32")))
                yield Case("aten.baddbmm.default", (tensor(512, dtype=dtype), left, right))
        vector = tensor(1024, dtype=dtype)
        for matrix in (
            tensor(2048, 1024, dtype=dtype),
            tensor(2048, 1024, dtype=dtype, stride=(2048, 2)),
            tensor(2048, 1024, dtype=dtype, stride=(0, 0)),
        ):
            for operand in (
                vector,
                tensor(1024, dtype=dtype, stride=(2,)),
                tensor(1024, dtype=dtype, stride=(0,)),
            ):
                yield Case("aten.mv.default", (matrix, operand))
                yield Case("aten.addmv.default", (tensor(2048, dtype=dtype), matrix, operand))
                yield Case("aten.dot.default", (vector, operand))
        yield Case(
            "aten.matmul.default",
            (tensor(4, 512, 1024, dtype=dtype), tensor(1024, 4096, dtype=dtype)),
        )
