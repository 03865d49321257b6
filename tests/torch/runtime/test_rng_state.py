"""A recomputed random operation repeats its sample, and the generator is unaffected."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers.training.models import WithParts
from torch import nn

import remat
from remat.frontend.runtime import operations as states
from remat.frontend.runtime.operations import generator_state, run_with_generator_state


class Philox:
    """A CUDA generator: each sample is identified by seed and offset, and takes four offsets."""

    def __init__(self) -> None:
        self.seed, self.offset = 7, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def next_state(self) -> tuple[int, int]:
        position = self.seed, self.offset
        self.offset += 4
        return position


@pytest.mark.parametrize("seeded_in_between", [False, True])
def test_a_sample_is_repeated_from_seed_and_offset(
    seeded_in_between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Philox()
    monkeypatch.setattr(states, "cuda_generator", lambda device: generator)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    generator.next_state()
    state = generator_state("cuda:0")
    first = generator.next_state()
    generator.next_state()
    if seeded_in_between:
        generator.manual_seed(9)
        generator.next_state()
    before = generator.seed, generator.offset
    for _ in range(2):
        assert (
            run_with_generator_state(state, "cuda:0", generator.next_state, (), {})
            == first
            == (7, 4)
        )
        assert (generator.seed, generator.offset) == before

    def fail() -> None:
        generator.next_state()
        raise MemoryError

    with pytest.raises(MemoryError):
        run_with_generator_state(state, "cuda:0", fail, (), {})
    assert (generator.seed, generator.offset) == before


class Dropped(WithParts, layers=lambda: nn.ModuleList(nn.Linear(16, 16) for _ in range(4))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.3)
        return x


def random_statements(gm: remat.RematModule) -> list[str]:
    assert gm.program is not None
    return [s.rng_action for s in (*gm.program.forward, *gm.program.backward) if s.rng_action]


@pytest.mark.slow
def test_for_cuda_graphs_no_random_operation_is_recomputed() -> None:
    x = torch.randn(256, 16)
    costs = remat.Roofline("h200")
    plain = remat.optimize(Dropped(), "min", (x,), costs=costs, split="off")
    graphed = remat.optimize(Dropped(), "min", (x,), costs=costs, split="off", cuda_graphs=True)
    assert "replay" in random_statements(plain)
    assert random_statements(graphed) == []
    assert graphed.plan is not None
    assert graphed.plan.schedule.recomputed(graphed.plan.graph), "everything else may be recomputed"
    assert "random    each random operation runs once" in graphed.plan.describe()
    assert plain.plan is not None
    assert "random" not in plain.plan.describe()


# torch's `make_graphed_callables` keeps nodes alive that it created on the capturing stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [False, True])
def test_a_step_with_recomputation_is_captured_as_cuda_graphs(dropout: bool) -> None:
    """As `make_graphed_callables` does it: forward and backward in one graph each."""
    torch.manual_seed(0)
    model = Dropped() if dropout else nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model = model.cuda()
    x = torch.randn(256, 16, device="cuda", requires_grad=True)
    gm = remat.optimize(copy.deepcopy(model), "min", (x,), cuda_graphs=True)
    torch.cuda.make_graphed_callables(gm, (x,))
    torch.cuda.make_graphed_callables(model, (x,))
    for _ in range(3):
        losses: list[list[torch.Tensor]] = []
        for module in (model, gm):
            torch.cuda.manual_seed(3)
            module.zero_grad(set_to_none=True)
            loss = module(x).square().sum()
            loss.backward()
            losses.append([loss, *(p.grad for p in module.parameters() if p.grad is not None)])
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_without_the_option_a_cuda_graph_capture_names_the_remedy() -> None:
    x = torch.randn(256, 16, device="cuda", requires_grad=True)
    gm = remat.optimize(Dropped().cuda(), "min", (x,))
    with pytest.raises(remat.errors.GuardError, match="cuda_graphs=True"):
        torch.cuda.make_graphed_callables(gm, (x,))
