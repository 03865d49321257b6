"""Outputs next to the loss: held to the end of the backward, dropped before it, or not returned
(`outputs="held"`, `"dropped"`, `"loss"`)."""

from __future__ import annotations

import copy
import logging
import operator
import pickle
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.steps import Step, assert_same, assert_same_steps, step
from torch import nn

import remat
from remat.documents.targets import BOUNDARY_NAME
from remat.documents.trace import Trace
from remat.frontend.compile.registry import CompiledPlan
from remat.frontend.memory.meter import allocated_peak
from remat.passes.outputs import differentiated_bytes, returns_loss

COSTS = remat.Roofline("cpu")
WORDS = 700


class LossAndLogits(nn.Module):
    """A model whose largest tensor is an output next to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return {"loss": loss, "logits": logits}


def batch() -> torch.Tensor:
    return torch.randint(0, WORDS, (8, 64), generator=torch.Generator().manual_seed(0))


LOGITS_BYTES = batch().numel() * WORDS * 4


def loss_and_logits() -> LossAndLogits:
    torch.manual_seed(0)
    return LossAndLogits()


def step_of(model: Any) -> Step:
    """Run a step that keeps only the loss."""
    return step(model, batch(), run=lambda ids: model(ids)["loss"])


def measured_peak(model: nn.Module, run: Any) -> int:
    """Return the peak by the allocator of a warm step that keeps only the loss."""
    step_of(model)
    model.zero_grad(set_to_none=True)
    ids = batch()
    peak = allocated_peak(lambda: run(ids)["loss"].backward())
    return peak + ids.nbytes + sum(p.nbytes for p in model.parameters())


@pytest.mark.slow
def test_dropped_outputs_exist_until_the_backward_starts() -> None:
    trace = remat.measure(remat.trace(loss_and_logits(), (batch(),), outputs="dropped"), COSTS)
    graph = trace.graph()
    assert graph.boundary is not None
    start = graph.operations[graph.boundary]
    assert start.name == BOUNDARY_NAME
    assert LOGITS_BYTES in {graph.values[v].size_bytes for v in start.inputs}
    assert not graph.results.intersection(start.inputs)
    assert Trace.from_json(trace.to_json()).graph() == graph
    model = loss_and_logits()
    eager_outputs = model(batch())  # a caller that holds them anyway can read them
    gm = remat.optimize(model, "min", (batch(),), costs=COSTS, outputs="dropped")
    planned_outputs = gm(batch())
    planned_outputs["loss"].backward()
    assert torch.equal(planned_outputs["logits"], eager_outputs["logits"])


@pytest.mark.slow
def test_dropping_outputs_that_are_counted_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    gm = remat.optimize(loss_and_logits(), "92%", (batch(),), costs=COSTS)

    def warnings_logged() -> list[str]:
        return [r.getMessage() for r in caplog.records if 'outputs="dropped"' in r.getMessage()]

    with caplog.at_level(logging.WARNING, logger="remat"):
        for _ in range(4):
            outputs = gm(batch())
            outputs["loss"].backward()
        step_of(gm)
        step_of(gm)
        assert warnings_logged() == []
        for _ in range(4):
            step_of(gm)
    (message,) = warnings_logged()
    assert "1.37 MiB" in message


@pytest.mark.slow
def test_nothing_is_logged_where_dropping_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    all_of_it = remat.optimize(loss_and_logits(), "100%", (batch(),), costs=COSTS)
    planned_so = remat.optimize(
        loss_and_logits(), "92%", (batch(),), costs=COSTS, outputs="dropped"
    )
    with caplog.at_level(logging.WARNING, logger="remat"):
        for _ in range(4):
            step_of(all_of_it)
            step_of(planned_so)
    assert 'outputs="dropped"' not in caplog.text


@pytest.mark.parametrize(
    "call",
    [remat.optimize, remat.enable, lambda m, _, **o: remat.trace(m, (batch(),), **o)],
)
def test_an_unknown_value_of_outputs_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match=r"outputs is 'droped'; near are dropped; they are 'held'"):
        call(loss_and_logits(), "60%", outputs="droped")


class LossAndScaledLogits(LossAndLogits):
    """A model with a large output that its backward does not read."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = super().forward(ids)
        return {"loss": outputs["loss"], "logits": 2 * outputs["logits"]}


