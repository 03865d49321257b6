"""Every operation gets a cost, each distinct one is measured once, without side effects."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat.costs.layouts import span_elements
from remat.costs.roofline import Roofline
from remat.documents.arguments import Argument, Literal, Ref
from remat.documents.records import Environment, Node, Output, Placeholder, Result, TensorMeta
from remat.documents.structure import Structure
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.frontend.common import operators
from remat.frontend.costs import cost_key, timers
from remat.frontend.costs import operation_benchmark as benches
from remat.frontend.costs import operation_costs as pricing
from remat.frontend.costs.cost_cache import CostCache, MeasuredCost
from remat.frontend.costs.measure import measure
from remat.frontend.costs.operands import OperandFactory
from remat.frontend.costs.timers import MIN_COST_S

ITEM = {"uint8": 1, "float32": 4, "int64": 8, "bool": 1, "bfloat16": 2, "float64": 8}


class Builder:
    """Builds a trace by hand: one placeholder or operation at a time."""

    def __init__(self) -> None:
        self.placeholders: list[Placeholder] = []
        self.nodes: list[Node] = []
        self.storages: list[int] = []

    def _storage(self, tensor: TensorMeta) -> int:
        self.storages.append(span_elements(tensor.shape, tensor.stride) * ITEM[tensor.dtype])
        return len(self.storages) - 1

    def graph_input(self, *shape: int, dtype: str = "float32") -> Ref:
        tensor = dense(*shape, dtype=dtype)
        name = f"p{len(self.placeholders)}"
        storage = self._storage(tensor)
        self.placeholders.append(
            Placeholder(name=name, kind="input", target="0", tensor=tensor, storage=storage)
        )
        return Ref(name)

    def call(
        self,
        target: str,
        args: Iterable[Argument],
        *outs: TensorMeta,
        view_of: Ref | None = None,
        kwargs: dict[str, Argument] | None = None,
    ) -> Ref:
        name = f"n{len(self.nodes)}"
        storages = {p.name: p.storage for p in self.placeholders}
        storages.update((r.name, r.storage) for node in self.nodes for r in node.results)
        results = tuple(
            Result(
                name=f"{name}_{i}",
                tensor=out,
                storage=storages[view_of.name] if view_of else self._storage(out),
                position=i if len(outs) > 1 else -1,
            )
            for i, out in enumerate(outs)
        )
        self.nodes.append(
            Node(
                name=name,
                target=target,
                args=tuple(args),
                kwargs=kwargs or {},
                results=results,
                view=view_of is not None,
            )
        )
        return Ref(results[0].name)

    def trace(self) -> Trace:
        last = self.nodes[-1].results[0].name
        return Trace(
            model="by hand",
            device="cpu",
            placeholders=tuple(self.placeholders),
            nodes=tuple(self.nodes),
            outputs=(Output(name=last, differentiable=False),),
            gradients=(),
            storage_bytes=tuple(self.storages),
            inputs=Structure(kind="tuple"),
            result=Structure(kind="leaf", leaf=0),
            environment=Environment(torch=torch.__version__, training=True),
        )


def dense(*shape: int, dtype: str = "float32") -> TensorMeta:
    stride = tuple(torch.empty(shape, device="meta").stride())
    return TensorMeta(dtype=dtype, shape=shape, stride=stride, device="cpu")


def chain(layers: int = 3) -> Trace:
    b = Builder()
    x, weight = b.graph_input(16, 32), b.graph_input(32, 32)
    for _ in range(layers):
        transposed = TensorMeta(dtype="float32", shape=(32, 32), stride=(1, 32), device="cpu")
        w = b.call("aten.t.default", [weight], transposed, view_of=weight)
        x = b.call("aten.mm.default", [x, w], dense(16, 32))
        x = b.call("aten.relu.default", [x], dense(16, 32))
    return b.trace()


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="remat")
    return caplog


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets of the operations that are measured; outliers are not measured once more."""
    monkeypatch.setattr(pricing, "MAX_REPEAT_S", -1.0)
    targets: list[str] = []
    cost = benches.OperationBenchmark.measure

    def measure_and_note(self: benches.OperationBenchmark, node: Node) -> MeasuredCost:
        targets.append(node.target)
        return cost(self, node)

    monkeypatch.setattr(benches.OperationBenchmark, "measure", measure_and_note)
    return targets


