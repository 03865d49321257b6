"""Pooling, resizing and padding of images in three layouts."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.software_gpu.workspaces.case import Case, tensor


def cases() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16"):
        shape = (8, 64, 56, 56)
        for x in (
            tensor(*shape, dtype=dtype),
            tensor(*shape, dtype=dtype, order=(0, 2, 3, 1)),
            tensor(*shape, dtype=dtype, order=(1, 0, 2, 3)),
        ):
            order = tuple(sorted(range(4), key=lambda d: (-x.stride[d], d)))
            half = tensor(8, 64, 28, 28, dtype=dtype, order=order)
            double = tensor(8, 64, 112, 112, dtype=dtype, order=order)
            indices = tensor(8, 64, 28, 28, dtype="int64", order=order)
            pool = ((2, 2), (2, 2), (0, 0))
            yield Case("aten.max_pool2d_with_indices.default", (x, *pool, (1, 1), False))
            yield Case(
                "aten.max_pool2d_with_indices_backward.default",
                (half, x, *pool, (1, 1), False, indices),
            )
            yield Case("aten.avg_pool2d.default", (x, *pool, False, True, None))
            yield Case("aten.avg_pool2d_backward.default", (half, x, *pool, False, True, None))
            yield Case("aten._adaptive_avg_pool2d.default", (x, (7, 7)))
            small = tensor(8, 64, 7, 7, dtype=dtype, order=order)
            yield Case("aten._adaptive_avg_pool2d_backward.default", (small, x))
            yield Case("aten.adaptive_max_pool2d.default", (x, (7, 7)))
            for name in ("bilinear", "bicubic"):
                yield Case(f"aten.upsample_{name}2d.default", (x, (112, 112), False, None, None))
                yield Case(
                    f"aten.upsample_{name}2d_backward.default",
                    (double, (112, 112), shape, False, None, None),
                )
            yield Case("aten.upsample_nearest2d.default", (x, (112, 112), None, None))
            yield Case(
                "aten.upsample_nearest2d_backward.default", (double, (112, 112), shape, None, None)
            )
            yield Case("aten.pixel_shuffle.default", (x, 2))
            yield Case("aten.reflection_pad2d.default", (x, (1, 1, 1, 1)))
            yield Case("aten.replication_pad2d.default", (x, (1, 1, 1, 1)))
            padded = tensor(8, 64, 58, 58, dtype=dtype, order=order)
            yield Case("aten.reflection_pad2d_backward.default", (padded, x, (1, 1, 1, 1)))
            yield Case("aten.replication_pad2d_backward.default", (padded, x, (1, 1, 1, 1)))
            yield Case("aten.constant_pad_nd.default", (x, (1, 1, 1, 1), 0.0))
            yield Case("aten.im2col.default", (x, (3, 3), (1, 1), (1, 1), (1, 1)))
            columns = tensor(8, 576, 3136, dtype=dtype)
            yield Case("aten.col2im.default", (columns, (56, 56), (3, 3), (1, 1), (1, 1), (1, 1)))
            grid = tensor(8, 28, 28, 2, dtype=dtype)
            yield Case("aten.grid_sampler_2d.default", (x, grid, 0, 0, False))
            yield Case(
                "aten.grid_sampler_2d_backward.default", (half, x, grid, 0, 0, False, (True, True))
            )
            yield Case("aten.roll.default", (x, (3, 3), (2, 3)))
            yield Case("aten.flip.default", (x, (2, 3)))