@pytest.mark.slow
@needs_compiler
def test_dropped_outputs_lower_the_peak_of_plain_torch_compile() -> None:
    plans: list[CompiledPlan] = []
    for outputs in ("dropped", "held"):
        torch._dynamo.reset()
        run = remat.compile(LossAndScaledLogits(), "min", outputs=outputs, time_limit=4.0)
        run(batch())["loss"].backward()
        plans.append(remat.compiled_plans()[-1])
    without_outputs, with_outputs = plans
    assert without_outputs.baseline_bytes <= with_outputs.baseline_bytes - 0.9 * LOGITS_BYTES


LOSS_ONLY: dict[str, Any] = {"costs": COSTS, "outputs": "loss"}

Pair = namedtuple("Pair", "loss logits")


@dataclass
class LossOutput:
    loss: torch.Tensor
    logits: torch.Tensor


class Wrapped(LossAndLogits):
    """Returns the same outputs in a container of another type."""

    def __init__(self, container: Callable[..., Any]) -> None:
        super().__init__()
        self.container = container

    def forward(self, ids: torch.Tensor) -> Any:
        return self.container(*super().forward(ids).values())


def test_the_step_takes_less_and_computes_the_same() -> None:
    model = loss_and_logits()
    expected = step_of(copy.deepcopy(model))
    peaks = {}
    for outputs in ("held", "dropped", "loss"):
        gm = remat.optimize(model, "min", (batch(),), costs=COSTS, outputs=outputs, split="off")
        assert torch.equal(gm(batch())["loss"], model(batch())["loss"])
        assert_same(step_of(gm), expected)
        peaks[outputs] = gm.plan.peak_bytes
        assert gm.program is not None
        assert gm.program.outputs_dropped or outputs != "dropped"
        assert outputs == "held" or measured_peak(model, gm) <= gm.plan.peak_bytes
    assert peaks["held"] - peaks["dropped"] >= 0.9 * LOGITS_BYTES
    assert peaks["loss"] <= peaks["dropped"]


@pytest.mark.slow
def test_with_pieces_the_logits_never_exist_as_a_whole() -> None:
    model = loss_and_logits()
    expected = step_of(copy.deepcopy(model))
    gm = remat.optimize(model, "min", (batch(),), **LOSS_ONLY)
    assert gm.plan.peak_bytes < LOGITS_BYTES
    assert measured_peak(model, gm) <= gm.plan.peak_bytes
    assert_same(step_of(gm), expected, tolerance=1e-5)


@pytest.mark.parametrize("container", [Pair, LossOutput, lambda loss, logits: (loss, [logits])])
def test_the_output_keeps_its_class(container: Callable[..., Any]) -> None:
    model = Wrapped(container)
    expected = model(batch())
    output = remat.optimize(model, "100%", (batch(),), **LOSS_ONLY)(batch())
    assert type(output) is type(expected)
    if not isinstance(output, tuple):
        assert torch.equal(output.loss, expected.loss)
        assert "logits: not returned" in repr(output)
        return
    assert torch.equal(output[0], expected[0])
    with pytest.raises(remat.OutputNotComputed, match=r"'\[1\](\[0\])?' was not"):
        torch.argmax(output[1] if isinstance(output, Pair) else output[1][0])


USES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda x: x.shape,
    "method": lambda x: x.detach(),
    "function": lambda x: torch.softmax(x, dim=-1),
    "functional": lambda x: F.cross_entropy(x, torch.tensor([0])),
    "second operand": lambda x: torch.ones(1) * x,
    "in a list": lambda x: torch.stack([torch.ones(1), x]),
    "sum with a number": lambda x: 1 + x,
    "product": lambda x: x @ torch.ones(1),
    "comparison": lambda x: x == 0,
    "index": operator.itemgetter(0),
    "truth": bool,
    "number": float,
    "length": len,
    "loop": list,
    "assignment": lambda x: operator.setitem(x, 0, 1.0),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_an_output_that_was_not_returned_is_an_error(use: Any) -> None:
    logits = remat.optimize(loss_and_logits(), "100%", (batch(),), **LOSS_ONLY)(batch())["logits"]
    with pytest.raises(remat.OutputNotComputed, match="'logits' was not returned"):
        use(logits)
    assert logits is not None
    assert repr(pickle.loads(pickle.dumps(logits))) == repr(copy.deepcopy(logits)) == repr(logits)


