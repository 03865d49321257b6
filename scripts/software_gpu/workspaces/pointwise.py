"""Element-wise operators, which have no workspace."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.software_gpu.workspaces.case import Case, tensor

from remat.documents.arguments import Literal


def cases() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16"):
        for x in (tensor(2048, 4096, dtype=dtype), tensor(2048, 4096, dtype=dtype, order=(1, 0))):
            for name in ("gelu", "silu", "relu", "tanh", "exp", "neg", "sigmoid", "clone"):
                yield Case(f"aten.{name}.default", (x,))
            other = "bfloat16" if dtype == "float32" else "float32"
            yield Case("aten._to_copy.default", (x,), {"dtype": Literal("dtype", other)})
            yield Case("aten.add.Tensor", (x, tensor(4096, dtype=dtype)))
            yield Case("aten.mul.Tensor", (x, tensor(2048, 4096, dtype=other)))
            yield Case("aten.native_dropout.default", (x, 0.1, True))
            mask = tensor(2048, 4096, dtype="bool")
            yield Case("aten.native_dropout_backward.default", (x, mask, 1.1))
            for name in ("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward"):
                yield Case(f"aten.{name}.default", (x, tensor(2048, 4096, dtype=dtype)))
            yield Case("aten.glu.default", (x, 1))
            yield Case("aten.glu_backward.default", (tensor(2048, 2048, dtype=dtype), x, 1))
            yield Case("aten.cat.default", ((x, tensor(2048, 4096, dtype=dtype)), 1))
            yield Case("aten.stack.default", ((x, x), 0))
            yield Case("aten.repeat.default", (x, (2, 1)))
            yield Case("aten.tril.default", (x,))
            yield Case("aten.triu.default", (x, 1))
            yield Case("aten._prelu_kernel.default", (x, tensor(1, 1, dtype=dtype)))
            yield Case("aten.cumsum.default", (x, 1))
            yield Case("aten.bernoulli.p", (x, 0.5))
            yield Case("aten.rand_like.default", (x,))
            yield Case("aten.masked_fill.Scalar", (x, mask, 0.0))
            yield Case("aten.where.self", (mask, x, tensor(dtype=dtype)))
            yield Case("aten.maximum.default", (x, x))
            yield Case("aten.pow.Tensor_Scalar", (x, 2))
            yield Case("aten.addcmul.default", (x, x, x))
            yield Case("aten.linalg_vector_norm.default", (x, 2.0, (1,), True))
            yield Case("aten.repeat_interleave.self_int", (x, 2, 0))
