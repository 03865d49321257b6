"""Plans of blocks that offload saved tensors to the host: numbers, memory, copies and errors."""

from __future__ import annotations

import copy
import gc
import pickle
import time
from typing import Any

import pytest
import torch
from tests.helpers.training.block_models import (
    Block,
    Net,
    Output,
    Routed,
    assert_same,
    loss_of,
    peak_of,
    plan_of,
    step,
)
from tests.helpers.training.steps import assert_same_gradients, assert_same_steps, results
from torch import nn

import remat
from remat.blockwise.blocks_plan import BlocksPlan
from remat.errors import InfeasibleBudget, RematError
from remat.frontend.blocks.runtime import PlannedHostCopies, StepHostCopies
from remat.frontend.runtime.host_file import HostFile, host_file

pytestmark = pytest.mark.usefixtures("offload_file_in_tmp_path")

FAST = remat.Link(1e12, 1e12)
WIDTH, TOKENS = 64, 4096


class Breakable(Net):
    """A `Net` that can fail before one of its blocks, in the forward or in the backward."""

    fails_in = ""

    def forward(self, ids: torch.Tensor) -> Output:
        x = self.embed(ids) * self.scale
        for number, block in enumerate(self.blocks):
            if number == 3 and self.fails_in == "forward":
                raise ValueError("no more")
            if number == 3 and self.fails_in == "backward":
                x.register_hook(_fail)
            x = block(x)
        logits = self.head(x)
        return Output(nn.functional.cross_entropy(logits, ids), logits)


def _fail(_: torch.Tensor) -> None:
    raise ValueError("no more")


def enabled(model: nn.Module, budget: int | str, batch: torch.Tensor, **more: Any) -> Any:
    settings: dict[str, Any] = {"offload": "auto", "link": FAST} | more
    return remat.enable(
        model, budget, (batch,), scope="blocks", outputs="dropped",
        costs=remat.Roofline("cpu"), strategy=remat.Auto(time_limit=0.1, gap=0.02), **settings,
    )  # fmt: skip


def without_offload(model: nn.Module, budget: int | str, batch: torch.Tensor) -> BlocksPlan:
    return plan_of(enabled(copy.deepcopy(model), budget, batch, offload="off", link=None))


@pytest.fixture(scope="module")
def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 50, (TOKENS,))


@pytest.fixture(scope="module")
def eager() -> Breakable:
    torch.manual_seed(0)
    return Breakable([Block(WIDTH) for _ in range(6)], WIDTH)


@pytest.fixture(scope="module")
def planned(eager: Breakable, batch: torch.Tensor) -> Breakable:
    """The model with a plan that offloads, to be copied: copies have its plans."""
    return enabled(copy.deepcopy(eager), "45%", batch)