def test_evaluation_returns_everything() -> None:
    model = loss_and_logits()
    gm = remat.optimize(model, "100%", (batch(),), **LOSS_ONLY)
    with torch.no_grad():
        assert torch.equal(gm(batch())["logits"], model(batch())["logits"])


class DropoutAfterLoss(LossAndLogits):
    """Samples numbers, and writes a buffer, for an output that is not returned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = super().forward(ids)
        noisy = F.dropout(outputs["logits"], 0.5)
        self.calls += noisy.detach().mean()
        return {"loss": outputs["loss"], "logits": noisy}


def test_random_numbers_and_writes_stay_in_the_step() -> None:
    torch.manual_seed(0)
    model = DropoutAfterLoss()
    eager = copy.deepcopy(model)
    gm = remat.optimize(model, "100%", (batch(),), **LOSS_ONLY)
    sampled = []
    for run in (eager, gm):
        step_of(run)
        sampled.append(torch.rand(2))
    assert torch.equal(*sampled)
    assert torch.equal(model.calls, eager.calls)
    assert model.calls != 0


class TwoLosses(LossAndLogits):
    """Returns two scalars, of which a caller may add up both."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = super().forward(ids)
        return {**outputs, "penalty": self.head.weight.square().mean()}


def test_gradients_may_come_from_several_losses() -> None:
    torch.manual_seed(0)
    model = TwoLosses()
    eager = copy.deepcopy(model)
    gm = remat.optimize(model, "100%", (batch(),), **LOSS_ONLY)
    assert_same_steps(gm, eager, batch(), loss=lambda outputs: outputs["loss"] + outputs["penalty"])
    named = remat.optimize(TwoLosses(), "100%", (batch(),), **LOSS_ONLY, differentiate="loss")
    assert named(batch())["penalty"] > 0  # a number is returned, without a gradient
    with pytest.raises(remat.GuardError):
        named(batch())["penalty"].backward()


class OnlyLogits(LossAndLogits):
    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids)["logits"]


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_a_model_without_a_loss_is_refused(scope: str) -> None:
    model = remat.enable(OnlyLogits(), "100%", scope=scope, outputs="loss")
    with pytest.raises(remat.TraceError, match="needs a model that returns its loss"):
        model(batch())


def test_policies_of_other_libraries_return_everything() -> None:
    with pytest.raises(ValueError, match='outputs="loss" is not for policies'):
        remat.emit(loss_and_logits(), "80%", (batch(),), outputs="loss")


@pytest.mark.slow
def test_other_sizes_are_planned_alike() -> None:
    model = loss_and_logits()
    gm = remat.optimize(model, "90%", (batch(),), **LOSS_ONLY, split="off")
    for rows in (2, 3, 5):
        ids = batch()[:rows]
        assert repr(gm(ids)["logits"]).startswith("<logits: not returned")
        assert torch.equal(gm(ids)["loss"], model(ids)["loss"])


def test_a_trace_is_stored_without_the_outputs() -> None:
    trace = remat.trace(loss_and_logits(), (batch(),), outputs="loss")
    assert len(trace.outputs) == 1
    stored = Trace.from_json(trace.to_json())
    assert stored == trace
    measured = remat.measure(stored, COSTS)
    schedule = remat.solve(measured, "100%").schedule
    model = loss_and_logits()
    gm = remat.lower(remat.rewrite(measured, schedule), model)
    assert_same(step_of(gm), step_of(loss_and_logits()))


class Layers(LossAndLogits):
    """The same with layers that are planned one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )


@pytest.mark.slow
def test_blocks_return_the_loss_only() -> None:
    torch.manual_seed(0)
    model = Layers()
    expected = step_of(copy.deepcopy(model))
    remat.enable(model, "100%", scope="blocks", outputs="loss", costs="cpu")
    assert_same(step_of(model), expected)
    output = model(batch())
    with pytest.raises(remat.OutputNotComputed):
        output["logits"].sum()
    copied = copy.deepcopy(model)
    assert repr(copied(batch())["logits"]).startswith("<logits: not returned")
    with torch.no_grad():
        assert model(batch())["logits"].shape == (8, 64, 700)


class StoresAuxiliaryLoss(nn.Module):
    """A model that stores a scalar and returns larger tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.aux = torch.zeros(())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.layer(x))
        self.aux = (h**2).mean()
        return {"hidden": self.layer(h)}


