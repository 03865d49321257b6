"""A trace for a GPU that this machine lacks: its operations, its shapes, and its uses."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.models import FAMILIES, PLAIN, Case, WithParts, gpt2
from tests.helpers.training.recorded_steps import assert_same, eager_step, run_step
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat.commands.common.summaries import trace_report
from remat.costs.trace_costs import _warn_once, device_mismatch_warning
from remat.documents.arguments import Literal, Ref
from remat.documents.records import TensorMeta
from remat.documents.trace import Trace
from remat.frontend.capture.eager_kernels.attention import AttentionCall, select_attention_kernel
from remat.frontend.capture.eager_kernels.autocast import AutocastCache
from remat.frontend.capture.eager_kernels.overrides import eager_kernel_overrides
from remat.frontend.capture.trace import _reject_multiple_gpus
from remat.frontend.common.target_gpu import TargetGpu, find_target_gpu
from remat.frontend.memory.device_memory import keeps_cublas_workspaces
from remat.frontend.runtime.lower import program_on_model_device
from remat.passes.device_placement import program_on_device, trace_on_device
from remat.rewrite import BATCH_NORM, BATCH_NORM_CUDA

H100, A100, V100, L4 = (9, 0), (8, 0), (7, 0), (8, 9)
VERSION = tuple(int(n) for n in torch.__version__.split(".")[:2])
IS_TORCH_2_14 = VERSION >= (2, 14)
ODD_DROPOUT, ODD_DROPOUT_MASKED = ("flash", "efficient") if VERSION >= (2, 12) else ("cudnn",) * 2
"""The kernels with a dropout that is no multiple of 1/16, which cuDNN refuses from 2.12 on."""
TOKENS = 40  # no other dimension of the models is as long


def case_of(family: str, dtype: torch.dtype = torch.float32) -> Case:
    torch.manual_seed(0)
    case = gpt2() if family == "gpt2" else FAMILIES[family]()

    def fit(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2:
            return x[:, :TOKENS].contiguous()
        return x.to(dtype) if x.is_floating_point() else x

    case.model = case.model.to(dtype)
    case.args = tuple(map(fit, case.args))
    case.kwargs = {key: fit(x) for key, x in case.kwargs.items()}
    return case


def traced(case: Case, device: str = "h100") -> Trace:
    return remat.trace(case.model, case.args, case.kwargs, device=device)


def targets(trace: Trace) -> set[str]:
    return {node.target for node in trace.nodes}


# -- the families ---------------------------------------------------------------------------

_SDPA = "aten._scaled_dot_product_{}_attention.default"
_EFFICIENT, _FLASH, _CUDNN = map(_SDPA.format, ("efficient", "flash", "cudnn"))
_DROPOUT, _LAYER_NORM = "aten.native_dropout.default", "aten.native_layer_norm.default"
_ON_CPU = ("_for_cpu", "mkldnn", "bernoulli", "_safe_softmax", "_native_batch_norm_legit")

EXPECTED: dict[tuple[str, torch.dtype], set[str]] = {
    ("gpt2", torch.float32): {_EFFICIENT, _DROPOUT, _LAYER_NORM},
    ("gpt2", torch.bfloat16): {_SDPA.format(ODD_DROPOUT), _DROPOUT, _LAYER_NORM},
    ("llama", torch.bfloat16): {_CUDNN},
    ("bert", torch.float32): {_EFFICIENT, _DROPOUT, _LAYER_NORM},
    ("bert", torch.bfloat16): {_SDPA.format(ODD_DROPOUT_MASKED), _DROPOUT, _LAYER_NORM},
    ("vit", torch.float32): {_EFFICIENT, _DROPOUT, _LAYER_NORM},
    ("vit", torch.bfloat16): {_CUDNN, _DROPOUT, _LAYER_NORM},  # none in attention
    ("resnet", torch.float32): {BATCH_NORM_CUDA, "aten.batch_norm_backward.default"},
    ("resnet", torch.bfloat16): {BATCH_NORM_CUDA, "aten.batch_norm_backward.default"},
}


@pytest.mark.quick_cases("gpt2-dtype1")
@pytest.mark.parametrize(("family", "dtype"), EXPECTED)
def test_a_trace_for_a_gpu_has_the_operations_of_the_gpu(family: str, dtype: torch.dtype) -> None:
    trace = traced(case_of(family, dtype))
    targets_on_gpu = targets(trace)
    assert targets_on_gpu >= EXPECTED[family, dtype]
    assert not [name for name in targets_on_gpu for word in _ON_CPU if word in name]
    assert not scores(trace, tokens(family))
    metas = [p.tensor for p in trace.placeholders]
    metas += [r.tensor for node in trace.nodes for r in node.results]
    assert trace.device == "cuda:0"
    assert [meta for meta in metas if meta.device != "cuda:0"] == [
        result.tensor
        for node in trace.nodes
        for result in node.results
        if node.target == _EFFICIENT and node.random and result.position in (2, 3)
    ]
    named = {a.text for n in trace.nodes for a in n.kwargs.values() if isinstance(a, Literal)}
    assert "cpu" not in named
    assert trace.library_bytes == (2 if keeps_cublas_workspaces() else 1) * 32 << 20


def tokens(family: str) -> int:
    return 65 if family == "vit" else TOKENS


def scores(trace: Trace, count: int) -> list[str]:
    """Return the values of tokens x tokens for each head."""
    return [
        result.name
        for node in trace.nodes
        for result in node.results
        if not node.view
        and result.tensor.shape[-2:] == (count, count)
        and len(result.tensor.shape) > 2
        and result.tensor.shape[-3] > 1
    ]


def test_a_trace_for_the_cpu_has_the_operations_of_the_cpu() -> None:
    """The operations that must be absent from the trace for a GPU are present without `device`."""
    case = case_of("gpt2")
    trace = remat.trace(case.model, case.args, case.kwargs)
    assert scores(trace, TOKENS)
    assert [name for name in targets(trace) for word in _ON_CPU if word in name]


@pytest.mark.slow
def test_a_large_model_on_the_meta_device_is_traced_for_a_gpu() -> None:
    """GPT-2 at 8 x 1024: on the CPU attention has 7 values of tokens x tokens, on the GPU none."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, use_cache=False)).train()
        ids = torch.zeros(8, 1024, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids}
    trace = remat.trace(model, (), inputs, device="h100")
    assert not scores(trace, 1024)
    cpu_estimate, gpu_estimate = (
        remat.estimate(model, (), inputs, device="cpu"),
        remat.estimate(model, (), inputs, device="h100"),
    )
    score_bytes = 8 * 12 * 1024 * 1024 * 4
    assert cpu_estimate.activation_bytes - gpu_estimate.activation_bytes > 3 * score_bytes
    assert gpu_estimate.cost_source == "roofline h100"
    assert "by roofline h100" in str(gpu_estimate)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.slow_cases("resnet")
