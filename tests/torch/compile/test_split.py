"""Under torch.compile, the largest operations run in pieces if the budget cannot be met without."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.compiled_steps import (
    compiled,
    compiled_as_without,
    measured_peak,
    plans_of,
)
from tests.helpers.training.losses import LOSSES, SEQUENCES, TOKENS, WORDS, Policy, batch_of
from tests.helpers.training.models import Case, language_model
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from remat.frontend.compile.split import CannotSplit, split_joint_graph

pytestmark = needs_compiler

BUDGET = "70%"


@pytest.mark.slow
@pytest.mark.usefixtures("empty_compile_caches")  # costs, and so the plan, differ from run to run
def test_a_budget_that_is_infeasible_without_is_met() -> None:
    """With dropout and ignored labels: the loss, the gradients and the random samples are those of
    plain torch.compile, and the peak is the planned one."""
    case = language_model()
    run, (plan,) = compiled_as_without(case, BUDGET, 1e-5, time_limit=5.0)
    (split,) = plan.plan.graph.splits
    assert (split.module, split.rows, split.pieces) == ("head", 64, 4)
    assert plan.verified_bytes is not None
    smallest = plan.plan.stats["unsplit_min_bytes"]
    assert isinstance(smallest, int)
    assert smallest > plan.plan.budget_bytes, "infeasible without"
    assert measured_peak(case, run) == plan.verified_bytes
    assert plan.verified_bytes <= 0.7 * plan.baseline_bytes
    assert "head x 4: 16 rows at a time" in plan.plan.describe()
    assert " x 4 " in plan.plan.explain("head")


@pytest.mark.slow
def test_inductor_keeps_one_piece_at_a_time() -> None:
    """Pieces that are independent may be computed first, and all be live at once, as in
    https://github.com/pytorch/torchtitan/issues/3646."""
    case = language_model()
    logits_bytes = 64 * 1000 * 4
    run, (plan,), _ = compiled(case, BUDGET, split=16, time_limit=5.0)
    constant_bytes = sum(2 * p.nbytes for p in case.model.parameters()) + case.args[0].nbytes
    assert measured_peak(case, run) - constant_bytes < logits_bytes
    assert plan.plan.graph.splits[0].pieces == 16


@pytest.mark.slow
def test_nothing_is_split_where_the_budget_is_met_without() -> None:
    (plan,) = plans_of(language_model(), "98%", inductor=False, time_limit=5.0)
    assert not plan.plan.graph.splits


@pytest.mark.slow
def test_what_cannot_be_split_is_planned_as_it_is() -> None:
    """`split=4` applies only to graphs with operations to split; convolutions of a single sample
    have no rows."""
    model, images = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Conv2d(8, 8, 3)), torch.randn(1, 2, 16, 16)
    case = Case(model, (images,), loss=torch.Tensor.sum)
    (plan,) = plans_of(case, "100%", split=4, time_limit=5.0)
    assert not plan.plan.graph.splits
    with pytest.raises(Exception, match="no plan fits the budget"):
        plans_of(case, "10%", time_limit=5.0)


@pytest.mark.slow
def test_a_second_process_loads_the_plan_with_its_pieces(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    case = language_model()
    with caplog.at_level(logging.INFO, logger="remat"):
        (first,) = plans_of(case, BUDGET, time_limit=5.0)
        assert caplog.text.count("planning") == 2
        caplog.clear()
        (second,) = plans_of(copy.deepcopy(case), BUDGET, time_limit=5.0)
    assert "planning" not in caplog.text
    assert second.plan.graph.splits == first.plan.graph.splits
    assert second.verified_bytes == first.verified_bytes
    assert second.baseline_bytes == first.baseline_bytes


@pytest.mark.slow
def test_without_inductor_pieces_compute_the_same() -> None:
    options: dict[str, Any] = {"inductor": False, "time_limit": 5.0}
    _, (plan,) = compiled_as_without(language_model(), BUDGET, 1e-5, **options)
    assert plan.plan.graph.splits


def gated(x: torch.Tensor, labels: torch.Tensor, head: nn.Module) -> torch.Tensor:
    left, right = head(x).chunk(2, -1)
    return (F.silu(left) * right).square().mean()


def attention(x: torch.Tensor, labels: torch.Tensor, head: nn.Module) -> torch.Tensor:
    weights = torch.softmax(head(x) @ head(x).transpose(1, 2), -1)
    return F.mse_loss(weights @ x, x.detach())


def smoothed(x: torch.Tensor, labels: torch.Tensor, head: nn.Module) -> torch.Tensor:
    logits = head(x).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1, ignore_index=3)


