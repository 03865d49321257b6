"""Inductor's kernels of planned steps, compiled for several architectures of GPUs.

The models are those of `benchmarks.compiled`, in their smallest sizes. Each is planned with
backend="remat" for several budgets and for an A100, an H100 and a B200 in turn, as float32 and
under autocast to bfloat16. All kernels that Inductor generates for forward and backward are
compiled to machine code, in all configurations that it would try on the GPU. A CPU build of torch
is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from scripts.software_gpu.codegen.child import CodegenError, generate_code
from scripts.software_gpu.codegen.gpus import GPUS
from scripts.software_gpu.codegen.results import CodegenRequest, CodegenResult, ModelRequest

from benchmarks.models.families import FAMILIES

Row = dict[str, Any]

DTYPES = ("float32", "bfloat16")
BUDGETS = ("75%", "50%", "30%", "min")
ARCHITECTURES = tuple(gpu.architecture for gpu in GPUS.values())

_LIMIT_S = 2380.0
_SOLVER_LIMIT_S = 3.0


def cases() -> list[str]:
    """Return the names of the cases: a model and a dtype."""
    return [f"{model}/{dtype}" for model in FAMILIES for dtype in DTYPES]


def run_case(case: str) -> list[Row]:
    """Return the rows of a case, one for each architecture."""
    model, _, dtype = case.partition("/")
    return compile_kernels(model, dtype)


def compile_kernels(
    model: str,
    dtype: str,
    budgets: Sequence[str] = BUDGETS,
    architectures: Sequence[str] = ARCHITECTURES,
    python: str = sys.executable,
) -> list[Row]:
    """Plan a model and compile the kernels of its plans: a row for each architecture.

    `python` is an interpreter with torch, Triton and remat. Raises `CodegenError` if a plan fails.
    """
    keys = tuple(key for key, gpu in GPUS.items() if gpu.architecture in architectures)
    options = {"time_limit": _SOLVER_LIMIT_S}
    request = ModelRequest(
        f"{__name__}:build_model", {"name": model}, tuple(budgets), dtype, options
    )
    results = generate_code(CodegenRequest(keys, request), python=python, timeout_s=_LIMIT_S)
    return [_row(model, dtype, result) for result in results]


def build_model(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the model of a family, and a batch."""
    workload = FAMILIES[name](torch.device("cpu"), True)
    return workload.model, workload.batch


def _row(model: str, dtype: str, result: CodegenResult) -> Row:
    over_budget = [
        graph
        for graph in result.graphs
        if graph.budget_bytes is not None and graph.verified_bytes > graph.budget_bytes
    ]
    return {
        "model": model,
        "dtype": dtype,
        "gpu": result.gpu,
        "architecture": result.architecture,
        "budgets": list(dict.fromkeys(str(graph.budget) for graph in result.graphs)),
        "infeasible": [str(budget) for budget in result.infeasible],
        "operations": max((graph.operations for graph in result.graphs), default=0),
        "recomputations": max((graph.recomputations for graph in result.graphs), default=0),
        "over_budget": len(over_budget),
        "kernels": len(result.sources),
        "configurations": len(result.binaries) + len(result.failures),
        "failures": [f"{failure.kernel}: {failure.message}" for failure in result.failures],
        "most_registers": max((binary.registers for binary in result.binaries), default=0),
        "spilling": sum(binary.local_bytes > 0 for binary in result.binaries),
        "most_shared_bytes": max((binary.shared_bytes for binary in result.binaries), default=0),
        "planning_s": round(result.planning_s, 1),
        "compiling_s": round(result.compiling_s, 1),
        "is_met": bool(result.binaries) and not result.failures and not over_budget,
    }


__all__ = ["CodegenError", "build_model", "cases", "compile_kernels", "run_case"]
