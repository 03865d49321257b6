"""Training on the software GPU against the CPU: modules, optimizers, CUDA graphs, torch.compile."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from tests.helpers.paths import ROOT
from tests.helpers.training.models import WithParts
from torch import Tensor, nn

pytestmark = pytest.mark.software_gpu

CUDA = "cuda"


class Recurrent(nn.Module):
    def __init__(self, cell: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = cell(6, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0]).square().mean()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(-1, 3, 4, 4)).square().mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)).square().mean()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "convolutions": Convolutions,
    "attention": Attention,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    # A large `eps`: otherwise the sign of a gradient that is zero but for rounding is an update.
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=0.1, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=0.1, foreach=True),
    "adam, one by one": lambda p: torch.optim.Adam(p, lr=0.01, eps=0.1, foreach=False),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
}


def trained(
    model: nn.Module, x: Tensor, optimizer: Callable[..., torch.optim.Optimizer]
) -> list[Tensor]:
    """Return losses, parameters and buffers after three steps."""
    update = optimizer(model.parameters())
    losses = []
    for _ in range(3):
        update.zero_grad()
        loss = model(x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        losses.append(loss.detach())
    return [t.detach().cpu() for t in (*losses, *model.parameters(), *model.buffers())]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_as_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODULES[name](), torch.randn(4, 8, 6)
    expected = trained(copy.deepcopy(model), x, OPTIMIZERS["adam, one by one"])
    actual = trained(model.to(CUDA), x.to(CUDA), OPTIMIZERS["adam, one by one"])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_updates_as_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 8, 6)
    expected = trained(copy.deepcopy(model), x, OPTIMIZERS[name])
    actual = trained(model.to(CUDA), x.to(CUDA), OPTIMIZERS[name])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_autocast_with_a_gradient_scaler_trains() -> None:
    torch.manual_seed(0)
    model, x = Attention().to(CUDA), torch.randn(4, 8, 6, device=CUDA)
    reference = copy.deepcopy(model)
    reference(x).backward()
    scaler = torch.amp.GradScaler(CUDA, init_scale=64.0)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast(CUDA, torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.unscale_(update)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=2e-3)
    scaler.step(update)
    scaler.update()
    assert scaler.get_scale() == 64.0


class Dropped(WithParts, layers=lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(3))):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).tanh(), 0.3)
        return x.square().mean()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_replay_the_dropout_of_the_forward(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Dropped().to(CUDA)
    x = torch.randn(16, 6, device=CUDA, requires_grad=True)
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        loss = (
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)
            if checkpointed
            else model(x)
        )
        model.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 6
    assert all(torch.equal(p, q) for p, q in zip(*gradients, strict=True))


def test_a_cuda_graph_computes_when_it_is_replayed() -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 4, device=CUDA)
    x, count = torch.zeros(3, 4, device=CUDA), torch.zeros((), device=CUDA)

    def step() -> Tensor:
        y = (x @ w).relu()  # reads x before the copy below
        x.copy_(y.flip(1))
        count.add_(1)
        return nn.functional.dropout(y, 0.5)

    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    count.zero_()
    with torch.cuda.graph(graph):
        output = step()
    assert count.item() == 0, "a capture computes nothing"
    masks = []
    for _ in range(2):
        inputs = torch.randn(3, 4, device=CUDA)
        x.copy_(inputs)
        graph.replay()
        expected = (inputs @ w).relu()
        assert torch.equal(x, expected.flip(1))
        assert torch.equal(output[output != 0], 2 * expected[output != 0])
        masks.append(output == 0)
    assert count.item() == 2
    assert not torch.equal(*masks), "each replay advances the generator"


@pytest.mark.timeout(900)  # half a minute, if the machine does nothing else
def test_inductor_in_tritons_interpreter_trains_as_eager_mode() -> None:
    """In a child process, which has right numbers by its environment."""
    code = """
import json, os, sys, torch
from torch import nn
from scripts.software_gpu.numbers import is_enabled
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 5), nn.Softmax(-1))
model, x = model.cuda(), torch.randn(16, 6, device="cuda")

def step(x):
    y = model(x).log1p()
    return y.square().sum(), nn.functional.dropout(y.detach(), 0.25) / y.detach()

outputs = []
for function in (step, torch.compile(step)):
    model.zero_grad()
    loss, kept = function(x)
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    outputs.append(torch.cat([loss.detach().view(1), gradients]).tolist())
print(json.dumps([is_enabled(), outputs, kept.tolist()]))
sys.stdout.flush()
os._exit(0)
"""
    environment = os.environ | {"TRITON_INTERPRET": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    completed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-3000:]
    is_enabled, (eager, compiled), factors = json.loads(completed.stdout.splitlines()[-1])
    assert is_enabled
    assert compiled == pytest.approx(eager, rel=1e-4, abs=1e-6)
    ratios = torch.tensor(factors).flatten()
    assert torch.all((ratios == 0) | ((ratios - 4 / 3).abs() < 1e-4))
    assert 0.5 < (ratios != 0).float().mean().item() < 0.95