def binary(x: torch.Tensor, labels: torch.Tensor, head: nn.Module) -> torch.Tensor:
    logits = F.layer_norm(head(x), (24,))
    target = labels.unsqueeze(-1).expand_as(logits) / 24
    return F.binary_cross_entropy_with_logits(logits, target.to(logits), reduction="sum")


class Computed(nn.Module):
    """A loss of a layer's output, an input and labels."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.head, self.function = nn.Linear(16, 24), function

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.function(x.tanh(), labels, self.head)


@pytest.mark.slow_cases("5-gated")
@pytest.mark.parametrize(
    "function",
    [gated, attention, *(pytest.param(f, marks=pytest.mark.slow) for f in (smoothed, binary))],
)
@pytest.mark.parametrize("pieces", [pytest.param(4, marks=pytest.mark.slow), 5])
def test_pieces_of_a_joint_graph_compute_what_the_whole_computed(
    function: Any, pieces: int
) -> None:
    torch.manual_seed(0)
    model = Computed(function).double()
    x = torch.randn(2, 10, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 24, (2, 10))
    model(x, labels).backward()
    expected = [t.grad.clone() for t in (x, *model.parameters())]
    model.zero_grad(set_to_none=True)
    x.grad = None
    torch._dynamo.reset()
    options = {"split": pieces, "inductor": False, "strategy": remat.Auto(time_limit=3.0, gap=0.2)}
    remat.compile(model, "min", **options)(x, labels).backward()
    assert remat.compiled_plans()[-1].plan.graph.splits
    for actual, wanted in zip((x, *model.parameters()), expected, strict=True):
        torch.testing.assert_close(actual.grad, wanted, rtol=1e-10, atol=1e-12)


def linear_step(primals: torch.Tensor, weight: torch.Tensor, tangents: torch.Tensor) -> Any:
    """Return the mean of a product and its gradient: the joint graph of a small step."""
    product = primals.relu() @ weight
    gradient = product * (2 * tangents / product.numel())
    return [product.square().mean(), primals.relu().t() @ gradient]


def test_a_joint_graph_with_any_names_is_split() -> None:
    """A custom operator may be named `__product`."""
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((20, 16), (16, 24), ())]
    module = make_fx(linear_step, tracing_mode="fake")(*inputs)
    graph: fx.Graph = module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        node._rename("__product")
    module.recompile()
    split, (record,), _ = split_joint_graph(module, 1, 4)
    assert record.pieces == 4
    for actual, wanted in zip(split(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(actual, wanted)


def test_auto_limits_the_operations_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all of a U-Net can be split by samples, but capturing and solving so many pieces
    leaves too little time to lower the peak ("min": 21.2 MB instead of 19.0)."""
    inputs = [torch.randn(s) for s in ((20, 16), (16, 24), ())]
    module = make_fx(linear_step, tracing_mode="fake")(*inputs)
    monkeypatch.setattr("remat.frontend.compile.split._MIN_NODE_LIMIT", 0)
    _, (record,), _ = split_joint_graph(module, 1, 16)
    assert record.pieces == 16
    with pytest.raises(CannotSplit):
        split_joint_graph(module, 1, 16, is_auto=True)


def stacked_step(primals: torch.Tensor, other: torch.Tensor, tangents: torch.Tensor) -> Any:
    """Return the mean of the maximum of two tensors' exponentials, and a gradient of it: the joint
    graph of a step with a stack, as it is decomposed."""
    one, two = primals.exp(), other.exp()
    stack = torch.cat([one, two]).view(2, *one.shape)
    gradient = stack.amax(0) * (tangents / one.numel())
    return [stack.amax(0).mean(), gradient.sum(0)]