@pytest.mark.parametrize("family", ["gpt2", "resnet"])
def test_a_trace_for_a_gpu_is_solved_for_that_gpu(family: str) -> None:
    case = case_of(family, torch.bfloat16)
    trace = remat.measure(traced(case), remat.Roofline("h100"))
    graph = trace.graph()
    keep_all = remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes
    budget = graph.constant_bytes + (keep_all - graph.constant_bytes) * 4 // 5
    plan = remat.solve(trace, budget, remat.Auto(gap=0.2, time_limit=5))
    assert remat.simulate(graph, plan.schedule).peak_bytes == plan.peak_bytes <= budget < keep_all
    program = remat.rewrite(trace, plan.schedule)
    assert any(s.recomputation for s in (*program.forward, *program.backward))
    assert program.device == "cuda:0"
    with pytest.raises(remat.GuardError, match=r"made for cuda:0, .* is on cpu: move it with"):
        remat.lower(program, case.model)


def test_measuring_needs_the_gpu() -> None:
    trace = traced(PLAIN["mlp"]())
    with pytest.raises(remat.RematError, match=r"'h100' is no device of this machine.*Roofline"):
        remat.measure(trace, "h100")


def test_device_cuda_needs_a_gpu_on_this_machine() -> None:
    if torch.cuda.is_available():
        pytest.skip("then it is the one that is here")
    assert find_target_gpu("cuda") == find_target_gpu("cuda:1") == find_target_gpu("H200")


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu", 0)])
def test_the_cpu_has_one_device(device: str | torch.device) -> None:
    assert find_target_gpu(device) is None
    assert traced(PLAIN["mlp"](), device) == traced(PLAIN["mlp"](), None)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("nonesuch", "a GPU by name: v100"),
        ("mi300x", "on a machine without it"),
        ("cuda:x", "by name"),
    ],
)
def test_unknown_devices_are_refused(device: str, words: str) -> None:
    with pytest.raises(remat.TraceError, match=words):
        traced(PLAIN["mlp"](), device)


