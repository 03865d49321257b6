"""Plan a model for a GPU that is not there, and collect the kernels that Inductor generates.

`backend="remat"` runs as it is. Replaced around it, within one process: torch's questions about the
GPU (`cuda_stubs`); the devices of the joint graph (`fake_cuda`); the measurement of costs, by the
GPU's data sheet; and Triton's compilation of a kernel, by a list of their sources.

The passes that Inductor runs on the joint graph still see CPU tensors. So matmuls are not padded to
aligned sizes, which Inductor decides by measurements on the GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.compile_fx as inductor
import torch._inductor.config as inductor_config
from scripts.software_gpu.codegen.cuda_stubs import reported_gpu
from scripts.software_gpu.codegen.fake_cuda import fakes_on_cuda, move_to_cuda, zeros_like_outputs
from scripts.software_gpu.codegen.gpus import Gpu
from scripts.software_gpu.codegen.results import KernelSource, ModelRequest, PlannedGraph
from torch import fx
from torch._C import DispatchKey
from torch._inductor.async_compile import AsyncCompile

import remat
from remat.costs.roofline import Roofline, operation_seconds
from remat.costs.trace_costs import OperationCost
from remat.documents.records import Node, TensorMeta
from remat.errors import InfeasibleBudget
from remat.frontend.capture.eager_kernels.autocast import PythonKernels, with_cuda_autocast
from remat.frontend.capture.eager_kernels.cuda_kernels import CUDA_KERNELS, absent_gpu_kernels
from remat.frontend.capture.eager_kernels.overrides import kernels_registered
from remat.frontend.common.target_gpu import TargetGpu
from remat.frontend.compile.backend import remat_backend
from remat.frontend.compile.compat import cause_of_type
from remat.frontend.compile.kernels import cost_model
from remat.frontend.compile.partitioner import Partitioner
from remat.frontend.compile.registry import CompiledPlan


@dataclass
class PlannedModel:
    """The plans of a model for a GPU, with the kernels of both halves of all of their graphs. Equal
    kernels count once."""

    graphs: list[PlannedGraph] = field(default_factory=list[PlannedGraph])
    infeasible: list[str | int] = field(default_factory=list[str | int])
    """The budgets without a plan."""
    names_by_text: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        """The kernels."""
        return tuple(KernelSource(name, text) for text, name in self.names_by_text.items())


def plan_model(request: ModelRequest, gpu: Gpu) -> PlannedModel:
    """Plan a model for each budget of a request."""
    module, _, function = request.factory.partition(":")
    build = getattr(importlib.import_module(module), function)
    model, arguments = build(**request.arguments)
    planned = PlannedModel()
    for budget in request.budgets:
        options = {"outputs": "dropped", **request.options, "budget": budget}
        first_plan = len(remat.compiled_plans())
        torch._dynamo.reset()
        try:
            with _generation_for(gpu), _operators_of(gpu, request.dtype):
                _compile_graphs(model, arguments, options, planned.names_by_text)
        except Exception as error:
            if cause_of_type(error, InfeasibleBudget) is None:
                raise
            planned.infeasible.append(budget)
        else:
            plans = remat.compiled_plans()[first_plan:]
            planned.graphs += [_planned_graph(compiled, budget) for compiled in plans]
    return planned


def _compile_graphs(
    model: torch.nn.Module,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    names_by_text: dict[str, str],
) -> None:
    """Compile all graphs of a model, and add their kernels to `names_by_text`.

    A graph returns zeros when it is called, so that a frame after a graph break is compiled, too.
    """

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with _collected_kernels() as kernels:
            remat_backend(gm, inputs, options=options)
        names_by_text.update(kernels)
        return lambda *_: zeros_like_outputs(gm)

    torch.compile(model, backend=backend, dynamic=False)(**arguments)


def _planned_graph(compiled: CompiledPlan, budget: str | int) -> PlannedGraph:
    assert compiled.verified_bytes is not None
    runs = compiled.plan.schedule.runs
    return PlannedGraph(
        budget=budget,
        operations=compiled.operations,
        recomputations=len(runs) - len(set(runs)),
        verified_bytes=compiled.verified_bytes,
        budget_bytes=compiled.budget_bytes,
        baseline_bytes=compiled.baseline_bytes,
    )


@contextmanager
def _collected_kernels() -> Iterator[dict[str, str]]:
    """Collect the kernels of one graph by their source, instead of compiling them. A graph that is
    planned a second time starts from the beginning."""
    kernels: dict[str, str] = {}

    def collect(_: AsyncCompile, name: str, text: str, device_str: str = "cuda") -> None:
        kernels[text] = name

    partition = Partitioner.__call__

    def partition_on_gpu(self: Partitioner, gm: fx.GraphModule, _: object, **options: Any) -> Any:
        kernels.clear()
        return partition(self, gm, move_to_cuda(gm), **options)

    with (
        mock.patch.object(AsyncCompile, "triton", collect),
        mock.patch.object(Partitioner, "__call__", partition_on_gpu),
    ):
        yield kernels


@contextmanager
def _generation_for(gpu: Gpu) -> Iterator[None]:
    """Let remat plan and Inductor generate code for a GPU, within the context."""
    compile_inner = inductor.compile_fx_inner
    roofline = Roofline(gpu.key)

    def compile_for_gpu(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        with reported_gpu(gpu):
            return compile_inner(gm, fakes_on_cuda(list(inputs)), **options)

    def costs(
        nodes: Sequence[Node], metas: Mapping[str, TensorMeta], *_: Any, **__: Any
    ) -> dict[str, OperationCost]:
        return {
            node.name: OperationCost(operation_seconds(node, metas, roofline), 0, "data sheet")
            for node in nodes
            if not node.view
        }

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(inductor, "compile_fx_inner", compile_for_gpu))
        stack.enter_context(mock.patch.object(cost_model, "measure_operations", costs))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        settings = {"fx_graph_cache": False, "compile_threads": 1}
        stack.enter_context(inductor_config.patch(settings))
        yield


@contextmanager
def _operators_of(gpu: Gpu, dtype: str) -> Iterator[None]:
    """Let CPU tensors be traced with the operators that `torch.compile` records on a GPU: its
    kernels of attention and softmax, and for "bfloat16" CUDA's autocast."""
    operators = absent_gpu_kernels(TargetGpu(gpu.key, gpu.capability))
    kernels: PythonKernels = {
        (operator, DispatchKey.AutogradCPU): kernel
        for operator, kernel in operators.items()
        if operator not in CUDA_KERNELS  # of eager mode only
    }
    if dtype == "float32":
        autocast = nullcontext()
    else:
        kernels = with_cuda_autocast(kernels)
        autocast = torch.autocast("cpu", dtype=getattr(torch, dtype))
    with kernels_registered(kernels), autocast:
        yield
