"""`remat.emit`: policies that torch, Transformers and torch_remat run."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training import steps
from tests.helpers.training.models import FAMILIES, WithParts
from tests.helpers.training.steps import Step, assert_same, loss_of, peak_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.blockwise.policies import BlockPolicy, Policies
from remat.errors import InfeasibleBudget, RematError, TraceError
from remat.frontend.blocks.discovery import Submodule
from remat.frontend.emit import operator_profile, operators
from remat.frontend.emit.emit import _policies_for_all_calls
from remat.frontend.emit.operator_profile import OperatorCall
from remat.integrations import checkpoint as by_torch
from remat.integrations import torch_remat as by_torch_remat
from remat.integrations import transformers as by_transformers

APPLY: dict[str, Callable[..., Any]] = {
    "operators": by_torch.apply,
    "regions": by_torch_remat.apply,
}


class Block(nn.Module):
    """A block with two random operations: one out of place, and (dropout on CPUs) one in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.narrow(F.gelu(self.wide(self.norm(x)))).mul_(1.01)
        output = output * torch.rand_like(output)
        output = self.drop(output) * torch.rand_like(output)
        return (x + output) * (1 + torch.rand_like(output))


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module], width: int = 32, classes: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), ids)


def net(count: int = 4) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net([Block(32) for _ in range(count)]), torch.randint(0, 50, (256,))


def step(model: nn.Module, *batch: Any, **named: Any) -> Step:
    """Run one step; no gradients stay in memory."""
    result = steps.step(model, *batch, seed=7, **named)
    model.zero_grad(set_to_none=True)
    return result


def emitted(model: nn.Module, budget: int | str, *batch: Any, **more: Any) -> Policies:
    options: dict[str, Any] = {"compare": False, "outputs": "dropped", **more}
    return remat.emit(model, budget, batch or None, **options)


@pytest.mark.slow_cases("min-regions")
@pytest.mark.parametrize("rules", ["operators", "regions"])
@pytest.mark.parametrize("budget", [pytest.param("80%", marks=pytest.mark.slow), "65%", "min"])
def test_gradients_are_eager_modes_and_the_peak_is_as_planned(budget: str, rules: str) -> None:
    model, ids = net()
    expected = step(model, ids)
    policies = emitted(model, budget, ids, rules=rules)
    assert policies.rules == rules
    assert policies.time_s > policies.baseline_time_s
    assert peak_of(model, ids) == pytest.approx(policies.baseline_bytes, rel=0.01)
    applied = APPLY[rules](model, policies)
    assert_same(step(model, ids), expected)
    assert_same(step(model, ids), expected)
    measured_bytes = peak_of(model, ids)
    assert 0.95 * policies.peak_bytes <= measured_bytes <= policies.peak_bytes
    assert policies.peak_bytes <= policies.budget_bytes
    with torch.no_grad():
        model(ids)
    applied.remove()
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert_same(step(model, ids), expected)


class Run(nn.Module):
    """A module that runs a block by a policy, with a loss."""

    def __init__(self, inner: nn.Module, policy: BlockPolicy) -> None:
        super().__init__()
        self.inner, self.policy = inner, policy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            operators.run_block_under_policy(self.policy, self.inner, self.inner.forward, x)
            .square()
            .mean()
        )


@pytest.mark.parametrize("rules", ["operators", "regions"])
def test_random_numbers_continue_from_step_to_step(rules: str) -> None:
    model, ids = net()
    other = copy.deepcopy(model)
    APPLY[rules](model, emitted(model, "min", ids, rules=rules))
    states = []
    for module in (model, other):
        torch.manual_seed(7)
        losses = []
        for _ in range(3):
            loss = loss_of(module(ids))
            loss.backward()
            losses.append(loss.item())
        states.append((losses, torch.get_rng_state().tolist()))
    assert states[0] == states[1]


def test_every_policy_gives_the_same_gradients() -> None:
    """RNG states are replayed from a block's beginning: saving one random operation shifts those
    after it."""
    torch.manual_seed(0)
    block, x = Block(32), torch.randn(64, 32, requires_grad=True)
    plain = BlockPolicy(block="block", how="as it is")
    expected = step(Run(copy.deepcopy(block), plain), x)
    tried = operators.candidate_policies("block", block, lambda: block(x))
    assert len(tried) > 4
    assert any("aten.rand_like.default" in policy.operators for policy, _ in tried)
    for policy, share in tried:
        assert 0 <= share <= 1.01
        assert_same(step(Run(copy.deepcopy(block), policy), x), expected)