def test_every_operation_has_a_cost_and_its_source() -> None:
    trace = chain()
    priced = measure(trace, "cpu")
    assert priced.measured
    assert not trace.measured, "the given trace is as it was"
    for node in priced.nodes:
        if node.view:
            assert node.cost_s is None
        else:
            assert node.cost_s is not None
            assert MIN_COST_S <= node.cost_s < 1
            assert node.workspace_bytes == 0
            assert node.cost_source.startswith("measured cpu ")
    assert Trace.from_json(priced.to_json()) == priced
    assert priced.graph().total_cost_s > 0


def test_equal_operations_are_measured_once(measured: list[str]) -> None:
    priced = measure(chain(10))
    assert measured == ["aten.mm.default", "aten.relu.default"]
    assert len({node.cost_s for node in priced.nodes if node.target == "aten.mm.default"}) == 1
    second = measure(chain(4))
    assert len(measured) == 2, "the second time the costs are cached"
    assert [n.cost_s for n in second.nodes] == [n.cost_s for n in priced.nodes[:12]]
    measure(chain(1), cache=False)
    assert len(measured) == 4


def products(
    dtype: str = "float32", rows: int = 16, transposed: bool = False, alpha: int = 1
) -> Trace:
    """Return a trace of one `addmm`."""
    b = Builder()
    added, x, w = (b.graph_input(*shape, dtype=dtype) for shape in ((8,), (rows, 4), (4, 8)))
    if transposed:
        meta = TensorMeta(dtype=dtype, shape=(4, 8), stride=(1, 4), device="cpu")
        w = b.call("aten.t.default", [b.graph_input(8, 4, dtype=dtype)], meta, view_of=w)
    b.call(
        "aten.addmm.default", [added, x, w], dense(rows, 8, dtype=dtype), kwargs={"alpha": alpha}
    )
    return b.trace()


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Trace]] = {
    "dtype": lambda _: products(dtype="bfloat16"),
    "shape": lambda _: products(rows=17),
    "stride": lambda _: products(transposed=True),
    "argument": lambda _: products(alpha=2),
    "threads": lambda _: torch.set_num_threads(torch.get_num_threads() + 1) or products(),
    "deterministic": lambda _: torch.use_deterministic_algorithms(True) or products(),
    "matmul precision": lambda _: torch.set_float32_matmul_precision("medium") or products(),
    "torch": lambda patch: patch.setattr(torch, "__version__", "3.0") or products(),
    "device": lambda patch: patch.setattr(cost_key, "processor_name", str) or products(),
}


@pytest.fixture
def switches() -> Iterator[None]:
    """torch's precision switches, restored afterwards."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("switches")
def test_everything_that_affects_a_cost_is_in_its_key(
    change: str, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any of these changes a shared cache has no entry for the operation."""
    with CostCache() as cache:
        measure(products(), cache=cache)
        measure(products(), cache=cache)
        assert measured == ["aten.addmm.default"], "nothing has changed"
        changed = CHANGES[change](monkeypatch)
        measure(changed, cache=cache)
        assert measured == ["aten.addmm.default"] * 2
    with CostCache() as another_process:
        measure(changed, cache=another_process)
    assert len(measured) == 2


def test_a_second_measurement_replaces_derived_costs(tmp_path: Path) -> None:
    first = measure(chain(), Roofline("v100"))
    assert first.graph().total_cost_s > 0
    second = measure(first, Roofline("h200"))
    assert second.graph().total_cost_s < first.graph().total_cost_s
    with CostCache(tmp_path / "mine.sqlite") as cache:
        third = measure(second, cache=cache)
    assert third.graph().total_cost_s != second.graph().total_cost_s