# -- attention ------------------------------------------------------------------------------


def call(
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] = H100,
    size: int = 64,
    *,
    mask: tuple[int, ...] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    heads: int = 4,
    keys: int = 128,
    grouped: bool = False,
    value_size: int | None = None,
) -> AttentionCall:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    bias = None if mask is None else torch.empty(mask, dtype=torch.bool, device="meta")
    qkv = empty(2, 4, 128, size), empty(2, heads, keys, size)
    value = empty(2, heads, keys, value_size or size)
    return AttentionCall(*qkv, value, bias, dropout_p, is_causal, grouped, capability)


HALF, FLOAT = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        (call(), "cudnn"),
        (call(capability=(10, 0)), "cudnn"),
        (call(capability=A100), "flash"),
        (call(capability=(12, 0)), "flash"),
        (call(dropout_p=0.1), ODD_DROPOUT),
        (call(dropout_p=0.125), "cudnn"),
        (call(mask=(2, 1, 128, 128)), "cudnn"),
        (call(mask=(2, 1, 128, 128), dropout_p=0.1), ODD_DROPOUT_MASKED),
        (call(mask=(128, 128), capability=A100), "efficient"),
        (call(mask=(4, 128, 128)), "efficient"),
        (call(keys=1), "flash"),
        (call(size=20), "flash"),
        (call(size=20, mask=(128, 128)), "math"),
        (call(size=160), "flash"),
        (call(size=320), "efficient"),
        (call(size=192, value_size=128), "cudnn"),
        (call(size=192, value_size=128, capability=A100), "efficient"),
        (call(size=200, capability=A100), "flash"),
        (call(size=200, capability=L4), "efficient"),
        (call(size=256, capability=L4), "flash"),
        (call(size=256, capability=L4, dropout_p=0.1), "efficient"),
        (call(is_causal=True, keys=64, capability=A100), "efficient"),
        (call(heads=2, grouped=True), "cudnn"),
        (call(heads=2), "math"),
        (call(heads=3, grouped=True), "math"),
        (call(FLOAT), "efficient"),
        (call(FLOAT, size=20), "efficient"),
        (call(FLOAT, heads=2, grouped=True), "efficient" if IS_TORCH_2_14 else "math"),
        (call(FLOAT, heads=1), "efficient" if IS_TORCH_2_14 else "math"),
        (call(FLOAT, size=18), "math"),
        (call(FLOAT, V100, 18), "efficient"),
        (call(HALF, V100), "efficient"),
        (call(HALF, V100, 20), "math"),
        (call(torch.bfloat16, V100), "math"),
        (call(torch.float64), "math"),
    ],
)
def test_the_attention_kernel_is_the_one_that_torch_selects(
    called: AttentionCall, expected: str
) -> None:
    assert select_attention_kernel(called) == expected