def test_random_operations_are_saved_only_from_the_end_of_a_block() -> None:
    def ran(name: str, fixed: bool = False) -> OperatorCall:
        return OperatorCall(name, 0, 1.0, 8, fixed, name != "mm")

    kinds = [ran("a"), ran("mm"), ran("b", fixed=True), ran("c"), ran("mm"), ran("d")]
    save_candidates, places = operator_profile.saving_candidates(kinds)
    assert places == [1, 3, 4, 5]  # not what is sampled before b, which is resampled
    assert [c.needs for c in save_candidates] == [(), (3,), (), ()]


def test_tensors_that_are_written_later_are_not_saved() -> None:
    weight = torch.randn(8, 8, requires_grad=True)

    def forward() -> torch.Tensor:
        output = weight.mm(weight)
        other = weight.mm(output).tanh()
        output.mul_(2)
        return other.exp()

    save_candidates, _ = operator_profile.profile_operators(lambda: forward().exp())
    by_name = {(r.name, r.call_index): r.is_unsavable for r in save_candidates}
    assert by_name["aten.mm.default", 0]
    assert not by_name["aten.mm.default", 1]
    assert by_name["aten.mul_.Tensor", 0]


class _Checkpointing(Net):
    """A model that uses checkpointing in its own code, as many projects do."""

    policies: Policies

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            contexts = by_torch.context_fn(self.policies, f"blocks.{number}")
            if contexts is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)  # type: ignore[assignment]
        return F.cross_entropy(self.head(x), ids)


def test_policies_work_in_models_that_use_checkpointing() -> None:
    model, ids = net()
    expected = step(model, ids)
    policies = Policies.from_json(emitted(model, "65%", ids).to_json())
    other = _Checkpointing(list(model.blocks))
    other.load_state_dict(model.state_dict())
    other.policies = policies
    actual = step(other, ids)
    assert torch.equal(actual[0], expected[0])
    assert peak_of(other, ids) <= policies.peak_bytes
    with pytest.raises(RematError, match=r"no policy for a block 'blocks.9'"):
        by_torch.context_fn(policies, "blocks.9")


def test_copies_and_pickles_have_their_own_forwards() -> None:
    model, ids = net()
    expected = step(model, ids)
    by_torch.apply(model, emitted(model, "65%", ids))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        with torch.no_grad():
            model.blocks[0].wide.weight.zero_()
        assert_same(step(other, ids), expected)
        assert peak_of(other, ids) < 0.7 * peak_of(Net(list(net()[0].blocks)), ids)
        model.load_state_dict(net()[0].state_dict())


def test_a_block_that_is_called_twice_has_one_policy() -> None:
    model, ids = net(2)
    model.blocks = nn.ModuleList([*model.blocks, *model.blocks, *model.blocks])
    expected = step(model, ids)
    policies = emitted(model, "60%", ids)
    assert [p.block for p in policies.blocks] == ["blocks.0", "blocks.1"]
    by_torch.apply(model, policies)
    assert_same(step(model, ids), expected, 1e-5)  # sums of three, in another order
    assert peak_of(model, ids) <= policies.peak_bytes


PLAIN = BlockPolicy(block="b", how="as it is")
WHOLE = BlockPolicy(block="b", how="checkpointed")
MM, BMM = (BlockPolicy(block="b", how="selective", operators={n: (0,)}) for n in ("mm", "bmm"))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((PLAIN, WHOLE, MM), (PLAIN, WHOLE, BMM), (PLAIN, WHOLE)),
        ((PLAIN, MM), (PLAIN, BMM), (PLAIN,)),
        ((PLAIN, MM), (PLAIN, WHOLE, BMM), (PLAIN,)),
        ((PLAIN, WHOLE, MM), (PLAIN,), (PLAIN,)),
        ((PLAIN, MM), (PLAIN, MM), (PLAIN, MM)),
    ],
)
def test_a_block_whose_calls_differ_names_no_operator_calls(
    first: tuple[BlockPolicy, ...],
    second: tuple[BlockPolicy, ...],
    expected: tuple[BlockPolicy, ...],
) -> None:
    """Also where a call could not run checkpointed."""
    block = Submodule("b", nn.Identity())
    assert _policies_for_all_calls([block] * 3, [first, second, first]) == [expected] * 3