@pytest.mark.parametrize("is_cached", [False, True])
def test_outliers_are_measured_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_cached: bool
) -> None:
    """On a busy machine every block of an operation can take a hundred times its time."""
    measure_alone = benches.OperationBenchmark.measure
    slow_runs = [8e-3]

    def measure_on_a_busy_machine(self: benches.OperationBenchmark, node: Node) -> MeasuredCost:
        cost = measure_alone(self, node)
        if node.target == "aten.relu.default" and slow_runs:
            return MeasuredCost(slow_runs.pop(), 0, cost.output_bytes)
        return MeasuredCost(2e-6, 0, cost.output_bytes)

    monkeypatch.setattr(benches.OperationBenchmark, "measure", measure_on_a_busy_machine)
    monkeypatch.setattr(pricing, "_repeated_keys", set())
    cache = CostCache(tmp_path / "costs.sqlite")
    if is_cached:
        with monkeypatch.context() as patch:
            patch.setattr(pricing, "MAX_REPEAT_S", -1.0)
            stored = measure(chain(), cache=cache)
        assert max(node.cost_s or 0 for node in stored.nodes) == 8e-3
    for trace in (measure(chain(), cache=cache), measure(chain(), cache=cache)):
        assert max(node.cost_s or 0 for node in trace.nodes) == 2e-6


def test_longer_work_costs_more() -> None:
    b = Builder()
    small, large = b.graph_input(16, 16), b.graph_input(1024, 1024)
    b.call("aten.mm.default", [small, small], dense(16, 16))
    b.call("aten.mm.default", [large, large], dense(1024, 1024))
    costs = [node.cost_s or 0 for node in measure(b.trace()).nodes]
    assert costs[1] > 2 * costs[0]  # by 260,000; on a busy machine either may be interrupted


class Clock:
    """A clock that advances only during a run: the n-th run from 0 takes `durations(n)` seconds."""

    def __init__(self, durations: Callable[[int], float]) -> None:
        self.now_s, self.runs, self._durations = 0.0, 0, durations

    def perf_counter(self) -> float:
        return self.now_s

    def run(self) -> torch.Tensor:
        self.now_s += self._durations(self.runs)
        self.runs += 1
        return torch.empty(3)


