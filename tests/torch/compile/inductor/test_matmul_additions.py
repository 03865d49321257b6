"""Additions of matrix products that Inductor computes with `addmm`, in the planned graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import fx
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

from remat.frontend.compile.inductor.probe import fuse_matmul_additions

A, B, C = (torch.randn(8, 8) for _ in range(3))


def traced(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def operators(half: fx.GraphModule) -> Counter[str]:
    return Counter(str(n.target) for n in half.graph.nodes if n.op == "call_function")


def accumulated(*factors: torch.Tensor) -> torch.Tensor:
    """A weight's gradient in a loop: each product is added to the sum of those before."""
    total = factors[0] @ factors[1]
    for left, right in pairwise(factors[1:]):
        total = total + left @ right
    return total


def test_products_are_added_as_soon_as_they_are_computed() -> None:
    factors = tuple(torch.randn(8, 8) for _ in range(6))
    half = traced(accumulated, *factors)
    assert operators(half) == {"aten.mm.default": 5, "aten.add.Tensor": 4}
    (returned,) = half.graph.output_node().all_input_nodes
    expected = half(*factors)
    name = returned.name
    fuse_matmul_additions(half)
    half.graph.lint()
    assert operators(half) == {"aten.mm.default": 1, "aten.addmm.default": 4}
    (returned,) = half.graph.output_node().all_input_nodes
    assert returned.name == name
    torch.testing.assert_close(half(*factors), expected)


def test_inductor_makes_the_same_additions() -> None:
    """The rewrite in advance gives the operators that Inductor's own pass gives."""
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    factors = tuple(torch.randn(8, 8) for _ in range(6))
    rewritten, expected = traced(accumulated, *factors), traced(accumulated, *factors)
    fuse_matmul_additions(rewritten)
    with V.set_fake_mode(next(iter(expected.graph.nodes)).meta["val"].fake_mode):
        post_grad_passes(expected, is_inference=False)
    assert operators(rewritten) == operators(expected)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda a, b, c: (a @ b) + c.sin(), id="the product would be delayed"),
        pytest.param(lambda a, b, c: c.t() + a @ b, id="the sum has another layout"),
        pytest.param(lambda a, b, c: (p := a @ b) + c + p.sum(), id="the product has other uses"),
        pytest.param(lambda a, b, c: (a @ b) + c.double(), id="other dtypes"),
    ],
)
def test_other_additions_stay(function: Callable[..., torch.Tensor]) -> None:
    half = traced(function, A, B, C)
    before = operators(half)
    fuse_matmul_additions(half)
    assert operators(half) == before


def test_additions_stay_where_inductor_matches_no_patterns() -> None:
    half = traced(lambda a, b, c: c + a @ b, A, B, C)
    with config.patch(pattern_matcher=False):
        fuse_matmul_additions(half)
        assert operators(half)["aten.addmm.default"] == 0
    fuse_matmul_additions(half)
    assert operators(half)["aten.addmm.default"] == 1