def test_blocks_that_change_their_state_get_no_policy() -> None:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [
        nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(2)
    ]
    model = Net([*blocks, Block(32), Block(32)])
    ids = torch.randint(0, 50, (256,))
    expected = step(copy.deepcopy(model), ids)
    policies = emitted(model, "min", ids)
    assert [p.how for p in policies.blocks[:2]] == ["as it is"] * 2
    assert policies.blocks[2].how != "as it is"
    by_torch.apply(model, policies)
    assert_same(step(model, ids), expected)


@pytest.mark.slow_cases("2-operators")
@pytest.mark.parametrize("rules", ["operators", pytest.param("regions", marks=pytest.mark.slow)])
@pytest.mark.parametrize("frozen", [1, 2])
def test_frozen_blocks_are_profiled_separately(frozen: int, rules: str) -> None:
    """With or without the blocks before them: frozen from the start, they save nothing and are left
    out."""
    model, ids = net()
    for block in model.blocks[:frozen]:
        block.requires_grad_(False)
    if frozen == 2:
        model.embed.requires_grad_(False)
    expected = step(model, ids)
    policies = emitted(model, "75%", ids, rules=rules)
    assert peak_of(model, ids) == pytest.approx(policies.baseline_bytes, rel=0.03)
    assert len(policies.blocks) == (2 if frozen == 2 else 4)
    APPLY[rules](model, policies)
    assert_same(step(model, ids), expected)
    assert 0.93 * policies.peak_bytes <= peak_of(model, ids) <= policies.peak_bytes