def test_a_stored_scalar_is_no_returned_loss() -> None:
    model, x = StoresAuxiliaryLoss(), torch.randn(4096, 16)
    trace = remat.trace(model, x)
    assert [output.is_stored for output in trace.outputs] == [False, True]
    assert not returns_loss(trace)
    assert differentiated_bytes(trace) == 4096 * 16 * 4
    with pytest.raises(remat.TraceError, match='outputs="loss" needs a model that returns its lo'):
        remat.optimize(model, "100%", x, outputs="loss", costs=COSTS)
    answer = remat.fit(model, x, memory=500_000, device="cpu", optimizer="none")
    assert all("loss = model" not in option.code for option in answer.options)


def test_an_infeasible_budget_mentions_the_option() -> None:
    trace = remat.measure(remat.trace(loss_and_logits(), (batch(),)), COSTS)
    with pytest.raises(remat.InfeasibleBudget, match=r'1\.37 MiB are outputs .* outputs="loss"'):
        remat.solve(trace, "20%")
    loss_only = remat.measure(remat.trace(loss_and_logits(), (batch(),), outputs="loss"), COSTS)
    with pytest.raises(remat.InfeasibleBudget) as error:
        remat.solve(loss_only, "5%")
    assert "outputs=" not in str(error.value)


@pytest.mark.slow
def test_a_graph_without_a_loss_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo may break the graph of a model before its loss: all of that graph is returned."""
    torch._dynamo.reset()
    run = remat.compile(OnlyLogits(), "100%", outputs="loss", inductor=False)
    with caplog.at_level(logging.WARNING, logger="remat"):
        assert run(batch()).shape == (8, 64, 700)
    assert 'outputs="loss" has no effect on this graph' in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("outputs", ["dropped", "loss"])
def test_without_inductor_the_measured_peak_is_the_planned_one(outputs: str) -> None:
    """Saved tensors are freed as soon as the backward has read them."""
    torch._dynamo.reset()
    model = loss_and_logits()
    run = remat.compile(model, "95%", outputs=outputs, inductor=False, split="off")
    step_of(run)
    step_of(run)
    assert measured_peak(model, run) == remat.compiled_plans()[-1].plan.peak_bytes


@pytest.mark.slow
@needs_compiler
def test_compiled_steps_return_the_loss_only() -> None:
    model = loss_and_logits()
    expected = step_of(copy.deepcopy(model))
    verified = {}
    for outputs in ("dropped", "loss"):
        torch._dynamo.reset()
        run = remat.compile(model, "min", outputs=outputs, time_limit=4.0)
        actual = step(model, batch(), run=lambda ids, run=run: run(ids)["loss"])
        assert_same(actual, expected, tolerance=1e-4)
        peak = measured_peak(model, run)
        plan = remat.compiled_plans()[-1]
        assert plan.verified_bytes is not None
        assert peak <= plan.verified_bytes
        verified[outputs] = plan.verified_bytes
    assert verified["loss"] < verified["dropped"]
    with pytest.raises(remat.OutputNotComputed, match="'logits' was not returned"):
        run(batch())["logits"].argmax(-1)
    with torch.no_grad():
        assert run(batch())["logits"].shape == (8, 64, 700)


class Cache:
    """An object that data cannot describe."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class WithCache(Layers):
    def forward(self, ids: torch.Tensor) -> Any:
        outputs = super().forward(ids)
        return {**outputs, "more": (outputs["logits"].sum(-1),), "cache": Cache(outputs["logits"])}


@pytest.mark.slow
def test_blocks_return_objects_as_they_are() -> None:
    torch.manual_seed(0)
    model = WithCache()
    expected = step_of(copy.deepcopy(model))
    remat.enable(model, "100%", scope="blocks", outputs="loss", costs="cpu")
    assert_same(step_of(model), expected)
    output = model(batch())
    assert isinstance(output["cache"], Cache)
    for name in ("logits", "more"):
        with pytest.raises(remat.OutputNotComputed, match=name):
            torch.sum(output[name] if name == "logits" else output[name][0])