@pytest.mark.slow
def test_a_budget_below_the_smallest_without_offloading(
    eager: Breakable, batch: torch.Tensor
) -> None:
    smallest = without_offload(eager, "min", batch).peak_bytes
    budget = int(0.92 * smallest)
    with pytest.raises(InfeasibleBudget):
        without_offload(eager, budget, batch)
    model = enabled(copy.deepcopy(eager), budget, batch)
    plan = plan_of(model)
    assert plan.host_bytes == sum(call.offloaded_bytes for call in plan.calls) > 0
    measured = peak_of(model, batch)
    assert 0.99 * plan.peak_bytes <= measured <= plan.peak_bytes <= budget
    assert_same_steps(model, eager, batch, seeds=(1, 2))
    with pytest.raises(InfeasibleBudget) as raised:
        enabled(copy.deepcopy(eager), budget // 2, batch)
    assert raised.value.min_feasible_bytes is not None
    assert raised.value.min_feasible_bytes < budget


@pytest.mark.slow
def test_offloading_is_faster_where_both_fit(
    eager: Breakable, planned: Breakable, batch: torch.Tensor
) -> None:
    plan, other = plan_of(planned), without_offload(eager, "45%", batch)
    assert plan.baseline_time_s <= plan.time_s < 0.9 * other.time_s
    assert plan.lower_bound is not None
    assert plan.lower_bound <= plan.overhead
    model = copy.deepcopy(planned)
    assert 0.99 * plan.peak_bytes <= peak_of(model, batch) <= plan.peak_bytes <= plan.budget_bytes
    assert_same_steps(model, eager, batch, seeds=(1, 2, 3))
    assert host_file().used_bytes == 0


def test_the_plan_says_what_it_offloads(planned: Breakable) -> None:
    plan = plan_of(planned)
    text = plan.describe()
    count = sum(len(call.offloaded) for call in plan.calls)
    assert not plan.calls[-1].offloaded  # no forward follows the last one
    assert f"offload   {count} tensors of " in text
    assert "for 0 s of which the step waits" in text
    assert "on host" in text
    assert pickle.loads(pickle.dumps(plan)).describe() == text


@pytest.mark.slow
def test_gradients_accumulate_with_evaluation_between(
    eager: Breakable, planned: Breakable, batch: torch.Tensor
) -> None:
    model, reference = copy.deepcopy(planned), copy.deepcopy(eager)
    for seed in (1, 2, 3):
        for m in (reference, model):
            torch.manual_seed(seed)
            loss_of(m(batch)).backward()
            m.eval()
            with torch.no_grad():
                m(batch)
            assert host_file().used_bytes == 0
            m.train()
    assert_same_gradients(model, reference)


def test_several_batches_and_a_step_without_a_backward(
    eager: Breakable, planned: Breakable, batch: torch.Tensor
) -> None:
    model = copy.deepcopy(planned)
    reference = [step(eager, batch, seed) for seed in (1, 2)]
    torch.manual_seed(1)
    first = loss_of(model(batch))
    offloaded_bytes = host_file().used_bytes
    assert offloaded_bytes >= plan_of(model).host_bytes
    torch.manual_seed(2)
    second = loss_of(model(batch))
    unused = loss_of(model(batch))
    assert host_file().used_bytes == 3 * offloaded_bytes
    del unused
    for loss, expected in ((first, reference[0]), (second, reference[1])):
        loss.backward()
        assert_same(results(model, loss), expected)
        model.zero_grad(set_to_none=True)
    assert host_file().used_bytes == 0


def test_backwards_of_a_part_and_a_second_backward(
    eager: Breakable, planned: Breakable, batch: torch.Tensor
) -> None:
    model = copy.deepcopy(planned)
    expected = step(eager, batch, 1)
    torch.manual_seed(1)
    loss = loss_of(model(batch))
    last = model.blocks[5].get_submodule("wide").get_parameter("weight")
    (of_last,) = torch.autograd.grad(loss, [last], retain_graph=True)
    assert torch.equal(of_last, expected[1]["blocks.5.wide.weight"])
    for keep_graph in (True, False):
        model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=keep_graph)
        assert_same(results(model, loss), expected)
    assert host_file().used_bytes == 0


