"""Flash attention and memory-efficient attention, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.software_gpu.workspaces.case import Case, tensor


def cases() -> Iterator[Case]:
    seeds = (tensor(dtype="int64", device="cpu"), tensor(dtype="int64", device="cpu"))
    flash_seeds = (tensor(2, dtype="uint64"), tensor(dtype="uint64"))
    for batch, heads, queries, keys, size in (
        (2, 4, 24, 24, 16),
        (1, 1, 64, 4096, 64),
        (1, 2, 1, 8192, 64),
        (1, 32, 2048, 2048, 128),
        (4, 12, 1024, 1024, 64),
        (16, 12, 512, 512, 64),
        (16, 32, 128, 128, 80),
        (2, 8, 1000, 77, 40),
        (2, 16, 300, 300, 96),
        (1, 8, 2048, 2048, 256),
        (2, 8, 256, 256, 160),
        (64, 12, 197, 197, 64),
    ):
        score_shape = (batch, heads, queries, keys)
        for dtype in ("float32", "bfloat16", "float16"):
            # Heads in the order of a linear layer's output, as models have them.
            q, k = (
                tensor(batch, heads, tokens, size, dtype=dtype, order=(0, 2, 1, 3))
                for tokens in (queries, keys)
            )
            lse = tensor(batch, heads, -(-queries // 32) * 32)
            bias = tensor(*score_shape, dtype=dtype)
            head_major = tensor(batch, heads, queries, size, dtype=dtype)
            for dropout_p in (0.0, 0.1):
                yield Case(
                    "aten._scaled_dot_product_efficient_attention.default",
                    (q, k, k, None, True, dropout_p),
                )
                for grad in (q, head_major):
                    yield Case(
                        "aten._scaled_dot_product_efficient_attention_backward.default",
                        (grad, q, k, k, None, q, lse, *seeds, dropout_p, (True, True, True, False)),
                    )
                if keys % 8 == 0:
                    yield Case(
                        "aten._scaled_dot_product_efficient_attention_backward.default",
                        (q, q, k, k, bias, q, lse, *seeds, dropout_p, (True, True, True, True)),
                    )
                if dtype == "float32":
                    continue
                yield Case(
                    "aten._scaled_dot_product_flash_attention.default",
                    (q, k, k, dropout_p, queries == keys),
                )
                flash_lse = tensor(batch, heads, queries)
                for grad in (q, head_major):
                    yield Case(
                        "aten._scaled_dot_product_flash_attention_backward.default",
                        (
                            grad,
                            q,
                            k,
                            k,
                            q,
                            flash_lse,
                            None,
                            None,
                            queries,
                            keys,
                            dropout_p,
                            False,
                            *flash_seeds,
                        ),
                    )
                if heads % 4 == 0:
                    few = tensor(batch, heads // 4, keys, size, dtype=dtype, order=(0, 2, 1, 3))
                    yield Case(
                        "aten._scaled_dot_product_flash_attention.default",
                        (q, few, few, dropout_p, False),
                    )
                    yield Case(
                        "aten._scaled_dot_product_flash_attention_backward.default",
                        (
                            q,
                            q,
                            few,
                            few,
                            q,
                            flash_lse,
                            None,
                            None,
                            queries,
                            keys,
                            dropout_p,
                            False,
                            *flash_seeds,
                        ),
                    )
