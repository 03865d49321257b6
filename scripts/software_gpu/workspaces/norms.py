"""Normalisations and softmax, in several layouts."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.software_gpu.workspaces.case import Case, tensor

from remat.documents.arguments import Literal


def cases() -> Iterator[Case]:
    mask = (True, True, True)
    for dtype in ("float32", "bfloat16", "float64"):
        for rows, size in (
            (48, 64),
            (2048, 4096),
            (65536, 64),
            (65568, 64),
            (100_000, 2112),
            (100_000, 2080),
        ):
            x, w = tensor(rows, size, dtype=dtype), tensor(size, dtype=dtype)
            statistics = "float64" if dtype == "float64" else "float32"
            m = tensor(rows, 1, dtype=statistics)
            transposed = tensor(rows, size, dtype=dtype, order=(1, 0))
            for grad, value in ((x, x), (transposed, x), (x, transposed), (transposed, transposed)):
                yield Case("aten.native_layer_norm.default", (value, (size,), w, w, 1e-5))
                for bias, outputs in (
                    (w, mask),
                    (None, (True, True, False)),
                    (w, (True, False, False)),
                ):
                    yield Case(
                        "aten.native_layer_norm_backward.default",
                        (grad, value, (size,), m, m, w, bias, outputs),
                    )
                yield Case(
                    "aten.native_layer_norm_backward.default",
                    (grad, value, (size,), m, m, None, None, (True, False, False)),
                )
                yield Case("aten._fused_rms_norm.default", (value, (size,), w, 1e-5))
                yield Case(
                    "aten._fused_rms_norm_backward.default",
                    (grad, value, (size,), m, w, (True, True)),
                )
                for name in ("_softmax", "_log_softmax"):
                    for dim in (0, 1):
                        yield Case(f"aten.{name}.default", (value, dim, False))
                        yield Case(
                            f"aten.{name}_backward_data.default",
                            (grad, value, dim, Literal("dtype", dtype)),
                        )
        for batch, channels, height, groups in (
            (8, 32, 32, 16),
            (2, 320, 64, 32),
            (4, 64, 1, 8),
            (16, 512, 8, 1),
        ):
            shape = (batch, channels, height, height)
            plain = tensor(*shape, dtype=dtype)
            channels_last = tensor(*shape, dtype=dtype, order=(0, 2, 3, 1))
            w = tensor(channels, dtype=dtype)
            area = height * height
            m = tensor(batch, groups, dtype=dtype)
            for grad, value in (
                (plain, plain),
                (channels_last, plain),
                (plain, channels_last),
                (channels_last, channels_last),
            ):
                sizes = (batch, channels, area, groups)
                yield Case("aten.native_group_norm.default", (value, w, w, *sizes, 1e-5))
                yield Case("aten.native_group_norm.default", (value, None, None, *sizes, 1e-5))
                yield Case(
                    "aten.native_group_norm_backward.default", (grad, value, m, m, w, *sizes, mask)
                )
                yield Case(
                    "aten.native_group_norm_backward.default",
                    (grad, value, m, m, None, *sizes, (True, False, False)),
                )
                running = (w, w)
                saved = (
                    tensor(channels, dtype="float64" if dtype == "float64" else "float32"),
                ) * 2
                for is_training in (True, False):
                    yield Case(
                        "aten.native_batch_norm.default",
                        (value, w, w, *running, is_training, 0.1, 1e-5),
                    )
                    yield Case(
                        "aten.native_batch_norm_backward.default",
                        (grad, value, w, *running, *saved, is_training, 1e-5, mask),
                    )
                yield Case(
                    "aten.batch_norm_backward.default",
                    (
                        grad,
                        value,
                        w,
                        *running,
                        *saved,
                        True,
                        1e-5,
                        mask,
                        tensor(0, dtype="uint8"),
                    ),
                )
