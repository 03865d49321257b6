"""Recomputation tags on the graph of a whole step, run by torch's own pass, as in torchtitan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.errors import InfeasibleBudget, TraceError
from remat.frontend.memory.meter import LiveStorageMeter
from remat.integrations.torchtitan import memory_policy

_FOLDER = "torch._functorch._activation_checkpointing"
apply_recompute_tags: Any = pytest.importorskip(
    f"{_FOLDER}.remat_using_tags_for_fwd_loss_bwd_graph_pass"
).remat_using_tags_for_fwd_loss_bwd_graph

CPU = remat.Roofline("cpu")


class Block(nn.Module):
    def __init__(self, width: int, drop: float, in_place: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop, self.in_place = drop, in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.narrow(F.silu(self.wide(self.norm(x))))
        if self.in_place:
            output = output.mul_(1.01)
        if self.drop:
            output = output * (torch.rand_like(output) > self.drop)
        return x + output


def step_of(
    drop: float = 0.0, count: int = 4, in_place: bool = False
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Return the graph from parameters and a batch to a loss and gradients, and its inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32, drop, in_place) for _ in range(count)))
    names = [name for name, _ in model.named_parameters()]
    step_inputs = [p.detach() for p in model.parameters()] + [torch.randn(256, 32)]

    def step(*tensors: torch.Tensor) -> Any:
        parameters = [t.requires_grad_() for t in tensors[:-1]]
        loss = functional_call(model, dict(zip(names, parameters, strict=True)), (tensors[-1],))
        loss = loss.square().mean()
        with torch.fx.traceback.annotate({"phase": "backward"}):
            gradients = torch.autograd.grad(loss, parameters)
        return [loss, *gradients]

    with torch.fx.traceback.preserve_node_meta():
        gm = make_fx(step, tracing_mode="fake")(*step_inputs)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm, step_inputs


def run_graph(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Run a graph; return its results, and the peak with its inputs."""
    torch.manual_seed(3)
    with LiveStorageMeter() as meter, torch.no_grad():
        actual = gm(*inputs)
    return actual, meter.peak_bytes + sum(t.nbytes for t in inputs)


@pytest.mark.parametrize("drop", [0.0, 0.1])
@pytest.mark.parametrize("share", [pytest.param("80%", marks=pytest.mark.slow), "60%"])
def test_the_tagged_graph_has_the_peak_of_the_plan(share: str, drop: float) -> None:
    gm, inputs = step_of(drop)
    expected, most_bytes = run_graph(gm, inputs)
    policy = memory_policy(share, costs=CPU)
    assert policy(gm, config=None) is gm
    plan = policy.plan
    assert plan is not None
    assert plan.baseline_peak_bytes == pytest.approx(most_bytes, rel=0.001)
    assert plan.peak_bytes <= plan.budget_bytes
    tags = [node.meta["recompute"] for node in gm.graph.nodes if "recompute" in node.meta]
    assert set(tags) == {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE}
    other = apply_recompute_tags(gm)
    recomputed = [n for n in other.graph.nodes if n.name.endswith("_recomputed")]
    assert recomputed
    actual, peak_bytes = run_graph(other, inputs)
    assert all(map(torch.equal, actual, expected))
    assert peak_bytes <= plan.peak_bytes
    assert peak_bytes >= 0.97 * plan.peak_bytes


def test_random_operations_are_never_recomputed() -> None:
    gm, _ = step_of(0.1)
    with pytest.raises(InfeasibleBudget):
        memory_policy("10%", costs=CPU)(gm)
    memory_policy("min", costs=CPU)(gm)
    random_nodes = [n for n in gm.graph.nodes if "rand_like" in str(n.target)]
    assert {n.meta["recompute"] for n in random_nodes} == {CheckpointPolicy.MUST_SAVE}


def test_what_is_written_in_place_is_neither_recomputed_nor_counted_twice() -> None:
    gm, inputs = step_of(in_place=True)
    expected, most_bytes = run_graph(gm, inputs)
    policy = memory_policy("70%", costs=CPU)
    policy(gm)
    assert policy.plan is not None
    assert policy.plan.baseline_peak_bytes == pytest.approx(most_bytes, rel=0.001)
    written = [n.all_input_nodes[0] for n in gm.graph.nodes if "mul_" in str(n.target)]
    assert {n.meta["recompute"] for n in written} == {CheckpointPolicy.MUST_SAVE}
    actual, peak_bytes = run_graph(apply_recompute_tags(gm), inputs)
    assert all(map(torch.equal, actual, expected))
    assert 0.97 * policy.plan.peak_bytes <= peak_bytes <= policy.plan.peak_bytes


def opaque_silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x)


def test_functions_without_a_schema_are_never_recomputed() -> None:
    gm, _ = step_of()
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default):
        node.target = opaque_silu
    gm.recompile()
    policy = memory_policy("min", costs=CPU)
    policy(gm)
    assert policy.plan is not None
    assert policy.plan.schedule.recomputed(policy.plan.graph), "other operations are"
    opaque = gm.graph.find_nodes(op="call_function", target=opaque_silu)
    assert {n.meta["recompute"] for n in opaque} == {CheckpointPolicy.MUST_SAVE}


def test_a_graph_without_a_backward_is_refused() -> None:
    gm = fx.symbolic_trace(nn.Linear(2, 2))
    with pytest.raises(TraceError, match="no node of this graph is marked as backward"):
        memory_policy("80%", costs=CPU)(gm)


def test_operations_are_measured_where_no_costs_are_passed() -> None:
    gm, _ = step_of(count=2)
    policy = memory_policy("80%")
    policy(gm)
    assert policy.plan is not None
    assert policy.plan.time_s > 0