@pytest.mark.parametrize("place", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_steps_after_an_error(
    eager: Breakable, planned: Breakable, batch: torch.Tensor, place: str
) -> None:
    model = copy.deepcopy(planned)
    model.fails_in = place
    with pytest.raises(ValueError, match="no more"):
        step(model, batch, 1)
    gc.collect()
    deadline_s = time.monotonic() + 10
    while host_file().used_bytes and time.monotonic() < deadline_s:
        time.sleep(0.01)  # copies that had started end first
    assert host_file().used_bytes == 0
    model.fails_in = ""
    model.zero_grad(set_to_none=True)
    assert_same_steps(model, eager, batch)
    assert peak_of(model, batch) <= plan_of(model).peak_bytes
    offloaded = sum(len(call.offloaded) for call in plan_of(model).calls)
    assert _count_reloads_in_backward(model, batch) == offloaded


@pytest.mark.slow
def test_slow_copies_make_the_step_wait_and_need_no_memory(
    eager: Breakable, planned: Breakable, batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(planned)
    copy_bytes = HostFile._copy
    started: list[float] = []

    def slow(self: HostFile, *args: Any) -> None:
        started.append(time.perf_counter())
        time.sleep(0.02)
        copy_bytes(self, *args)

    monkeypatch.setattr(HostFile, "_copy", slow)
    assert peak_of(model, batch) <= plan_of(model).peak_bytes
    assert len(started) == 2 * sum(len(call.offloaded) for call in plan_of(model).calls)
    assert_same_steps(model, eager, batch)


@pytest.mark.slow
def test_the_host_budget_is_respected(
    eager: Breakable, batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_budget = 9 << 20
    model = enabled(copy.deepcopy(eager), "45%", batch, host_budget=host_budget)
    plan = plan_of(model)
    assert 0 < plan.host_bytes <= host_budget
    write, used = HostFile.write, [0]

    def recorded(self: HostFile, tensor: torch.Tensor) -> int:
        number = write(self, tensor)
        used.append(self.used_bytes)
        return number

    monkeypatch.setattr(HostFile, "write", recorded)
    assert_same_steps(model, eager, batch)
    assert max(used) == plan.host_bytes
    model = enabled(copy.deepcopy(eager), "45%", batch, host_budget=0)
    assert plan_of(model).host_bytes == 0
    assert "host" not in plan_of(model).describe()


@pytest.mark.slow
def test_a_slow_link_leaves_tensors_on_the_device(eager: Breakable, batch: torch.Tensor) -> None:
    slow = plan_of(enabled(copy.deepcopy(eager), "45%", batch, link=remat.Link(1e6, 1e6)))
    assert slow.host_bytes == 0
    assert slow.time_s == pytest.approx(without_offload(eager, "45%", batch).time_s, rel=2e-3)


@pytest.mark.slow
def test_batches_in_flight_count_on_the_host_and_not_on_the_device(
    eager: Breakable, batch: torch.Tensor
) -> None:
    model = enabled(copy.deepcopy(eager), "45%", batch, in_flight=2)
    plan = plan_of(model)
    assert plan.host_bytes == 2 * sum(call.offloaded_bytes for call in plan.calls) > 0

    step(model, batch, 1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.manual_seed(1)
    for loss in [loss_of(model(batch)) for _ in range(2)]:
        loss.backward()
    torch.manual_seed(1)
    reference = copy.deepcopy(eager)
    for _ in range(2):
        loss_of(reference(batch)).backward()
    assert_same_gradients(model, reference, 1e-4)
    assert host_file().used_bytes == 0


@pytest.mark.slow
def test_another_size_offloads_with_the_same_schedules(
    eager: Breakable, planned: Breakable, batch: torch.Tensor
) -> None:
    model, shorter = copy.deepcopy(planned), batch[: TOKENS * 3 // 4]
    assert_same_steps(model, eager, shorter)
    assert peak_of(model, shorter) <= plan_of(model).peak_bytes
    assert_same_steps(model, eager, batch, seeds=(2,))


@pytest.mark.slow
def test_blocks_in_eager_mode_hide_the_copies_of_others() -> None:
    torch.manual_seed(0)
    model = Net([Routed(32) for _ in range(3)], 32)
    ids = torch.randint(0, 50, (8192,))
    unplanned = copy.deepcopy(model)
    enabled(model, "70%", ids)
    plan = plan_of(model)
    assert {c.how for c in plan.calls if len(c.offloaded)} == {"planned"}
    assert {c.how for c in plan.calls} > {"planned"}
    reloads = _count_reloads_in_backward(model, ids)
    assert reloads == sum(len(c.offloaded) for c in plan.calls) > 0
    assert peak_of(model, ids) <= plan.peak_bytes
    assert_same_steps(model, unplanned, ids, seeds=(1, 2))
    assert host_file().used_bytes == 0


def _count_reloads_in_backward(model: nn.Module, ids: torch.Tensor) -> int:
    """Return the number of tensors that had started to come back when their backward began."""
    counts: list[int] = []
    restore = StepHostCopies.restore

    def counting(self: StepHostCopies, call: int, saved: list[torch.Tensor]) -> None:
        counts.append(len(self._arriving.get(call, ())))
        restore(self, call, saved)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepHostCopies, "restore", counting)
        step(model, ids, 1)
    return sum(counts)


@pytest.mark.slow
def test_scope_auto_offloads_in_blocks() -> None:
    torch.manual_seed(0)
    model = Unscripted([Block(WIDTH) for _ in range(4)], WIDTH)
    ids = torch.randint(0, 50, (TOKENS,))
    expected = step(model, ids, 1)
    remat.enable(
        model, "60%", (ids,), outputs="dropped", costs=remat.Roofline("cpu"), offload="auto",
        link=FAST, strategy=remat.Auto(time_limit=0.1, gap=0.02),
    )  # fmt: skip
    assert plan_of(model).host_bytes > 0
    assert_same(step(model, ids, 1), expected)


class Unscripted(Net):
    """A `Net` that reads the value of an element between its blocks."""

    def forward(self, ids: torch.Tensor) -> Output:
        assert float(self.scale.detach().sum()) < 1e9
        return super().forward(ids)


class Linked:
    """Two calls of a step, with a tensor each: call 0 comes back when the backward of 1 starts."""

    def __init__(self) -> None:
        self.copies = StepHostCopies(
            {0: PlannedHostCopies((0,)), 1: PlannedHostCopies((0,), reloads=0)}
        )
        self.tensors = [torch.randn(1000, 3), torch.randn(500)]
        self.saved = [[tensor.clone()] for tensor in self.tensors]
        for call in (0, 1):
            self.copies.start_offload(call, self.saved[call])
            self.copies.end_forward(call)

    def restore(self, call: int) -> None:
        self.copies.restore(call, self.saved[call])
        assert torch.equal(self.saved[call][0], self.tensors[call])


@pytest.mark.slow
def test_copies_come_back_in_the_order_of_the_plan_and_in_another() -> None:
    for order in ((1, 0), (0, 1), (0,), (1,)):
        linked = Linked()
        linked.copies.end_forward()
        for call in order:
            linked.restore(call)
        del linked
        gc.collect()
        assert host_file().used_bytes == 0


def test_tensors_come_back_before_they_have_left() -> None:
    linked = Linked()
    linked.restore(1)
    linked.restore(0)


def test_views_and_missing_tensors_stay() -> None:
    whole = torch.randn(100)
    saved: list[Any] = [whole[:50], None, torch.randn(4, 5).t()]
    before = list(saved)
    copies = StepHostCopies({0: PlannedHostCopies((0, 1, 2))})
    copies.start_offload(0, saved)
    assert saved[:2] == before[:2]
    assert saved[2] is not before[2]
    copies.end_forward()
    copies.restore(0, saved)
    assert torch.equal(saved[2], before[2])
    assert saved[2].stride() == before[2].stride()


def test_a_tensor_that_is_written_over_while_it_leaves_is_an_error() -> None:
    tensor = torch.zeros(1000)
    saved = [tensor]
    copies = StepHostCopies({0: PlannedHostCopies((0,))})
    copies.start_offload(0, saved)
    tensor.add_(1)
    copies.end_forward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        copies.restore(0, saved)


def test_handles_that_hooks_copied_are_an_error_that_says_why(
    planned: Breakable, batch: torch.Tensor
) -> None:
    model = copy.deepcopy(planned)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        loss = loss_of(model(batch))
    with pytest.raises(RematError, match="saved_tensors_hooks"):
        loss.backward()


@pytest.mark.slow
def test_a_transformer_trains() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=8, n_embd=128, n_head=4, n_positions=512, vocab_size=500, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.GPT2LMHeadModel(config)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids, labels=ids).loss

    torch.manual_seed(0)
    model, ids = Language().train(), torch.randint(0, 500, (4, 512))
    smallest = without_offload(model, "min", ids).peak_bytes
    for budget in (int(0.9 * smallest), "40%"):
        fast = enabled(copy.deepcopy(model), budget, ids)
        plan = plan_of(fast)
        assert plan.host_bytes > 0
        assert 0.99 * plan.peak_bytes <= peak_of(fast, ids) <= plan.peak_bytes <= plan.budget_bytes
        assert_same_steps(fast, model, ids, seeds=(1, 2, 3))
        assert host_file().used_bytes == 0