def test_disabled_attention_backends_are_respected() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert select_attention_kernel(call()) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        assert select_attention_kernel(call()) == "flash"
    with sdpa_kernel(
        [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True
    ):
        assert select_attention_kernel(call()) == "efficient"
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert select_attention_kernel(call()) == "flash"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


class Attention(nn.Module):
    """A module that calls attention, by its function or by its operator."""

    def __init__(self, size: int = 16, **options: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2 * size, 6 * size)
        self.how = options
        self.attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        qkv = self.layer(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(*qkv, mask, **self.how).square().mean()


def attended(size: int = 16, dtype: torch.dtype = torch.float32, **options: Any) -> Trace:
    model = Attention(size, **options).to(dtype)
    return remat.trace(model, torch.randn(4, TOKENS, 2 * size, dtype=dtype), device="a100")


def test_direct_calls_of_attention_operators_are_replaced() -> None:
    model = Attention()
    model.attend = torch.ops.aten.scaled_dot_product_attention
    assert _EFFICIENT in targets(remat.trace(model, torch.randn(4, TOKENS, 32), device="a100"))


def test_heads_of_odd_sizes_are_padded_and_keep_their_scale() -> None:
    trace = attended(20, torch.bfloat16, is_causal=True)
    (node,) = (n for n in trace.nodes if n.target == _FLASH)
    assert node.results[0].tensor.shape == (4, 2, TOKENS, 24)
    assert node.kwargs["scale"] == pytest.approx(20**-0.5)
    assert node.args[4] is True


@pytest.mark.parametrize("count", [TOKENS, TOKENS - 3])
def test_rows_of_a_mask_are_aligned(count: int) -> None:
    model = Attention().float()
    mask = torch.ones(count, count, dtype=torch.bool)
    trace = remat.trace(model, (torch.randn(4, count, 32), mask), device="h100")
    metas = {r.name: r.tensor for node in trace.nodes for r in node.results}
    (node,) = (n for n in trace.nodes if n.target == _EFFICIENT)
    bias = node.args[3]
    assert isinstance(bias, Ref)
    assert metas[bias.name].dtype == "float32"
    assert metas[bias.name].stride == (0, 0, TOKENS, 1)


def test_boolean_masks_become_biases_by_the_operations_of_this_torch() -> None:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    x = torch.randn(4, TOKENS, 32)
    operations = ("aten.logical_not.default", "aten.where.self", "aten.scalar_tensor.default")
    cpu, gpu = (
        Counter(node.target for node in remat.trace(Attention(), (x, mask), device=device).nodes)
        for device in ("cpu", "h100")
    )
    assert {name: gpu[name] for name in operations} == {name: cpu[name] for name in operations}


@pytest.mark.parametrize(("dropout_p", "place"), [(0.1, "cpu"), (0.0, "cuda:0")])
def test_seeds_of_efficient_attention_are_on_the_expected_device(
    dropout_p: float, place: str
) -> None:
    trace = attended(dropout_p=dropout_p)
    seeds = [
        result.tensor.device
        for node in trace.nodes
        for result in node.results
        if node.target == _EFFICIENT and result.position in (2, 3)
    ]
    assert seeds == [place, place]


def test_recomputed_attention_samples_on_the_gpu_wherever_its_seeds_are() -> None:
    trace = remat.measure(attended(dropout_p=0.1), remat.Roofline("a100"))
    names = [node and node.target for node in trace.operations]
    op, boundary = names.index(_EFFICIENT), names.index(None)
    runs = list(range(len(names)))
    program = remat.rewrite(
        trace, remat.Schedule((*runs[: boundary + 1], op, *runs[boundary + 1 :]))
    )
    random_statements = [s for s in (*program.forward, *program.backward) if s.rng_action]
    assert [(s.rng_action, s.device) for s in random_statements] == [
        ("save", "cuda:0"),
        ("replay", "cuda:0"),
    ]


# -- other kernels --------------------------------------------------------------------------


@pytest.mark.slow
def test_cuda_batch_norm_trains_as_eager_mode() -> None:
    """Its operation also runs on the CPU, where a plan that recomputes it is tested."""
    case = case_of("resnet")
    eager = eager_step(case)
    trace = trace_on_device(traced(case), "cpu").replace(library_bytes=0)
    trace = remat.measure(trace, remat.Roofline("cpu"))
    names = [node and node.target for node in trace.operations]
    norms = [op for op, name in enumerate(names) if name == BATCH_NORM_CUDA]
    start, end = names.index(None) + 1, len(names)
    for repeated in ([], norms):
        schedule = remat.Schedule((*range(start), *repeated, *range(start, end)))
        program = remat.rewrite(trace, schedule)
        recomputed = [
            s for s in program.backward if s.recomputation and s.target == BATCH_NORM_CUDA
        ]
        assert len(recomputed) == len(repeated)
        model = copy.deepcopy(case.model)
        step = run_step(remat.lower(program, model), case)
        assert_same(step, eager)
        assert step.peak_bytes <= remat.simulate(trace.graph(), schedule).peak_bytes


class Norm(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(x.exp()) * 3).tanh().square().mean()


def test_cuda_batch_norm_allows_two_forwards_before_their_backwards() -> None:
    """The statistics change in between: a recomputed batch norm must not need the old ones."""
    torch.manual_seed(0)
    model = Norm()
    eager, x = copy.deepcopy(model), torch.randn(8, 4, 6, 6)
    trace = trace_on_device(remat.trace(model, x.requires_grad_(), device="h100"), "cpu")
    trace = remat.measure(trace.replace(library_bytes=0), remat.Roofline("cpu"))
    graph = trace.graph()
    (norm,) = (i for i, n in enumerate(trace.operations) if n and n.target == BATCH_NORM_CUDA)
    backward = trace.operations.index(None) + 1
    runs = [*range(backward), norm, *range(backward, len(graph))]
    program = remat.rewrite(trace, remat.Schedule.of(runs))
    gm = remat.lower(program, model)
    for module in (eager, gm):
        losses = [module(x) for _ in range(2)]
        torch.stack(losses).sum().backward()
    for actual, expected in zip(model.parameters(), eager.parameters(), strict=True):
        assert actual.grad is not None
        assert expected.grad is not None
        assert torch.allclose(actual.grad, expected.grad)
    for actual, expected in zip(model.buffers(), eager.buffers(), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}])
