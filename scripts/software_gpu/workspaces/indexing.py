"""Lookups by indices, gradients of embeddings, gather and scatter."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.software_gpu.workspaces.case import Case, tensor


def cases() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16"):
        for tokens, size in ((48, 64), (768, 64), (4096, 768), (16384, 768), (32768, 4096)):
            indices = tensor(tokens, dtype="int64")
            grad = tensor(tokens, size, dtype=dtype)
            for rows in (2, 1000, 32000, 50304):
                for padding in (-1, 0):
                    yield Case(
                        "aten.embedding_dense_backward.default",
                        (grad, indices, rows, padding, False),
                    )
                table = tensor(rows, size, dtype=dtype)
                yield Case("aten.embedding.default", (table, indices))
                for accumulate in (True, False):
                    args = (table, (indices,), grad, accumulate)
                    yield Case("aten.index_put.default", args)
                yield Case("aten.index.Tensor", (table, (indices,)))
                yield Case("aten.index_select.default", (table, 0, indices))
                yield Case("aten.index_add.default", (table, 0, indices, grad))
            by_frequency = (grad, indices, 1000, -1, True)
            yield Case("aten.embedding_dense_backward.default", by_frequency)
            transposed = tensor(tokens, size, dtype=dtype, order=(1, 0))
            yield Case(
                "aten.embedding_dense_backward.default", (transposed, indices, 1000, -1, False)
            )
            expanded = tensor(4, tokens // 4, dtype="int64", stride=(0, 1))
            yield Case(
                "aten.embedding_dense_backward.default",
                (tensor(4, tokens // 4, size, dtype=dtype), expanded, 1000, -1, False),
            )
            yield Case("aten.embedding.default", (tensor(1000, size, dtype=dtype), expanded))
            int32 = tensor(tokens, dtype="int32")
            yield Case("aten.embedding_dense_backward.default", (grad, int32, 1000, -1, False))
        x = tensor(8, 512, 1000, dtype=dtype)
        grid = tensor(8, 512, 1, dtype="int64")
        rows, columns = tensor(8, 1, dtype="int64"), tensor(1, 512, dtype="int64")
        for accumulate in (True, False):
            picked = tensor(8, 512, 1000, dtype=dtype)
            yield Case("aten.index_put.default", (x, (rows, columns), picked, accumulate))
            value = tensor(dtype=dtype)
            yield Case("aten.index_put.default", (x, (rows, columns), value, accumulate))
            last = tensor(64, dtype="int64")
            picked = tensor(8, 512, 64, dtype=dtype)
            yield Case("aten.index_put.default", (x, (None, None, last), picked, accumulate))
            picked = tensor(8, 64, 64, dtype=dtype)
            pair = (tensor(64, 1, dtype="int64"), last)
            yield Case("aten.index_put.default", (x, (None, *pair), picked, accumulate))
            picked = tensor(64, 512, dtype=dtype)
            separated = (last, None, last)
            yield Case("aten.index_put.default", (x, separated, picked, accumulate))
            channels_last = tensor(8, 64, 32, 32, dtype=dtype, order=(0, 2, 3, 1))
            nearest = (None, None, tensor(64, 1, dtype="int64"), last)
            picked = tensor(8, 64, 64, 64, dtype=dtype)
            yield Case(
                "aten._unsafe_index_put.default", (channels_last, nearest, picked, accumulate)
            )
            yield Case("aten._unsafe_index.Tensor", (channels_last, nearest))
        yield Case("aten.index.Tensor", (x, (rows, columns)))
        yield Case("aten.index.Tensor", (x, (None, columns, tensor(64, 1, dtype="int64"))))
        yield Case(
            "aten.index.Tensor", (x, (tensor(64, dtype="int64"), None, tensor(64, dtype="int64")))
        )
        yield Case("aten.gather.default", (x, 2, grid))
        yield Case("aten.gather.default", (x, 1, grid))
        yield Case("aten.scatter.src", (x, 2, grid, tensor(8, 512, 1, dtype=dtype)))
        yield Case("aten.scatter.value", (x, 2, grid, 1.0))
        yield Case("aten.scatter_add.default", (x, 2, grid, tensor(8, 512, 1, dtype=dtype)))
        yield Case("aten.scatter_reduce.two", (x, 2, grid, tensor(8, 512, 1, dtype=dtype), "amax"))
        yield Case(
            "aten.gather_backward.default", (tensor(8, 512, 1, dtype=dtype), x, 2, grid, False)
        )
        yield Case("aten.index_select.default", (x, 2, tensor(64, dtype="int64")))
        yield Case(
            "aten.index_add.default",
            (x, 2, tensor(64, dtype="int64"), tensor(8, 512, 64, dtype=dtype)),
        )
        yield Case("aten.index_fill.int_Scalar", (x, 2, tensor(64, dtype="int64"), 0.0))
        yield Case(
            "aten.index_copy.default",
            (x, 2, tensor(64, dtype="int64"), tensor(8, 512, 64, dtype=dtype)),
        )
        yield Case("aten.take.default", (x, tensor(64, dtype="int64")))
        yield Case("aten.masked_fill.Scalar", (x, tensor(8, 512, 1, dtype="bool"), 0.0))
        yield Case("aten.masked_scatter.default", (x, tensor(8, 512, 1000, dtype="bool"), x))
        yield Case("aten.where.self", (tensor(8, 512, 1, dtype="bool"), x, tensor(dtype=dtype)))
        yield Case("aten.select_scatter.default", (x, tensor(512, 1000, dtype=dtype), 0, 1))
        yield Case("aten.slice_scatter.default", (x, tensor(4, 512, 1000, dtype=dtype), 0, 0, 4))
        yield Case("aten.slice_backward.default", (x, (16, 512, 1000), 0, 0, 8, 1))
        yield Case(
            "aten.select_backward.default", (tensor(512, 1000, dtype=dtype), (8, 512, 1000), 0, 1)
        )