class _Passes(WithParts, block=lambda: Block(32)):
    """A block that returns one of its inputs unchanged, as blocks of T5 do with the bias of
    their attention."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block(x + bias), bias


class _Biased(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        bias = x.sin() + 1
        for block in self.blocks:
            x, bias = block(x, bias)
        return F.cross_entropy(self.head(x), ids)


@pytest.mark.parametrize("rules", ["operators", "regions"])
@pytest.mark.parametrize("budget", ["85%", pytest.param("min", marks=pytest.mark.slow)])
def test_returned_inputs_are_not_saved_outputs_of_a_block(budget: str, rules: str) -> None:
    torch.manual_seed(0)
    model = _Biased([_Passes() for _ in range(4)])
    ids = torch.randint(0, 50, (256,))
    expected = step(model, ids)
    policies = emitted(model, budget, ids, rules=rules)
    assert 0.92 * policies.baseline_bytes <= peak_of(model, ids) <= policies.baseline_bytes
    APPLY[rules](model, policies)
    assert_same(step(model, ids), expected)
    assert 0.9 * policies.peak_bytes <= peak_of(model, ids) <= policies.peak_bytes


class _Counts(Block):
    """A block whose output depends on how often it ran."""

    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return super().forward(x) * self.runs


class _Writes(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5).add_(super().forward(x.clone()))


def test_blocks_that_cannot_be_recomputed_are_refused() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (256,))
    model = Net([_Counts(32) for _ in range(3)])
    with pytest.raises(InfeasibleBudget, match=r"a second run returns other results"):
        emitted(model, "60%", ids)
    model = Net([_Writes(32) for _ in range(3)])
    eager_bytes = peak_of(model, ids)
    with pytest.raises(InfeasibleBudget, match=r"it modifies its inputs in place") as error:
        emitted(model, "60%", ids)
    assert error.value.min_feasible_bytes is not None
    assert eager_bytes <= error.value.min_feasible_bytes < 1.1 * eager_bytes


def test_random_operations_that_appear_later_are_saved() -> None:
    class More(Block):
        more = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            if not self.more:
                return output
            output = output.exp() * torch.rand_like(output)
            return F.dropout(output, 0.5) if self.more == "in place" else output

    torch.manual_seed(0)
    block, x = More(32), torch.randn(64, 32, requires_grad=True)
    tried = [p for p, _ in operators.candidate_policies("block", block, lambda: block(x))]
    drawing = [p for p in tried if "aten.rand_like.default" in p.operators]
    assert drawing
    plain = BlockPolicy(block="block", how="as it is")
    block.more = True
    expected = step(Run(copy.deepcopy(block), plain), x)
    for policy in drawing:
        assert_same(step(Run(copy.deepcopy(block), policy), x), expected)
    block.more = "in place"  # type: ignore[assignment]
    with pytest.raises(RematError, match="writes random numbers in place after a random operator"):
        step(Run(copy.deepcopy(block), drawing[0]), x)


def test_under_autocast_the_peak_is_as_planned() -> None:
    model, ids = net()

    class Lower(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(ids)

    lower = Lower(model)
    expected = step(lower, ids)
    policies = emitted(lower, "min", ids)
    by_torch.apply(lower, policies)
    assert_same(step(lower, ids), expected)
    assert peak_of(lower, ids) <= policies.peak_bytes


@pytest.mark.slow
def test_the_report_has_the_time_of_an_unrestricted_plan() -> None:
    model, ids = net()
    policies = emitted(model, "65%", ids, compare=True, costs=remat.Roofline("cpu"))
    assert policies.optimum_overhead is not None
    assert "within that peak, if the blocks are planned and run by remat" in str(policies)


def test_wrong_use_raises_an_error() -> None:
    model, ids = net(2)
    policies = emitted(model, "80%", ids)
    with pytest.raises(ValueError, match="near are regions; it must be one of operators"):
        emitted(model, "80%", ids, rules="region")
    with pytest.raises(TraceError, match="has no repeated blocks"):
        emitted(nn.Linear(4, 4), "80%", torch.randn(3, 4))
    with pytest.raises(InfeasibleBudget, match=r"needs .* at least"):
        emitted(model, "5%", ids)
    with pytest.raises(RematError, match=r"rules='regions'"):
        by_torch_remat.save_regions(policies)
    with pytest.raises(TraceError, match=r"has no such block$"):
        by_torch.apply(Net([]), policies)
    with pytest.raises(TraceError, match="has no gradient checkpointing of Transformers"):
        by_transformers.apply(model, policies)
    enabled = remat.enable(net(2)[0], "80%", scope="blocks")
    with pytest.raises(TraceError, match="remat is enabled for this Net already"):
        emitted(enabled, "80%", ids)
    applied = by_torch.apply(model, policies)
    with pytest.raises(TraceError, match="has a policy already"):
        by_torch.apply(model, policies)
    with pytest.raises(TraceError, match="has a policy already"):
        emitted(model, "80%", ids)
    with pytest.raises(RematError, match=r"expected the result of remat\.emit"):
        by_torch.apply(model, None)  # type: ignore[arg-type]
    applied.remove()
    by_torch.apply(model, policies)


def test_regions_need_the_package_torch_remat(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = net(2)
    policies = emitted(model, "80%", ids, rules="regions")
    assert by_torch_remat.save_regions(policies).keys() <= {"blocks.0", "blocks.1"}
    monkeypatch.setitem(sys.modules, "torch_remat", None)
    with pytest.raises(RematError, match=r"pip install 'remat\[torch-remat\]'"):
        emitted(model, "80%", ids, rules="regions")
    with pytest.raises(RematError, match=r"pip install 'remat\[torch-remat\]'"):
        by_torch_remat.apply(model, policies)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layers"), [("gpt2", 2), ("bert", 2), ("llama", 2), ("t5", 4)])
def test_transformers_layers_checkpoint_by_their_policies(kind: str, layers: int) -> None:
    torch.manual_seed(0)
    case = FAMILIES[kind]()
    model: Any = case.model
    batch = case.kwargs
    model.config.use_cache = kind in ("gpt2", "llama")  # as by default
    expected = step(model, **batch, **({} if kind == "bert" else {"use_cache": False}))
    policies = remat.emit(model, "70%", example_kwargs=batch, outputs="dropped", compare=False)
    assert len(policies.blocks) == layers
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    assert by_transformers.apply(model, policies) is model
    assert_same(step(model, **batch), expected)
    measured_bytes = peak_of(model, **batch)
    assert 0.95 * policies.peak_bytes <= measured_bytes <= policies.peak_bytes
    model.activation_checkpointing_disable()
    assert peak_of(model, **batch) > policies.peak_bytes
    by_torch.apply(model, policies)  # the same with torch only: no cache then, either
    assert_same(step(model, **batch), expected)