def test_a_batch_norm_without_weights_or_statistics_is_traced(options: dict[str, Any]) -> None:
    trace = remat.trace(Norm(**options), torch.randn(8, 4, 6, 6, requires_grad=True), device="h100")
    assert BATCH_NORM_CUDA not in targets(trace)
    assert any("native_batch_norm" in target for target in targets(trace))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_statistics_are_in_float32(dtype: torch.dtype) -> None:
    """On the CPU they have the dtype of the input."""

    class Norms(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(F.layer_norm(x, x.shape[-1:]))

    x = torch.randn(8, 4, 6, 6, dtype=dtype, requires_grad=True)
    trace = remat.trace(Norms().to(dtype), x, device="h100")
    statistics_dtypes = {
        (node.target, result.tensor.dtype)
        for node in trace.nodes
        for result in node.results
        if node.target in (_LAYER_NORM, BATCH_NORM_CUDA) and result.position in (1, 2)
    }
    assert statistics_dtypes == {(_LAYER_NORM, "float32"), (BATCH_NORM_CUDA, "float32")}


def test_half_precision_is_widened_inside_of_softmax() -> None:
    class Softmax(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softmax(x, -1, dtype=torch.float32).square().sum()

    x = torch.randn(4, 8, dtype=torch.float16, requires_grad=True)
    trace = remat.trace(Softmax(), x, device="h100")
    assert "aten._to_copy.default" not in {n.target for n in trace.nodes if not n.backward}
    (node,) = (n for n in trace.nodes if n.target == "aten._softmax.default")
    assert node.args[2] is True


def test_recurrent_networks_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Recurrent(WithParts, lstm=lambda: nn.LSTM(8, 8)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0].sum()

    with caplog.at_level(logging.WARNING, "remat"):
        trace = remat.trace(Recurrent(), torch.randn(3, 2, 8), device="h100")
        assert "lstm: a recurrent network is captured step by step" in caplog.text
        assert not any("mkldnn" in target for target in targets(trace))
        caplog.clear()
        remat.trace(Recurrent(), torch.randn(3, 2, 8))
        assert "step by step" not in caplog.text


# -- autocast -------------------------------------------------------------------------------


class Mixed(WithParts, layer=(8, 8), norm=lambda: nn.LayerNorm(8)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.layer(x)).softmax(-1) @ self.layer(x).transpose(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            z = self.layer(x).exp()
        return y.float().sum() + z.sum() + self.layer(x).exp().mean()


def dtypes(trace: Trace) -> list[tuple[str, str]]:
    return [
        (node.target.split(".")[1], node.results[0].tensor.dtype)
        for node in trace.nodes
        if node.results and not node.view and not node.backward
    ]


def test_autocast_of_a_trace_for_a_gpu_is_cudas() -> None:
    """Layer norm, softmax and exp run in float32 there, in the lower precision on the CPU; a weight
    is cast once."""
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        gpu_trace = remat.trace(Mixed(), x, device="h100")
        cpu_trace = remat.trace(Mixed(), x)
        assert torch.is_autocast_enabled("cpu")
    assert gpu_trace.environment.autocast == ("cuda:bfloat16",)
    assert cpu_trace.environment.autocast == ("cpu:bfloat16",)
    kinds = {"native_layer_norm", "_softmax", "exp"}
    cast_pairs = [pair for pair in dtypes(gpu_trace) if pair[0] in kinds]
    assert cast_pairs == [
        ("native_layer_norm", "float32"), ("_softmax", "float32"), ("exp", "float32"),
        ("exp", "float32"),
    ]  # fmt: skip
    assert ("_softmax", "bfloat16") in dtypes(cpu_trace)
    products = [dtype for name, dtype in dtypes(gpu_trace) if name in ("addmm", "mm")]
    assert products == ["bfloat16", "bfloat16", "bfloat16", "float32", "bfloat16"]
    weights = [p.name for p in gpu_trace.placeholders if p.target == "layer.weight"]
    casts = [n for n in gpu_trace.nodes if n.target == "aten._to_copy.default" and not n.backward]
    assert len([n for n in casts if n.args[0] == Ref(weights[0])]) == 1


class Log(TorchDispatchMode):
    """A mode that records operations and the dtypes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            results = torch.utils._pytree.tree_leaves(result)
            self.found.append(
                (str(func), [t.dtype for t in results if isinstance(t, torch.Tensor)])
            )
        return result


def autocast_calls(device: str, half: torch.dtype) -> dict[str, Callable[[], object]]:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    x, xh, image = empty(4, 8), empty(4, 8, dtype=half), empty(2, 4, 8, 8)
    indices = torch.zeros(4, dtype=torch.long, device=device)
    return {
        "linear": lambda: F.linear(x, empty(6, 8), empty(6)),
        "einsum": lambda: torch.einsum("ij,jk->ik", x, empty(8, 5)),
        "mv": lambda: torch.mv(x, empty(8)),
        "convolution": lambda: F.conv2d(image, empty(5, 4, 3, 3), padding="same"),
        "transposed": lambda: F.conv_transpose2d(image, empty(4, 5, 3, 3)),
        "exp": lambda: xh.exp(),
        "pow": lambda: xh**2,
        "power": lambda: 2**xh,
        "double": lambda: empty(2, dtype=torch.float64).exp(),
        "layer norm": lambda: F.layer_norm(xh, (8,), empty(8), empty(8)),
        "group norm": lambda: F.group_norm(image.to(half), 2),
        "softmax": lambda: xh.softmax(-1),
        "sum": lambda: xh.sum(),
        "sum of integers": lambda: indices.sum(),
        "sum of rows": lambda: xh.sum(-1),
        "norm": lambda: xh.norm(),
        "norm of rows": lambda: xh.norm(dim=-1),
        "cross entropy": lambda: F.cross_entropy(xh, indices, label_smoothing=0.1),
        "mean squared error": lambda: F.mse_loss(xh, x),
        "widest": lambda: torch.addcmul(x, xh, xh),
        "index_put": lambda: torch.index_put(xh, (indices,), xh),
        "stacked": lambda: torch.stack([x, xh]),
        "pooled": lambda: F.avg_pool3d(image.to(half), 2),
        "bilinear": lambda: F.interpolate(image.to(half), scale_factor=2, mode="bilinear"),
        "gelu": lambda: F.gelu(xh),
    }


@contextlib.contextmanager
def cuda_autocast_on(dtype: torch.dtype) -> Iterator[None]:
    """Enable CUDA autocast on fake tensors; `torch.autocast("cuda")` does nothing where there is
    no GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch has nothing of CUDA")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_operations_that_torch_casts(half: torch.dtype) -> None:
    """Compare with torch's own autocast on fake CUDA tensors, which need no GPU."""

    def run(device: str) -> dict[str, object]:
        dtypes_by_target: dict[str, object] = {}
        for name, do in autocast_calls(device, half).items():
            with Log() as log:
                do()
            dtypes_by_target[name] = log.found
        return dtypes_by_target

    with cuda_autocast_on(half), FakeTensorMode():
        with enable_python_dispatcher():
            expected = run("cuda")
        with (
            eager_kernel_overrides(AutocastCache(), TargetGpu("h100", H100)),
            enable_python_dispatcher(),
        ):
            assert run("cpu") == expected


class CastShapes(TorchDispatchMode):
    """A mode that records the shapes of the tensors that are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("operator", "shapes"),
    [
        (F.linear, [(4, 8), (6, 8), (6,)]),
        (torch.addmm, [(6,), (4, 8), (8, 6)]),
        (F.conv1d, [(2, 3, 8), (5, 3, 3), (5,)]),
        (torch.baddbmm, [(2, 4, 6), (2, 4, 8), (2, 8, 6)]),
    ],
)
def test_autocast_casts_arguments_in_the_order_of_torch(
    operator: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]]
) -> None:
    """Compare with torch's own autocast of the CPU: C++ evaluates the casts of a call in another
    order than Python does."""

    def cast_shapes() -> list[torch.Size]:
        with CastShapes() as casts:
            operator(*map(torch.empty, shapes))
        return casts.shapes

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), FakeTensorMode():
        with enable_python_dispatcher():
            expected = cast_shapes()
        with (
            eager_kernel_overrides(AutocastCache(), TargetGpu("h100", H100)),
            enable_python_dispatcher(),
        ):
            assert cast_shapes() == expected
    assert len(expected) >= 2


# -- convolutions ---------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [4, 32])
@pytest.mark.parametrize("is_channels_last", [True, False])
def test_convolutions_have_cudnns_layouts_at_every_batch_size(
    rows: int, is_channels_last: bool
) -> None:
    """The CPU's libraries select another layout for large batches."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1))
    x = torch.randn(rows, 16, 8, 8)
    if is_channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    trace = traced(Case(model, (x,), loss=lambda out: out.sum()))
    layouts = {
        r.tensor.stride
        for n in trace.nodes
        for r in n.results
        if "convolution" in n.target and r.tensor.shape == x.shape
    }
    assert layouts == {x.stride()}


# -- prices and devices ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_trace_for_the_cpu_priced_for_a_gpu_warns_of_differences(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = gpt2(layers=1)
    trace = remat.trace(case.model, case.args, case.kwargs)
    _warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "remat"):
        for _ in range(2):
            remat.measure(trace, remat.Roofline("h100"))
    assert len([record for record in caplog.records if record.name == "remat"]) == 1
    assert "5 x bernoulli.p" not in caplog.text
    assert "4 x bernoulli.p, 1 x _safe_softmax.default" in caplog.text
    assert "device='h100'" in caplog.text
    assert device_mismatch_warning(trace, remat.Roofline("cpu")) is None
    assert device_mismatch_warning(traced(case), remat.Roofline("h100")) is None
    plain = remat.trace(nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8))
    assert device_mismatch_warning(plain, remat.Roofline("h100")) is None
    images = case_of("resnet")
    warning = device_mismatch_warning(
        remat.trace(images.model, (), images.kwargs), remat.Roofline("h100")
    )
    assert warning is not None
    assert BATCH_NORM.removeprefix("aten.") in warning


def test_pricing_a_trace_for_another_gpu_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Kernels depend on the GPU: those of one are not silently priced for another."""
    trace = traced(PLAIN["mlp"](), "a100")
    assert (trace.gpu, trace.device_label) == ("a100", "cuda:0 (a100)")
    assert remat.Trace.from_json(trace.to_json()).gpu == "a100"
    assert "on cuda:0 (a100)" in str(trace_report(trace))
    estimate = remat.estimate(PLAIN["mlp"]().model, PLAIN["mlp"]().args, device="a100")
    assert estimate.gpu == "a100"
    assert "on cuda:0 (a100); nothing was run" in estimate.describe()
    _warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "remat"):
        remat.measure(trace, remat.Roofline("h100"))
    assert "made for a100 and is estimated for h100" in caplog.text
    assert "8.0 and 9.0" in caplog.text
    assert device_mismatch_warning(traced(PLAIN["mlp"](), "h100"), remat.Roofline("h200")) is None
    assert device_mismatch_warning(trace.replace(gpu="nonesuch"), remat.Roofline("h100")) is None
    on_the_cpu = traced(PLAIN["mlp"](), "cpu")
    assert (on_the_cpu.gpu, on_the_cpu.device_label) == ("", "cpu")


def programmed(case: Case, device: str) -> remat.Program:
    trace = remat.measure(traced(case, device), remat.Roofline("cpu"))
    return remat.rewrite(trace, remat.Schedule.keep_all(trace.graph()))


def on(*devices: str) -> Any:
    """Return a model whose parameters are on these devices."""
    tensors = [SimpleNamespace(device=torch.device(device)) for device in devices]
    return SimpleNamespace(parameters=lambda: iter(tensors), buffers=lambda: iter(()))


def test_a_program_for_one_gpu_can_be_lowered_for_another() -> None:
    program = programmed(gpt2(layers=1), "h100")

    moved = program_on_model_device(program, on("cuda:1", "cuda:1"))
    assert moved == program_on_device(program, "cuda:1")
    text = moved.to_json()
    assert "cuda:0" not in text
    assert moved == remat.Program.from_json(text)
    assert text.count("cuda:1") == program.to_json().count("cuda:0")
    assert program_on_model_device(moved, on("cuda:0")) == program
    assert program_on_model_device(program, on("cuda:0")) is program
    with pytest.raises(remat.GuardError, match="on cuda:0, cuda:1: put it on one"):
        program_on_model_device(program, on("cuda:0", "cuda:1"))


def test_a_program_for_the_cpu_is_refused_on_a_gpu() -> None:
    case = PLAIN["mlp"]()
    program = programmed(case, "cpu")
    assert program_on_model_device(program, case.model) is program


def test_a_model_on_two_gpus_is_refused() -> None:
    _reject_multiple_gpus(on("cuda:0", "cpu", "cuda:0"), (), {}, None)
    _reject_multiple_gpus(on("cuda:0", "cuda:1"), (), {}, "h100")
    with pytest.raises(remat.TraceError, match="are on cuda:0, cuda:1, and a plan is for one"):
        _reject_multiple_gpus(on("cuda:0", "cuda:1"), (), {}, None)


# -- on a GPU -------------------------------------------------------------------------------


def outline(trace: Trace) -> list[object]:
    """Return what must be the same with the GPU and without: operations, their order, and their
    results."""
    return [
        (
            node.target,
            node.view,
            node.backward,
            node.random,
            [(r.tensor.dtype, r.tensor.shape, r.tensor.stride) for r in node.results],
        )
        for node in trace.nodes
    ]


def inputs(trace: Trace) -> list[TensorMeta]:
    """Return the inputs, with scalars on the trace's device. A scalar that a model makes without a
    device is on the CPU; a trace for an absent GPU cannot tell it from the model's tensors."""
    metas = [placeholder.tensor for placeholder in trace.placeholders]
    return [
        meta if meta.shape else meta.model_copy(update={"device": trace.device}) for meta in metas
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trace_equals_the_one_captured_on_that_gpu(family: str, dtype: torch.dtype) -> None:
    from remat.costs.devices import match_device

    if family == "unet" and not torch.backends.cudnn.enabled:
        pytest.skip("without cuDNN, the gradient of a convolution has another memory layout")
    device_name = match_device(torch.cuda.get_device_name())
    if device_name is None:
        pytest.skip(f"no data sheet of {torch.cuda.get_device_name()}")
    case = case_of(family, dtype)
    without = traced(case, device_name.name)
    case.model = case.model.cuda()
    case.args = tuple(a.cuda() for a in case.args)
    case.kwargs = {key: a.cuda() for key, a in case.kwargs.items()}
    gpu_trace = remat.trace(case.model, case.args, case.kwargs)
    assert outline(without) == outline(gpu_trace)
    assert inputs(without) == inputs(gpu_trace)
    assert without.storage_bytes == gpu_trace.storage_bytes
    assert without.library_bytes == gpu_trace.library_bytes