@pytest.mark.parametrize("pieces", [3, 4])
def test_a_decomposed_stack_is_split_by_the_rows_of_its_tensors(pieces: int) -> None:
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((20, 16), (20, 16), ())]
    module = make_fx(stacked_step, tracing_mode="fake")(*inputs)
    split, (record,), _ = split_joint_graph(module, 1, pieces)
    assert (record.rows, record.pieces) == (20, pieces)
    largest = max(n.meta["val"].numel() for n in split.graph.nodes if n.op == "call_function")
    assert largest <= 2 * 16 * -(-20 // pieces), "the stack of one piece of each tensor"
    for actual, wanted in zip(split(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(actual, wanted)


def transposed_stack(primals: torch.Tensor, other: torch.Tensor, tangents: torch.Tensor) -> Any:
    """Return a step whose stack would have the strides of images, channels last."""
    one = primals.exp().view(4, 5, 16).transpose(1, 2)
    stack = torch.cat([one, one.sin()], 2).view(4, 16, 2, 5)
    gradient = stack.view(4, -1).sum(-1) * tangents
    return [stack.view(4, -1).logsumexp(-1).mean(), gradient, other.sum()]


def test_stacks_in_another_layout_or_of_symbolic_sizes_stay_as_they_are() -> None:
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((20, 16), (20, 16), ())]
    module = make_fx(transposed_stack, tracing_mode="fake")(*inputs)
    split, _, _ = split_joint_graph(module, 1, 4)
    for actual, wanted in zip(split(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(actual, wanted)
    with pytest.raises(CannotSplit):
        split_joint_graph(make_fx(stacked_step, tracing_mode="symbolic")(*inputs), 1, 4)


def test_other_concatenations_keep_their_results() -> None:
    """A concatenation whose view does not separate its tensors is no stack."""

    def step(primals: torch.Tensor, other: torch.Tensor, tangents: torch.Tensor) -> Any:
        joined = torch.cat([primals.exp(), other.exp()])
        return [joined.view(4, -1, 16).mean(), joined.sum(0) * tangents]

    inputs = [torch.randn(s, dtype=torch.float64) for s in ((20, 16), (20, 16), ())]
    module = make_fx(step, tracing_mode="fake")(*inputs)
    for actual, wanted in zip(
        split_joint_graph(module, 1, 4)[0](*inputs), module(*inputs), strict=True
    ):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.quick_cases("generalized_jsd", "top_k_distillation", "grpo_by_rows_of_log_softmax")
@pytest.mark.parametrize("name", LOSSES)
def test_no_joint_graph_of_a_loss_has_whole_logits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The joint graph has the decompositions of losses; a loss with a teacher has two heads."""
    values: dict[str, Any] = {}

    def recording_split(*args: Any, **kwargs: Any) -> Any:
        result = split_joint_graph(*args, **kwargs)
        calls = (n for n in result[0].graph.nodes if n.op == "call_function")
        values.update((n.name, n.meta.get("val")) for n in calls)  # planning modifies the graph
        return result

    monkeypatch.setattr("remat.frontend.compile.partitioner.split_joint_graph", recording_split)
    torch._dynamo.reset()
    torch.manual_seed(0)
    options: dict[str, Any] = {"inductor": False, "split": 16, "outputs": "loss", "time_limit": 0.5}
    result = remat.compile(Policy(LOSSES[name]), "min", **options)(**batch_of())
    assert isinstance(result, torch.Tensor | tuple)
    logits_elements = (TOKENS - 1) * SEQUENCES * WORDS
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    storage_elements = {
        name: t.untyped_storage().nbytes() // t.itemsize for name, t in tensors.items()
    }
    assert [
        name
        for name, t in tensors.items()
        if min(t.numel(), storage_elements[name]) >= logits_elements
    ] == []


@pytest.mark.slow_cases("orpo", "grpo_by_rows", "dpo_of_chunks", "generalized_jsd", "nucleus")
@pytest.mark.parametrize(
    "name", ["grpo", "orpo", "grpo_by_rows", "dpo_of_chunks", "generalized_jsd", "nucleus"]
)
def test_losses_in_pieces_have_eager_gradients(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = Policy(LOSSES[name]), batch_of()
    expected = copy.deepcopy(model)
    options: dict[str, Any] = {"inductor": False, "split": 16, "outputs": "loss", "time_limit": 3.0}
    run = remat.compile(model, "min", **options)
    for step in (run, expected):
        result = step(**batch)
        (result[0] if isinstance(result, tuple) else result).backward()
    assert remat.compiled_plans()[-1].plan.graph.splits
    for parameter, reference in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=1e-7)
