"""Parts of the software GPU, checked on the CPU: CPU versions of CUDA's operations, the
seeds of random numbers, and libdevice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scripts.software_gpu.numbers import libdevice
from scripts.software_gpu.numbers.allocations import ALLOCATIONS
from scripts.software_gpu.numbers.counterparts import COUNTERPARTS, counterpart_of
from scripts.software_gpu.numbers.operators import (
    NO_RESULT_TO_COMPUTE,
    SPLIT_INTO_REPLACED,
    Operator,
    replaced_operators,
    words,
)
from scripts.software_gpu.numbers.random_numbers import PhiloxState, keep_mask
from torch import Tensor

aten = torch.ops.aten
STATE = PhiloxState(seed=7, offset=12)


def counterpart(name: str, arguments: Mapping[str, Any], state: PhiloxState | None = None) -> Any:
    """Call the CPU version of an operation with its default arguments."""
    function = counterpart_of(f"aten::{name}")
    assert function is not None
    defaults = Operator(getattr(aten, name).default).defaults
    return function({**defaults, **arguments}, state)


@pytest.mark.parametrize("names", [COUNTERPARTS, ALLOCATIONS, NO_RESULT_TO_COMPUTE,
                                   SPLIT_INTO_REPLACED])  # fmt: skip
def test_the_tables_name_operations_of_torch(names: Mapping[str, Any]) -> None:
    missing = []
    for name in names:
        base, _, overload = name.partition(".")
        packet = getattr(aten, base, None)
        if packet is None or (overload and overload not in packet.overloads()):
            missing.append(name)
    assert not missing


def test_views_and_allocations_are_not_replaced() -> None:
    replaced = {operator.name for operator in replaced_operators()}
    assert {"aten::copy_", "aten::convolution", "aten::add.Scalar"} <= replaced
    for name in ("view", "transpose.int", "detach", "empty.memory_format", "t_", "zeros", "linear"):
        assert f"aten::{name}" not in replaced


def test_random_numbers_are_a_function_of_seed_and_offset() -> None:
    def numbers(seed: int, offset: int) -> Tensor:
        return torch.rand(64, generator=PhiloxState(seed, offset).generator())

    assert torch.equal(numbers(7, 12), numbers(7, 12))
    others = [numbers(7, 16), numbers(8, 12), numbers(-1, 12), numbers(2**63, 12)]
    assert not any(torch.equal(numbers(7, 12), other) for other in others)
    assert torch.equal(numbers(-1, 12), numbers(2**64 - 1, 12)), "as int64 and as uint64"


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 1.0])
def test_masks_drop_as_many_elements_as_they_are_to(dropout: float) -> None:
    mask = keep_mask(STATE, (100, 1000), dropout)
    assert mask.float().mean().item() == pytest.approx(1 - dropout, abs=0.005)


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return attention and its logsumexp by plain operations."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    weights = scores.softmax(-1)
    if dropout:
        weights = weights * keep_mask(STATE, tuple(weights.shape), dropout) / (1 - dropout)
    return weights @ value, scores.logsumexp(-1)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_attention(heads: int, dropout: float, is_causal: bool) -> None:
    torch.manual_seed(0)
    inputs = leaf(2, 4, 9, 8), leaf(2, heads, 9, 8), leaf(2, heads, 9, 8)
    expected, logsumexp = reference_attention(*inputs, None, is_causal, dropout)
    gradient = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, inputs, gradient)
    named = dict(zip(("query", "key", "value"), (t.detach() for t in inputs), strict=True))
    options = {"dropout_p": dropout, "is_causal": is_causal}
    results = counterpart("_scaled_dot_product_flash_attention", named | options, STATE)
    torch.testing.assert_close(results[0], expected.detach())
    torch.testing.assert_close(results[1], logsumexp.detach())
    saved = {"out": results[0], "logsumexp": results[1], "grad_out": gradient}
    saved |= {"philox_seed": results[6], "philox_offset": torch.empty(0)}
    actual = counterpart("_scaled_dot_product_flash_attention_backward", named | options | saved)
    torch.testing.assert_close(actual, gradients)
    if dropout:
        wrong = saved | {"philox_seed": torch.tensor([7, 16], dtype=torch.uint64)}
        other = counterpart("_scaled_dot_product_flash_attention_backward", named | options | wrong)
        assert not torch.allclose(other[0], gradients[0]), "another offset"


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("has_bias", [False, True])
def test_memory_efficient_attention(dropout: float, has_bias: bool) -> None:
    torch.manual_seed(0)
    inputs = leaf(2, 4, 9, 8), leaf(2, 4, 11, 8), leaf(2, 4, 11, 8)
    bias = leaf(2, 1, 9, 11) if has_bias else None
    expected, logsumexp = reference_attention(*inputs, bias, False, dropout)
    gradient = torch.randn_like(expected)
    differentiated = inputs if bias is None else (*inputs, bias)
    gradients = torch.autograd.grad(expected, differentiated, gradient)
    named: dict[str, Any] = dict(zip(("query", "key", "value"), inputs, strict=True))
    named = {name: tensor.detach() for name, tensor in named.items()}
    named |= {"attn_bias": None if bias is None else bias.detach(), "dropout_p": dropout}
    results = counterpart(
        "_scaled_dot_product_efficient_attention", named | {"compute_log_sumexp": True}, STATE
    )
    torch.testing.assert_close(results[0], expected.detach())
    assert results[1].shape == (2, 4, 32), "padded as CUDA's kernel does"
    torch.testing.assert_close(results[1][..., :9], logsumexp.detach())
    saved = {"out": results[0], "logsumexp": results[1], "grad_out_": gradient}
    saved |= {"philox_seed": results[2], "philox_offset": results[3]}
    actual = counterpart(
        "_scaled_dot_product_efficient_attention_backward",
        named | saved | {"grad_input_mask": [True, True, False, has_bias]},
    )
    assert actual[2] is None
    for one, other in zip((*actual[:2], actual[3]), (*gradients[:2], *gradients[3:]), strict=False):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("has_bias", [False, True])
def test_lstm_cell(has_bias: bool) -> None:
    torch.manual_seed(0)
    cell = torch.nn.LSTMCell(5, 6, bias=has_bias)
    x, hx, cx = leaf(3, 5), leaf(3, 6), leaf(3, 6)
    hy, cy = cell(x, (hx, cx))
    gates = [(x @ cell.weight_ih.T).detach(), (hx @ cell.weight_hh.T).detach()]
    biases = [cell.bias_ih.detach(), cell.bias_hh.detach()] if has_bias else [None, None]
    names = ("input_gates", "hidden_gates", "cx", "input_bias", "hidden_bias")
    arguments = dict(zip(names, (*gates, cx.detach(), *biases), strict=True))
    results = counterpart("_thnn_fused_lstm_cell", arguments)
    torch.testing.assert_close(results[:2], (hy.detach(), cy.detach()))
    of_hy, of_cy = torch.randn_like(hy), torch.randn_like(cy)
    parameters = (cx, *((cell.bias_ih,) if has_bias else ()))
    gradients = torch.autograd.grad((hy, cy), parameters, (of_hy, of_cy))
    of_gates, of_cx, of_bias = counterpart(
        "_thnn_fused_lstm_cell_backward_impl",
        {
            "grad_hy": of_hy, "grad_cy": of_cy, "cx": cx.detach(), "cy": results[1],
            "workspace": results[2], "has_bias": has_bias,
        },
    )  # fmt: skip
    torch.testing.assert_close(of_cx, gradients[0])
    if has_bias:
        torch.testing.assert_close(of_bias, gradients[1])
        torch.testing.assert_close(of_gates.sum(0), gradients[1])


def test_gru_cell() -> None:
    torch.manual_seed(0)
    cell = torch.nn.GRUCell(5, 6)
    x, hx = leaf(3, 5), leaf(3, 6)
    hy = cell(x, hx)
    arguments = {
        "input_gates": (x @ cell.weight_ih.T).detach(),
        "hidden_gates": (hx @ cell.weight_hh.T).detach(),
        "hx": hx.detach(),
        "input_bias": cell.bias_ih.detach(),
        "hidden_bias": cell.bias_hh.detach(),
    }
    actual, workspace = counterpart("_thnn_fused_gru_cell", arguments)
    torch.testing.assert_close(actual, hy.detach())
    assert workspace.shape == (3, 30)
    of_hy = torch.randn_like(hy)
    expected = torch.autograd.grad(hy, (cell.bias_ih, cell.bias_hh, x), of_hy)
    of_input, _, of_hx, *of_biases = counterpart(
        "_thnn_fused_gru_cell_backward",
        {"grad_hy": of_hy, "workspace": workspace, "has_bias": True},
    )
    torch.testing.assert_close(tuple(of_biases), expected[:2])
    torch.testing.assert_close(of_input @ cell.weight_ih.detach(), expected[2])
    assert of_hx.shape == hx.shape


def test_histograms_of_integers() -> None:
    tokens = torch.tensor([0, 3, 3, 1, 7])
    arguments = {"self": tokens, "bins": 4, "min": 0, "max": 3}
    counterpart = counterpart_of("aten::histc")
    assert counterpart is not None
    assert counterpart(arguments, None).tolist() == [1, 1, 0, 2]


def test_rms_norm_backward() -> None:
    torch.manual_seed(0)
    x, weight = leaf(3, 4, 8), leaf(8)
    rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    gradient = torch.randn(3, 4, 8)
    expected = torch.autograd.grad(x * rstd * weight, (x, weight), gradient)
    actual = counterpart(
        "_fused_rms_norm_backward",
        {
            "grad_out": gradient, "input": x.detach(), "normalized_shape": [8],
            "rstd": rstd.detach(), "weight": weight.detach(), "output_mask": [True, True],
        },
    )  # fmt: skip
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_returns_statistics_and_updates_the_running_ones(training: bool) -> None:
    torch.manual_seed(0)
    x, mean, variance = torch.randn(8, 3), torch.randn(3), torch.rand(3) + 0.5
    norm = torch.nn.BatchNorm1d(3).train(training)
    norm.running_mean, norm.running_var = mean.clone(), variance.clone()
    expected = norm(x)
    arguments = {
        "input": x.bfloat16(), "weight": norm.weight.detach(), "bias": norm.bias.detach(),
        "running_mean": mean, "running_var": variance, "training": training, "momentum": 0.1,
        "eps": 1e-5,
    }  # fmt: skip
    actual, saved_mean, saved_rstd = counterpart("native_batch_norm", arguments)
    torch.testing.assert_close(actual, expected.detach(), rtol=2e-2, atol=2e-2)
    statistics = (x.mean(0), x.var(0, correction=0)) if training else (mean, variance)
    torch.testing.assert_close(saved_mean, statistics[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(saved_rstd, statistics[1].rsqrt(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(mean, norm.running_mean, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_products_of_half_precision_with_a_float32_result(name: str) -> None:
    torch.manual_seed(0)
    batch = (2,) if "b" in name[:1] else ()
    left, right = (torch.randn(*batch, 4, 4).bfloat16() for _ in range(2))
    added = torch.randn(*batch, 4, 4)
    arguments: dict[str, Any] = {"self": left, "mat2": right}
    expected = left.float() @ right.float()
    if name == "addmm":
        arguments = {"self": added, "mat1": left, "mat2": right, "beta": 2.0}
        expected = expected + 2 * added
    elif name == "baddbmm":
        arguments = {"self": added, "batch1": left, "batch2": right, "alpha": 3.0}
        expected = 3 * expected + added
    function = counterpart_of(f"aten::{name}.dtype")
    assert function is not None
    torch.testing.assert_close(function(arguments, None), expected)
    assert counterpart_of(f"aten::{name}") is None


POSITIVE = {"acosh": 1.5, "log": 0.0, "log2": 0.0, "log10": 0.0, "sqrt": 0.0, "rsqrt": 0.0}
TORCH_NAMES: dict[str, Callable[..., Tensor]] = {
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "erfcx": torch.special.erfcx,
    "j0": torch.special.bessel_j0,
    "nearbyint": torch.round,
    "pow": torch.pow,
    "ldexp": torch.ldexp,
    "copysign": torch.copysign,
    "fma": lambda x, y, z: x * y + z,
}
UNARY = words(
    """
    abs acos acosh asin asinh atan atanh ceil cos cosh cyl_bessel_i0 cyl_bessel_i1 erf erfc erfcx
    erfinv exp exp2 expm1 floor isinf isnan j0 lgamma log log10 log1p log2 nearbyint rsqrt signbit
    sin sinh sqrt tan tanh trunc
    """
)


@pytest.mark.parametrize("name", sorted(UNARY))
def test_functions_of_libdevice_are_those_of_torch(name: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(1000) * 1.9 - 0.95
    if name in POSITIVE:
        x = x.abs() + POSITIVE[name]
    actual = libdevice.evaluate(name, [x.numpy()], np.dtype(np.float32))
    function = TORCH_NAMES.get(name) or getattr(torch, name)
    torch.testing.assert_close(torch.from_numpy(actual), function(x).float())


@pytest.mark.parametrize("name", ["atan2", "copysign", "fmod", "hypot", "nextafter", "pow"])
def test_functions_of_two_arguments_are_those_of_torch(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(1000) + 0.5, torch.randn(1000)
    actual = libdevice.evaluate(name, [x.numpy(), y.numpy()], np.dtype(np.float32))
    torch.testing.assert_close(torch.from_numpy(actual), getattr(torch, name)(x, y))


def test_a_function_of_an_element_does_not_depend_on_its_place() -> None:
    x = torch.randn(1037).numpy()
    whole = libdevice.evaluate("tanh", [x], np.dtype(np.float32))
    parts = [
        libdevice.evaluate("tanh", [x[i : i + 3]], np.dtype(np.float32)) for i in range(0, 1037, 3)
    ]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_an_unknown_function_of_libdevice_fails_with_its_name() -> None:
    with pytest.raises(NotImplementedError, match=r"libdevice\.norm4d"):
        libdevice.evaluate("norm4d", [np.zeros(1)], np.dtype(np.float32))
