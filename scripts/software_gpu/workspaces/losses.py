"""Losses and their gradients, reduced and not."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.software_gpu.workspaces.case import Case, tensor


def cases() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16"):
        for shape in ((2, 24), (8, 3, 32, 32), (256, 4096, 32)):
            x, scalar = tensor(*shape, dtype=dtype), tensor(dtype=dtype)
            transposed = tensor(*shape, dtype=dtype, order=(*range(1, len(shape)), 0))
            for y in (x, transposed):
                for reduction in (0, 1, 2):
                    grad = x if reduction == 0 else scalar
                    for name in ("mse_loss", "soft_margin_loss", "binary_cross_entropy"):
                        extra = (None,) if name == "binary_cross_entropy" else ()
                        yield Case(f"aten.{name}.default", (x, y, *extra, reduction))
                        yield Case(f"aten.{name}_backward.default", (grad, x, y, *extra, reduction))
                    for name in ("smooth_l1_loss", "huber_loss"):
                        yield Case(f"aten.{name}.default", (x, y, reduction, 1.0))
                        yield Case(f"aten.{name}_backward.default", (grad, x, y, reduction, 1.0))
                    for weights in ((None, None), (x, None), (None, x), (x, x)):
                        yield Case(
                            "aten.binary_cross_entropy_with_logits.default",
                            (x, y, *weights, reduction),
                        )
        for rows, classes in ((48, 128), (16384, 50304), (8192, 32000)):
            x = tensor(rows, classes, dtype=dtype)
            target = tensor(rows, dtype="int64")
            scalar = tensor(dtype=dtype)
            for reduction in (0, 1, 2):
                grad = tensor(rows, dtype=dtype) if reduction == 0 else scalar
                args = (target, None, reduction, -100)
                yield Case("aten.nll_loss_forward.default", (x, *args))
                yield Case("aten.nll_loss_backward.default", (grad, x, *args, scalar))
            transposed = tensor(rows, classes, dtype=dtype, order=(1, 0))
            yield Case("aten.nll_loss_forward.default", (transposed, target, None, 1, -100))
            yield Case(
                "aten.nll_loss_backward.default",
                (scalar, transposed, target, None, 1, -100, scalar),
            )
        x, target = tensor(4, 21, 128, 128, dtype=dtype), tensor(4, 128, 128, dtype="int64")
        channels_last = tensor(4, 21, 128, 128, dtype=dtype, order=(0, 2, 3, 1))
        for y in (x, channels_last):
            yield Case("aten.nll_loss2d_forward.default", (y, target, None, 1, -100))
            yield Case(
                "aten.nll_loss2d_backward.default",
                (tensor(dtype=dtype), y, target, None, 1, -100, tensor(dtype=dtype)),
            )
