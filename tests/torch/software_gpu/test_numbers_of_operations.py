"""Operations on the software GPU against the CPU: values, gradients and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.software_gpu

CUDA = "cuda"
Function = Callable[..., Any]


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape)


def moved(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Return tensors on a device, floating-point ones as leaves of `dtype`."""

    def move(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.to(device)
        return tensor.to(device, dtype).detach().requires_grad_()

    return pytree.tree_map_only(Tensor, move, value)


def results(function: Function, inputs: Any, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return outputs and gradients of a function, on the CPU."""
    arguments = moved(inputs, device, dtype)
    leaves = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor) and t.requires_grad]
    outputs = [t for t in pytree.tree_leaves(function(*arguments)) if isinstance(t, Tensor)]
    differentiable = [t for t in outputs if t.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if differentiable:
        torch.manual_seed(1)
        tangents = [torch.randn(t.shape).to(t.device, t.dtype) for t in differentiable]
        gradients = torch.autograd.grad(differentiable, leaves, tangents, allow_unused=True)
    return [t.detach().cpu() for t in (*outputs, *gradients) if t is not None]


OPERATIONS: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "add a number": (lambda x: x + 2.5, (numbers(5, 7),)),
    "multiply by a number": (lambda x: x * 0.1, (numbers(5, 7),)),
    "number to a power": (lambda x: 2.0**x, (numbers(5, 7),)),
    "remainder of integers": (lambda x: x % 3, (torch.arange(12),)),
    "divide integers": (lambda x: x / 3, (torch.arange(12),)),
    "broadcast": (lambda x, y: (x * y).sum(0), (numbers(5, 1, 7), numbers(3, 1))),
    "transposed": (lambda x, y: x.T @ y.T, (numbers(6, 5), numbers(4, 6))),
    "addmm": (torch.addmm, (numbers(4), numbers(3, 5), numbers(5, 4))),
    "baddbmm": (torch.baddbmm, (numbers(2, 3, 4), numbers(2, 3, 5), numbers(2, 5, 4))),
    "linear": (F.linear, (numbers(2, 3, 5), numbers(4, 5), numbers(4))),
    "softmax": (lambda x: x.softmax(1), (numbers(3, 5),)),
    "softmax to float32": (lambda x: x.softmax(1, dtype=torch.float32), (numbers(3, 5),)),
    "log_softmax": (lambda x: x.log_softmax(1), (numbers(3, 5),)),
    "logsigmoid": (F.logsigmoid, (numbers(3, 5),)),
    "gelu": (F.gelu, (numbers(3, 5),)),
    "silu": (F.silu, (numbers(3, 5),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b),
                   (numbers(4, 6), numbers(6), numbers(6))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b),
                   (numbers(3, 4, 5), numbers(4), numbers(4))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), (numbers(4, 6), numbers(6))),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
                   (numbers(8, 4), numbers(4), numbers(4))),
    "instance_norm": (F.instance_norm, (numbers(2, 3, 4, 4),)),
    "weight_norm": (lambda g, v: torch._weight_norm(v, g, 0), (numbers(4, 1), numbers(4, 5))),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1),
               (numbers(2, 3, 8), numbers(4, 3, 3), numbers(4))),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
               (numbers(2, 3, 8, 8), numbers(4, 3, 3, 3), numbers(4))),
    "depthwise conv2d": (lambda x, w: F.conv2d(x, w, groups=4),
                         (numbers(2, 4, 6, 6), numbers(4, 1, 3, 3))),
    "conv3d": (F.conv3d, (numbers(1, 2, 5, 5, 5), numbers(3, 2, 2, 2, 2))),
    "conv_transpose2d": (F.conv_transpose2d, (numbers(2, 3, 5, 5), numbers(3, 4, 3, 3))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (numbers(2, 3, 8, 8),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (numbers(2, 3, 8, 8),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 3), (numbers(2, 3, 8, 8),)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
                    (numbers(2, 3, 4, 4),)),
    "embedding": (lambda i, w: F.embedding(i, w, padding_idx=1),
                  (torch.tensor([[0, 1], [3, 3]]), numbers(5, 4))),
    "cross_entropy": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
                      (numbers(6, 5), torch.tensor([0, 1, 4, -100, 2, 3]))),
    "binary_cross_entropy_with_logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)), (numbers(6),)),
    "index": (lambda x, i: x[i, 1:], (numbers(5, 4), torch.tensor([0, 3, 3]))),
    "boolean mask": (lambda x: x[x > 0], (numbers(5, 4),)),
    "index_put": (lambda x, i: x.clone().index_put((i,), x[:3], accumulate=True),
                  (numbers(5, 4), torch.tensor([0, 3, 3]))),
    "gather": (lambda x, i: x.gather(1, i),
               (numbers(3, 4), torch.tensor([[0, 1], [3, 3], [2, 0]]))),
    "scatter_add": (lambda x, i: torch.zeros_like(x).scatter_add(1, i, x[:, :2]),
                    (numbers(3, 4), torch.tensor([[0, 1], [3, 3], [2, 0]]))),
    "where": (lambda x: torch.where(x > 0, x, 0.1 * x), (numbers(5, 4),)),
    "masked_fill in place": (lambda x: (x * 1).masked_fill_(x > 0, 2.0), (numbers(5, 4),)),
    "cumsum": (lambda x: x.cumsum(1), (numbers(5, 4),)),
    "sort": (lambda x: x.sort(1), (numbers(5, 4),)),
    "topk": (lambda x: x.topk(2), (numbers(5, 4),)),
    "max": (lambda x: x.max(1), (numbers(5, 4),)),
    "norm": (lambda x: x.norm(dim=1), (numbers(5, 4),)),
    "var_mean": (lambda x: torch.var_mean(x, 1), (numbers(5, 4),)),
    "cat and split": (lambda x, y: torch.cat([x, y]).split(2), (numbers(3, 4), numbers(3, 4))),
    "expanded copy": (lambda x: x.expand(4, 5).contiguous(), (numbers(1, 5),)),
    "strided in place": (lambda x: (x * 1)[:, ::2].mul_(3), (numbers(4, 6),)),
    "nonzero": (lambda x: (x > 0).nonzero(), (numbers(4, 6),)),
    "unique": (lambda x: x.unique(return_inverse=True, return_counts=True),
               (torch.tensor([3, 1, 3, 2]),)),
    "bincount": (lambda x: x.bincount(), (torch.tensor([3, 1, 3, 2]),)),
    "repeat_interleave": (lambda x, r: x.repeat_interleave(r, 0),
                          (numbers(3, 2), torch.tensor([2, 0, 3]))),
    "cdist": (lambda x, y: torch.cdist(x.float(), y.float()), (numbers(4, 3), numbers(5, 3))),
    "arange and comparison": (lambda x: (torch.arange(6, device=x.device) < x) * x, (numbers(6),)),
    "foreach": (lambda x, y: torch._foreach_add(torch._foreach_mul([x, y], 2.0), [y, x]),
                (numbers(4), numbers(4))),
    "attention": (F.scaled_dot_product_attention,
                  (numbers(2, 2, 7, 8), numbers(2, 2, 9, 8), numbers(2, 2, 9, 8))),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (numbers(2, 2, 7, 8), numbers(2, 2, 7, 8), numbers(2, 2, 7, 8))),
    "masked attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, q.new_ones(7, 9).tril().bool()),
        (numbers(2, 2, 7, 8), numbers(2, 2, 9, 8), numbers(2, 2, 9, 8))),
    "grouped attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (numbers(2, 4, 7, 8), numbers(2, 2, 9, 8), numbers(2, 2, 9, 8))),
    "checkpoint": (
        lambda x, w: torch.utils.checkpoint.checkpoint(
            lambda y: (y @ w).tanh(), x, use_reentrant=False),
        (numbers(3, 4), numbers(4, 4))),
}  # fmt: skip
LINEAR_ALGEBRA: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "solve": (torch.linalg.solve, (numbers(4, 4), numbers(4, 2))),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.T + torch.eye(4, device=x.device)),
                 (numbers(4, 4),)),
    "fft": (lambda x: torch.view_as_real(torch.fft.rfft(x)), (numbers(3, 8),)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_values_and_gradients_of_the_cpu(
    name: str, dtype: torch.dtype
) -> None:
    function, inputs = OPERATIONS[name]
    expected = results(function, inputs, "cpu", dtype)
    actual = results(function, inputs, CUDA, dtype)
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (0.02, 0.05)
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, check_stride=False, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", LINEAR_ALGEBRA)
def test_operations_of_libraries_that_need_a_device_have_results(name: str) -> None:
    function, inputs = LINEAR_ALGEBRA[name]
    expected = results(function, inputs, "cpu", torch.float32)
    torch.testing.assert_close(results(function, inputs, CUDA, torch.float32), expected)


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(64, device=CUDA),
    "randn": lambda x: torch.randn(64, device=CUDA),
    "randint": lambda x: torch.randint(1 << 20, (64,), device=CUDA),
    "randperm": lambda x: torch.randperm(64, device=CUDA),
    "rand_like": torch.rand_like,
    "uniform_": lambda x: x.clone().uniform_(),
    "normal_": lambda x: x.clone().normal_(),
    "normal": lambda x: torch.normal(x, 1.0),
    "exponential_": lambda x: x.clone().exponential_(),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "geometric_": lambda x: x.clone().geometric_(0.01),
    "random_": lambda x: x.clone().random_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "multinomial": lambda x: x.sigmoid().multinomial(64, replacement=True),
    "poisson": lambda x: torch.poisson(x.abs() * 100),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x.view(1, 64, 1, 1), 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 8, 8)] * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_follow_the_generator(name: str) -> None:
    function = RANDOM[name]
    x = torch.linspace(-2, 2, 64, device=CUDA) + 0.01
    torch.cuda.manual_seed(5)
    cpu_state = torch.get_rng_state()
    state = torch.cuda.get_rng_state()
    first, second = function(x).clone(), function(x).clone()
    assert not torch.equal(first, second), "two operations in a row"
    torch.cuda.set_rng_state(state)
    assert torch.equal(function(x), first), "the same state"
    assert torch.equal(function(x), second)
    torch.cuda.manual_seed(6)
    assert not torch.equal(function(x), first), "another seed"
    torch.cuda.manual_seed(5)
    generator = torch.cuda.default_generators[0]
    generator.set_offset(4)
    assert not torch.equal(function(x), first), "another offset"
    assert torch.equal(torch.get_rng_state(), cpu_state), "the CPU's generator is as before"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_dropout_of_attention_is_the_same_in_the_backward(
    dtype: torch.dtype, has_mask: bool
) -> None:
    """Its output is linear in the values, so the gradient of the values gives it back."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8, device=CUDA, dtype=dtype) for _ in range(3))
    v.requires_grad_()
    mask = torch.ones(16, 16, dtype=torch.bool, device=CUDA).tril() if has_mask else None
    output = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.5)
    (gradient,) = torch.autograd.grad(output, v, torch.ones_like(output))
    ratio = (gradient * v).sum() / output.sum()
    assert ratio.item() == pytest.approx(1.0, abs=0.02)


def test_in_place_results_are_written_once() -> None:
    x = torch.arange(6.0, device=CUDA)
    y = x.view(2, 3)
    y[0].add_(10)
    x[1::2].mul_(2)
    assert x.tolist() == [10.0, 22.0, 12.0, 6.0, 4.0, 10.0]
    out = torch.empty(0, device=CUDA)
    torch.addmm(x.view(2, 3), torch.ones(2, 2, device=CUDA), torch.ones(2, 3, device=CUDA), out=out)
    assert out.tolist() == [[12.0, 24.0, 14.0], [8.0, 6.0, 12.0]]
    x.view(2, 3).addmm_(torch.ones(2, 2, device=CUDA), torch.ones(2, 3, device=CUDA))
    assert x.tolist() == [12.0, 24.0, 14.0, 8.0, 6.0, 12.0]


def test_copies_between_devices_convert() -> None:
    x = torch.arange(6.0).view(2, 3)
    on_gpu = x.T.to(CUDA, torch.bfloat16)
    assert on_gpu.cpu().tolist() == x.T.tolist()
    back = torch.empty(3, 2, dtype=torch.int64)
    back.copy_(on_gpu)
    assert back.tolist() == x.T.tolist()
    assert (on_gpu[2, 1].item(), int(on_gpu.sum())) == (5.0, 15)
    pinned = torch.arange(4.0).pin_memory()
    assert pinned.to(CUDA, non_blocking=True).cpu().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_memory_is_that_of_the_cuda_kernels() -> None:
    """CPU tensors do not count, and the operations inside of a CUDA kernel free their memory."""
    x = torch.randn(1000, 100, device=CUDA)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = (x + 1).softmax(1)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert torch.cuda.memory_allocated() - before == 400_384
    assert peak - torch.cuda.memory_stats()["requested_bytes.all.current"] == y.nbytes


def test_an_operation_without_a_cpu_version_fails_with_its_name() -> None:
    from scripts.software_gpu.numbers.replacement import MissingCounterpartError

    x = torch.randn(4, 3, device=CUDA)
    with pytest.raises(MissingCounterpartError, match="aten::batch_norm_stats"):
        torch.batch_norm_stats(x, 1e-5)
    with pytest.raises(MissingCounterpartError, match="SparseCUDA"):
        x.to_sparse()


def test_an_index_out_of_range_is_an_error() -> None:
    with pytest.raises(IndexError):
        F.embedding(torch.tensor([7], device=CUDA), torch.randn(5, 4, device=CUDA))


def test_numbers_reach_other_threads_and_disabled_modes() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from torch.utils._python_dispatch import _disable_current_modes

    x = torch.arange(4.0, device=CUDA)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (x + 1).tolist()).result() == [1.0, 2.0, 3.0, 4.0]
    with _disable_current_modes():
        assert (x * 2).tolist() == [0.0, 2.0, 4.0, 6.0]
    with torch.inference_mode():
        assert nn.Identity()(x - 1).tolist() == [-1.0, 0.0, 1.0, 2.0]
