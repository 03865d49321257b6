"""Run training steps of remat's plans on torch's CUDA allocator, on the software GPU.

`scripts.allocator.record` runs it, first as `plan MODEL BUDGET`, then as `run MODEL` with the first
output on stdin, and describes the output. Capture, workspaces, runtime and allocations are real.
Kernels compute nothing, so that costs come from a roofline.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from scripts.allocator.record import memory_history, read_recording
from torch import Tensor, nn
from torch.nn import functional

import remat

_STEPS = 3


class Block(nn.Module):
    """A transformer block without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        qkv = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Residual(nn.Module):
    """A residual block of convolutions with batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norms[0](self.convolutions[0](x)))
        return functional.relu(x + self.norms[1](self.convolutions[1](y)))


class Loss(nn.Module):
    """The mean of the log-probabilities of the last layer's outputs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().log_softmax(-1).mean()


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return a small GPT and a small ResNet, each with an input."""
    gpt = Loss(*(Block(256, 4) for _ in range(4)), nn.LayerNorm(256), nn.Linear(256, 8000))
    resnet = Loss(
        nn.Conv2d(3, 48, 7, stride=2, padding=3),
        *(Residual(48) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 1000),
    )
    return {"gpt": (gpt, torch.zeros(8, 256, 256)), "resnet": (resnet, torch.zeros(16, 3, 99, 99))}


def _on_cuda(name: str) -> tuple[nn.Module, Tensor]:
    model, x = models()[name]
    return model.to("cuda"), x.to("cuda")


def plan_step(name: str, budget: str) -> dict[str, Any]:
    """Return the trace of a model's step, and the runs of its plan."""
    model, x = _on_cuda(name)
    traced = remat.trace(model, (x,))
    measured = remat.measure(traced, "cuda", cache=False)  # only its workspaces are correct
    estimated = remat.measure(traced, remat.Roofline("h200"))
    times = {node.name: node.cost_s for node in estimated.nodes}
    nodes = tuple(n.model_copy(update={"cost_s": times[n.name]}) for n in measured.nodes)
    priced = measured.replace(nodes=nodes)
    plan = remat.solve(priced, budget, remat.Auto(time_limit=20.0))
    return {"trace": json.loads(priced.to_json()), "runs": list(plan.schedule.runs)}


def record_steps(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Run the first steps of this process by a plan, and return the recording."""
    traced = remat.Trace.from_json(json.dumps(plan["trace"]))
    with memory_history():
        model, x = _on_cuda(name)
        module = remat.lower(remat.rewrite(traced, remat.Schedule(tuple(plan["runs"]))), model)
        for _ in range(_STEPS):
            module(x).backward()
            model.zero_grad(set_to_none=True)
        return read_recording() | plan


if __name__ == "__main__":
    torch.backends.cudnn.enabled = False  # the software GPU does not replace cuDNN
    task, model_name, *budget = sys.argv[1:]
    if task == "plan":
        output = plan_step(model_name, *budget)
    else:
        output = record_steps(model_name, json.load(sys.stdin))
    print(json.dumps({"torch": torch.__version__, **output}), flush=True)
    os._exit(0)  # not by the exit handlers of CUDA libraries