@pytest.mark.parametrize("cost_s", [3e-7, 2e-6, 1e-4, 7e-3, 0.2])
@pytest.mark.parametrize(
    "disturbance",
    [
        lambda n: 0.0,
        lambda n: 10.0 if n == 0 else 0.0,
        lambda n: 0.05 if n % 6007 == 6006 or n == 5 else 0.0,
    ],
    ids=["none", "warm-up", "interruptions"],
)
def test_the_measured_time_is_the_median_of_a_call(
    cost_s: float, disturbance: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the first call takes, and whatever happens in between."""
    clock = Clock(lambda n: cost_s + disturbance(n))
    monkeypatch.setattr(timers, "time", clock)
    cost = timers.measure_on_cpu(clock.run)
    assert cost.cost_s == pytest.approx(cost_s)
    assert cost.output_bytes == (12,)
    spent_s = clock.now_s - sum(map(disturbance, range(clock.runs)))
    if cost_s > timers.SLOW_CALL_S:
        assert clock.runs <= timers.MIN_BLOCKS
    else:
        assert spent_s <= 3 * timers.MEASUREMENT_S


@pytest.mark.parametrize("cost_s", [1e-4, 7e-3, 0.2])
def test_timing_on_the_cpu_ends_once_blocks_agree(
    cost_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal times after a few calls; where every block takes longer than the one before,
    after all of them."""
    steady, slowing = Clock(lambda n: cost_s), Clock(lambda n: cost_s * 1.05**n)
    for clock in (steady, slowing):
        monkeypatch.setattr(timers, "time", clock)
        timers.measure_on_cpu(clock.run)
    assert steady.now_s <= max(1.1 * timers.AGREED_S, 2 * cost_s) + cost_s
    assert slowing.now_s >= min(timers.MEASUREMENT_S, timers.MIN_BLOCKS * cost_s)
    assert slowing.runs > steady.runs


def test_a_measured_time_is_at_least_the_real_one() -> None:
    """By the real clock, where only the lower end is certain."""
    assert timers.measure_on_cpu(lambda: time.sleep(2e-3)).cost_s >= 2e-3


class Input(NamedTuple):
    """A tensor among the arguments of an operation."""

    shape: tuple[int, ...]
    dtype: str = "float32"


def f(*shape: int) -> Input:
    return Input(shape)


def i(*shape: int) -> Input:
    return Input(shape, "int64")


def b(*shape: int) -> Input:
    return Input(shape, "bool")


_TARGETS = (None, 1, -100)
_POOL = ((2, 2), (2, 2), (0, 0), (1, 1), False)

OPERATIONS: list[tuple[str, tuple[Any, ...]]] = [
    ("embedding.default", (f(7, 4), i(5))),
    ("embedding_dense_backward.default", (f(5, 4), i(5), 7, -1, False)),
    ("nll_loss_forward.default", (f(6, 3), i(6), *_TARGETS)),
    ("nll_loss_backward.default", (f(), f(6, 3), i(6), *_TARGETS, f())),
    ("gather.default", (f(4, 9), 1, i(4, 2))),
    ("scatter.value", (f(4, 3), 1, i(4, 2), 1.0)),
    ("index.Tensor", (f(3, 9), (None, i(4)))),
    ("index.Tensor", (f(3, 9, 2), (b(3, 9), i(27)))),
    ("index_put.default", (f(3, 9), (i(4),), f(4, 9), True)),
    ("index_select.default", (f(3, 9), 1, i(4))),
    (
        "max_pool2d_with_indices_backward.default",
        (f(1, 2, 4, 4), f(1, 2, 8, 8), *_POOL, i(1, 2, 4, 4)),
    ),
    ("div.Tensor_mode", (i(4), i(4))),
    ("where.self", (b(4), f(4), f(4))),
    ("bernoulli.p", (f(4), 0.5)),
    ("bernoulli.default", (f(400),)),
    ("native_dropout.default", (f(4), 0.5, True)),
    ("add.Tensor", (Input((4,), "bfloat16"), 1)),
    ("add.Tensor", (f(0, 4), 1)),
]


@pytest.mark.parametrize(("target", "arguments"), OPERATIONS)
def test_operands_are_valid_for_the_operation(
    target: str, arguments: tuple[Any, ...], warned: pytest.LogCaptureFixture
) -> None:
    builder = Builder()

    def created(argument: Any) -> Any:
        if isinstance(argument, Input):
            return builder.graph_input(*argument.shape, dtype=argument.dtype)
        return tuple(map(created, argument)) if isinstance(argument, tuple) else argument

    kwargs: dict[str, Argument] = {"rounding_mode": "floor"} if "mode" in target else {}
    builder.call(f"aten.{target}", map(created, arguments), dense(1), kwargs=kwargs)
    node = measure(builder.trace()).nodes[0]
    assert node.cost_source.startswith("measured"), warned.text


def test_operands_have_the_shape_stride_and_alignment_of_the_trace() -> None:
    tensor = TensorMeta(dtype="float32", shape=(4, 1, 3), stride=(6, 0, 2), offset=70, device="cpu")
    b = Builder()
    p = Placeholder(name="x", kind="input", target="0", tensor=tensor, storage=0)
    b.storages.append(1000)
    b.placeholders.append(p)
    b.call("aten.add.Tensor", [Ref("x"), Ref("x")], dense(4, 1, 3))
    trace = b.trace()
    operator = operators.resolve_operator("aten.add.Tensor")
    args, _ = OperandFactory(trace.tensors, "cpu", torch.device("cpu")).create_arguments(
        trace.nodes[0], operator
    )
    x = args[0]
    assert isinstance(x, torch.Tensor)
    assert x is args[1]
    assert (x.shape, x.stride(), x.storage_offset()) == ((4, 1, 3), (6, 0, 2), 70 % 64)


class RecordedResults(TorchDispatchMode):
    """A mode that records the results of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[tuple[str, object]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **kwargs or {})
        items = result if isinstance(result, (list, tuple)) else (result,)
        self.returned += [(str(func), item) for item in items]
        return result

    def producer_of(self, tensor: object) -> str:
        """Return the operation that returned this very tensor, the first one where it is a view."""
        assert isinstance(tensor, torch.Tensor)
        storage = tensor.untyped_storage().data_ptr()
        return next(
            name
            for name, item in self.returned
            if isinstance(item, torch.Tensor) and item.untyped_storage().data_ptr() == storage
        )


def attention(x: torch.Tensor) -> torch.Tensor:
    q = x.reshape(2, 2, 8, 4)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


PAIRS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "attention": (
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        attention,
        "out logsumexp",
    ),
    "batch_norm": (
        "aten.native_batch_norm_backward.default",
        nn.BatchNorm1d(8),
        "save_mean save_invstd",
    ),
    "group_norm": ("aten.native_group_norm_backward.default", nn.GroupNorm(2, 8), "mean rstd"),
    "layer_norm": ("aten.native_layer_norm_backward.default", nn.LayerNorm(4), "mean rstd"),
    "max_pool": (
        "aten.max_pool2d_with_indices_backward.default",
        lambda x: F.max_pool2d(x.reshape(4, 8, 2, 2), 2),
        "indices",
    ),
    "cross_entropy": (
        "aten.nll_loss_backward.default",
        lambda x: F.cross_entropy(x.reshape(-1, 4), torch.zeros(32, dtype=torch.long)),
        "total_weight",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_backward_operation_reads_real_outputs_of_its_forward(name: str) -> None:
    """Never invented ones: a seed may be a scalar on the host, and a kernel trusts its inputs."""
    target, function, arguments = PAIRS[name]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.function = function

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.function(self.linear(x))

    trace = remat.trace(Model(), (torch.randn(4, 8, 4),))
    node = next(n for n in trace.nodes if n.target == target)
    operator = operators.resolve_operator(target)
    assert isinstance(operator, OpOverload)
    operands = OperandFactory(trace.tensors, "cpu", torch.device("cpu"), trace.nodes)
    with RecordedResults() as seen:
        args, _ = operands.create_arguments(node, operator)
    by_name = dict(zip((a.name for a in operator._schema.arguments), args, strict=False))
    (forward,) = operands.required_forwards(node)
    for argument in arguments.split():
        assert seen.producer_of(by_name[argument]) == forward.target, argument
    operator(*args)
    if name == "attention":
        second = operators.resolve_operator(forward.target)(*args[1:4], 0.0, True)
        assert torch.equal(second[0], by_name["out"])  # type: ignore[index]
        assert torch.equal(second[1], by_name["logsumexp"])  # type: ignore[index]


def test_opaque_outputs_of_a_forward_are_never_invented(warned: pytest.LogCaptureFixture) -> None:
    b = Builder()
    x, lse = b.graph_input(1, 2, 8, 4), b.graph_input(1, 8, 2)
    target = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    b.call(target, [x, x, x, x, x, lse, 0.0, True], *[dense(1, 2, 8, 4)] * 3)
    (node,) = measure(b.trace()).nodes
    assert node.cost_source == "estimated: RematError: only its forward can create its inputs"


def test_an_opaque_workspace_comes_from_its_forward() -> None:
    """oneDNN's LSTM layer crashes on any workspace but that of its forward, computed with
    gradients."""
    b = Builder()
    x, w, r, bias, h = (b.graph_input(*s) for s in ((5, 2, 4), (16, 4), (16, 4), (16,), (1, 2, 4)))
    rest = (False, (), 2, 4, 1, True, False, False, True)
    states = [dense(5, 2, 4), dense(1, 2, 4), dense(1, 2, 4), dense(1, dtype="uint8")]
    b.call("aten.mkldnn_rnn_layer.default", [x, w, r, bias, bias, h, h, *rest], *states)
    out, hy, cy, workspace = (Ref(result.name) for result in b.nodes[0].results)
    shared = (False, 2, 4, 1, True, True, False, (), False)
    args = [x, w, r, bias, bias, h, h, out, hy, cy, out, hy, cy, *shared, workspace]
    b.call("aten.mkldnn_rnn_layer_backward.default", args, *[dense(5, 2, 4)] * 7)
    assert [n.cost_source.split()[0] for n in measure(b.trace()).nodes] == ["measured"] * 2


def test_measuring_changes_no_random_state_and_no_modes() -> None:
    b = Builder()
    b.call("aten.native_dropout.default", [b.graph_input(64), 0.5, True], dense(64))
    b.call("aten.mm.default", [Ref("p0"), Ref("p0")], dense(64))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with torch.autocast("cpu"):
        measure(b.trace(), cache=False)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def fail_with_bug() -> Trace:
    b = Builder()
    x = b.graph_input(64, 64)
    b.call("aten.mm.default", [x, b.graph_input(3, 3)], dense(64, 64))  # shapes do not fit
    b.call("aten.mm.default", [x, x], dense(64, 64))
    b.call("aten.relu.default", [x], dense(64, 64))
    b.call("aten.no_such_operation.default", [x], dense(64, 64))
    return b.trace()


def test_operations_that_fail_are_estimated_and_marked(warned: pytest.LogCaptureFixture) -> None:
    nodes = measure(fail_with_bug()).nodes
    assert [node.cost_source.split(":")[0].split(" ")[0] for node in nodes] == [
        "estimated",
        "measured",
        "measured",
        "estimated",
    ]
    assert all((node.cost_s or 0) > 1e-7 for node in nodes)
    assert len(warned.messages) == 2, "one warning for each reason"
    assert "fitted to 2 measured operations" in warned.messages[0]
    assert "no operation aten.no_such_operation.default" in warned.text


def test_operations_that_are_too_large_are_not_run(
    warned: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benches, "free_bytes", lambda device: 1 << 16)
    b = Builder()
    x, y = b.graph_input(64), b.graph_input(1 << 20)
    b.call("aten.relu.default", [x], dense(64))
    b.call("aten.relu.default", [y], dense(1 << 20))
    b.call("aten.relu.default", [b.graph_input(1 << 50)], dense(1 << 50))
    nodes = measure(b.trace(), cache=False).nodes
    assert nodes[0].cost_source.startswith("measured")
    assert nodes[1].cost_source == nodes[2].cost_source == "estimated: out of memory"
    assert (nodes[2].cost_s or 0) > (nodes[1].cost_s or 0)
    assert len(warned.messages) == 1


def test_estimates_are_not_cached(warned: pytest.LogCaptureFixture) -> None:
    measure(fail_with_bug())
    measure(fail_with_bug())
    assert len(warned.messages) == 4


def test_remats_own_operations_are_priced_by_bytes_and_never_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("this would have touched the model")

    monkeypatch.setitem(operators.REMAT_OPERATIONS, "remat.touch.default", refuse)
    b = Builder()
    b.call("remat.touch.default", [b.graph_input(1 << 10)], dense(1 << 10))
    b.call("remat.touch.default", [b.graph_input(1 << 20)], dense(1 << 20))
    b.call("aten.copy_.default", [b.graph_input(1 << 20), b.graph_input(1 << 20)], dense(1 << 20))
    small, large, copy = measure(b.trace()).nodes
    assert (large.cost_s or 0) == pytest.approx(1024 * (small.cost_s or 0))
    assert copy.cost_source.startswith("measured cpu")


def test_literals_and_devices_are_passed_to_the_operation(warned: pytest.LogCaptureFixture) -> None:
    b = Builder()
    b.call(
        "aten.full.default",
        [(4, 4), 1.0],
        dense(4, 4, dtype="bfloat16"),
        kwargs={
            "dtype": Literal("dtype", "bfloat16"),
            "device": Literal("device", "cpu"),
            "layout": Literal("layout", "strided"),
            "pin_memory": False,
        },
    )
    assert measure(b.trace()).nodes[0].cost_source.startswith("measured"), warned.text


def test_roofline_needs_no_device_and_no_cache(tmp_path: Path) -> None:
    priced = measure(chain(), Roofline("b200"))
    assert priced.measured
    assert {n.cost_source for n in priced.nodes if not n.view} == {"roofline b200"}
    assert not (tmp_path / "remat-cache").exists()


def test_convolutions_that_cudnn_tunes_run_once_in_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although their costs are cached: otherwise the first step tunes them, above its budget."""
    monkeypatch.setattr(
        pricing, "uses_cudnn_autotuning", lambda node, device: "relu" in node.target
    )
    monkeypatch.setattr(pricing, "_autotuned_keys", set())
    ran: list[str] = []
    tune = benches.OperationBenchmark.autotune
    monkeypatch.setattr(
        benches.OperationBenchmark,
        "autotune",
        lambda self, node: (ran.append(node.target), tune(self, node)),
    )
    measure(chain())
    assert ran == ["aten.relu.default"], "measuring has run it, but not in the backward"
    ran.clear()
    pricing._autotuned_keys.clear()  # another process
    measure(chain())
    assert ran == ["aten.relu.default"]
    measure(chain())
    assert ran == ["aten.relu.default"]


def test_convolutions_are_tuned_only_with_cudnn_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(name="n", target="aten.convolution_backward.default")
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert pricing.uses_cudnn_autotuning(node, cuda)
    assert not pricing.uses_cudnn_autotuning(node, torch.device("cpu"))
    assert not pricing.uses_cudnn_autotuning(Node(name="n", target="aten.mm.default"), cuda)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert not pricing.uses_cudnn_autotuning(node, cuda)


def test_an_unmeasured_workspace_is_not_zero() -> None:
    trace = chain(1)
    metas, node = trace.tensors, trace.nodes[1]
    operands = 4 * (16 * 32 + 32 * 32 + 16 * 32)
    assert pricing.assumed_workspace_bytes(node, metas, torch.device("cuda")) == operands
    assert pricing.assumed_workspace_bytes(node, metas, torch.device("cpu")) == 0


def test_a_broken_device_is_an_error_that_names_the_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = chain(1)
    bench = benches.OperationBenchmark(trace.nodes, trace.tensors, "cpu", torch.device("cuda", 0))
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("emptied"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    bench.recover(trace.nodes[1], ValueError("shapes"))
    assert emptied == ["emptied"]

    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(RematError, match=r"aten\.mm\.default \(operation n1\) broke .* illegal"):
        bench.recover(trace.nodes[1], RuntimeError("failed"))


@pytest.mark.parametrize(
    ("operands", "free", "expected"),
    [
        (200 << 20, None, 1),
        (50 << 20, None, 3),
        (4 << 20, None, 26),
        (1 << 10, None, benches.MAX_OPERAND_SETS),
        (4 << 20, 20 << 20, 4),
        (4 << 20, 1 << 20, 1),
    ],
)
def test_operand_sets_exceed_twice_the_cache(
    operands: int, free: int | None, expected: int
) -> None:
    set_count = benches.operand_set_count(operands, operands, 50 << 20, free)
    assert set_count == expected
    assert set_count * operands > 100 << 20 or free or set_count == benches.MAX_OPERAND_SETS


class Gpu:
    """A device that runs asynchronously: `launch_s` to launch a kernel, `kernel_s` to run it."""

    def __init__(self, launch_s: float, kernel_s: float) -> None:
        self.launch_s, self.kernel_s, self.now_s, self.busy_until_s = launch_s, kernel_s, 0.0, 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def synchronize(self, device: object = None) -> None:
        self.now_s = max(self.now_s, self.busy_until_s)

    def sleep(self, cycles: int) -> None:
        self.busy_until_s = max(self.now_s, self.busy_until_s) + cycles / timers.GPU_CYCLES_PER_S

    def run(self) -> None:
        self.now_s += self.launch_s
        self.busy_until_s = max(self.now_s, self.busy_until_s) + self.kernel_s

    def event(self, enable_timing: bool) -> Any:
        gpu = self

        class Event:
            at_s = 0.0

            def record(self) -> None:
                self.at_s = max(gpu.now_s, gpu.busy_until_s)

            def query(self) -> bool:
                return gpu.now_s >= self.at_s

            def synchronize(self) -> None:
                gpu.now_s = max(gpu.now_s, self.at_s)

            def elapsed_time(self, end: Any) -> float:
                return 1e3 * (end.at_s - self.at_s)

        return Event()


@pytest.mark.parametrize("kernel_s", [5e-7, 4e-6, 3e-3])
@pytest.mark.parametrize("launch_s", [2e-6, 3e-5, 4e-4])
def test_device_and_launch_times_are_measured_separately(
    kernel_s: float, launch_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is shorter than its launch does not get the launch's time."""
    gpu = Gpu(launch_s, kernel_s)
    monkeypatch.setattr(timers, "time", gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    calls = itertools.repeat(gpu.run)
    for count in (1, 100):
        device_s, cpu_s = timers._time_busy_block(calls, count, torch.device("cuda"))
        assert device_s == pytest.approx(count * kernel_s)
        assert cpu_s == pytest.approx(count * launch_s)


def test_a_step_limited_by_launches_is_reported() -> None:
    priced = measure(chain(), Roofline("h200"))
    bare = remat.solve(priced, "100%")
    assert "launch_s" not in bare.stats
    for launch_s, bound in ((1e-9, False), (1e-3, True)):
        nodes = tuple(
            n if n.view else n.model_copy(update={"launch_s": launch_s}) for n in priced.nodes
        )
        trace = Trace.from_json(priced.replace(nodes=nodes).to_json())
        plan = remat.solve(trace, "100%")
        assert plan.stats["launch_s"] == pytest.approx(6 * launch_s)
        assert plan.time_s == bare.time_s, "solved on the device's time"
        assert ("the CPU takes 6 ms to launch" in plan.describe()) == bound
        (swept,) = remat.sweep(trace, ["100%"])
        assert swept.stats["launch_s"] == plan.stats["launch_s"]


def test_a_trace_without_launch_times_is_readable() -> None:
    data = json.loads(chain().to_json())
    for node in data["nodes"]:
        del node["launch_s"]
    assert Trace.from_json(json.dumps(data)) == chain()


def test_progress_is_reported() -> None:
    calls: list[tuple[int, int, str]] = []
    measure(chain(), progress=lambda *call: calls.append(call))
    assert calls == [(0, 2, "aten.mm.default"), (1, 2, "aten.relu.default"), (2, 2, "")]
    measure(chain(), progress=True)


def test_missing_devices_are_named() -> None:
    with pytest.raises(RematError, match="cannot measure on meta"):
        measure(chain(), "meta")
    if not torch.cuda.is_available():
        with pytest.raises(RematError, match=r"remat\.Roofline\('h200'\)"):
            measure(chain(), "cuda")


def addition_and_sort(n: int) -> Trace:
    b = Builder()
    b.call("aten.add.Tensor", [b.graph_input(n), 1], dense(n))
    b.call("aten.sort.default", [b.graph_input(n)], dense(n), dense(n, dtype="int64"))
    return b.trace()


@pytest.mark.gpu
def test_cuda_workspaces_are_measured(warned: pytest.LogCaptureFixture) -> None:
    n = 1 << 24
    add, sort = measure(addition_and_sort(n), "cuda", cache=False).nodes
    assert add.cost_source.startswith("measured cuda NVIDIA")
    assert add.workspace_bytes == 0
    assert (sort.workspace_bytes or 0) > n, "sorting needs memory in addition to its operands"


@pytest.mark.gpu
@pytest.mark.device_times
def test_cuda_times_are_measured(warned: pytest.LogCaptureFixture) -> None:
    n = 1 << 24
    add, _ = measure(addition_and_sort(n), "cuda", cache=False).nodes
    assert 8 * n / 10e12 < (add.cost_s or 0) < 1e-2


@pytest.mark.slow
def test_every_operation_of_a_traced_gpt2_can_be_measured(
    warned: pytest.LogCaptureFixture,
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from remat.frontend.capture.trace import trace

    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=101, n_positions=16, use_cache=False
    )
    ids = torch.randint(0, 101, (2, 16))
    traced = trace(GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids})
    priced = measure(traced)
    assert priced.measured
    sources = {node.cost_source for node in priced.nodes if not node.view}
    assert all(source.startswith("measured cpu") for source in sources), warned.text
    assert measure(traced, Roofline("h200")).graph().total_cost_s > 0


@pytest.mark.gpu
def test_garbage_that_is_freed_during_a_call_is_not_its_workspace() -> None:
    device = torch.device("cuda")
    call_count = 0

    def call() -> torch.Tensor:
        nonlocal call_count
        call_count += 1
        result = torch.empty(1 << 18, device=device)
        if call_count == 2:  # enough new objects for Python's garbage collector to run
            assert len([[] for _ in range(20_000)]) == 20_000
        return result

    gc.collect()
    threshold = gc.get_threshold()
    gc.set_threshold(5_000)
    try:
        cycle: list[object] = [torch.empty(1 << 20, device=device)]
        cycle.append(cycle)
        del cycle
        workspace_bytes, sizes = timers.measure_memory_on_cuda(call, device)
    finally:
        gc.set_threshold(*threshold)
    assert sizes == (1 << 20,)
    assert workspace_bytes == 0


@pytest.mark.slow
def test_a_process_that_only_measures_knows_the_operations_that_add_pieces() -> None:
    """As the service's: it lowers no program."""
    code = (
        "from remat.documents.targets import ADD_PRODUCT_TARGET;"
        "import remat.frontend.costs.measure;"
        "from remat.frontend.common.operators import resolve_operator;"
        "resolve_operator(ADD_PRODUCT_TARGET)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
