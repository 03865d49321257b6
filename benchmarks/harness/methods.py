"""Compared methods: modules that compute the loss of a workload's batch, each in another way."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

import remat
from benchmarks.models.workloads import Workload


@dataclass
class Method:
    """One way to run the training step, and the seconds of its set-up.

    `facts` go into the result file. `failure` is the error message of a method that cannot run.
    """

    name: str
    module: nn.Module | None = None
    budget_bytes: int | None = None
    setup_s: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


def try_method(name: str, make: Callable[[], Method]) -> Method:
    """Return the method that `make` builds, or a failed one with the error message."""
    try:
        return make()
    except Exception as error:  # a failure of a compared method is a result
        return Method(name, failure=f"{type(error).__name__}: {error}"[:500])


def copy_sharing_parameters(model: nn.Module) -> nn.Module:
    """Return a copy of the model's modules with the same parameters and buffers."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _loss(module: nn.Module, workload: Workload) -> torch.Tensor:
    """Return the loss of the workload's batch under `module`."""
    with workload.autocast_context():
        output = module(**workload.batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def run_step(module: nn.Module, workload: Workload) -> torch.Tensor:
    """Run forward and backward into new gradients, and return the loss.

    As in most training loops, the loss is the only output that is referenced during the backward.
    """
    workload.model.zero_grad(set_to_none=True)
    loss = _loss(module, workload)
    loss.backward()
    return loss.detach()


def eager_method(workload: Workload) -> Method:
    """Return the method that runs the unchanged model."""
    return Method("eager", workload.model)


def per_block_method(workload: Workload) -> Method:
    """Return the method with non-reentrant `torch.utils.checkpoint` around every block.

    This is what most users have.
    """
    model = copy_sharing_parameters(workload.model)
    for block in workload.blocks(model):
        block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]
    return Method("per-block checkpoint", model)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def torch_budget_method(workload: Workload, share: float, backend: str) -> Method:
    """Return the method of torch's own partitioner with `activation_memory_budget`, compiled."""
    settings = {"activation_memory_budget": share, "enable_autograd_cache": False}

    # A function for each share, with the share inside: dynamo uses the code of a function once
    # more, and compiles later for other shapes.
    def with_share(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with torch._functorch.config.patch(settings):
            return lookup_backend(backend)(gm, inputs)

    compiled = torch.compile(copy_sharing_parameters(workload.model), backend=with_share)
    began = time.perf_counter()
    limits = {"recompile_limit": 256, "fail_on_recompile_limit_hit": True}
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(limits):
        run_step(compiled, workload)  # type: ignore[arg-type]
    if not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        raise RuntimeError(
            "torch used code that it compiled for another budget; pass one value to --torch-budgets"
        )
    facts = {
        "activation_memory_budget": share,
        "backend": backend,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }
    return Method(
        f"torch budget {share:g}",
        compiled,  # type: ignore[arg-type]
        setup_s={"total": time.perf_counter() - began},
        facts=facts,
    )


def remat_method(
    workload: Workload, name: str, budget: int | str, time_limit_s: float, cache: str
) -> Method:
    """Return the method of `remat.optimize` with costs measured on the workload's device."""
    workload.model.zero_grad(set_to_none=True)  # existing gradients would plan for accumulation
    began = time.perf_counter()
    with workload.autocast_context():
        gm = remat.optimize(
            workload.model,
            budget,
            (),
            workload.batch,
            strategy=remat.Auto(time_limit=time_limit_s),
            cache=cache,
        )
    setup_s = dict(gm.timings_s)
    setup_s["total"] = time.perf_counter() - began
    plan = gm.plan
    assert plan is not None
    facts = {
        "status": plan.status.name,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_overhead": plan.overhead,
        "lower_bound": plan.lower_bound,
        "operations": len(plan.graph),
        "recomputations": len(plan.schedule) - len(plan.graph),
    }
    limit = budget if isinstance(budget, int) else plan.budget_bytes
    return Method(name, gm, limit, setup_s, facts)
