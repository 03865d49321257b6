"""Data of code generation without a GPU: requests, kernels, failures; all of it as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelSource:
    """The Triton source of a kernel, as Inductor writes it: a module with one function."""

    name: str
    text: str


@dataclass(frozen=True)
class KernelBinary:
    """The machine code of a kernel in one configuration (block sizes, number of warps)."""

    kernel: str
    configuration: str
    cubin_bytes: int
    shared_bytes: int
    registers: int
    """Registers of one thread."""
    local_bytes: int
    """Local memory of one thread: spilled registers and stack."""


@dataclass(frozen=True)
class KernelFailure:
    """A kernel that does not compile in a configuration, or not fit the GPU; with the compiler's
    message."""

    kernel: str
    configuration: str
    message: str


@dataclass(frozen=True)
class PlannedGraph:
    """One planned graph of the model, with the peak of Inductor's kernels in bytes."""

    budget: str | int
    """The budget of the request."""
    operations: int
    """Operations of the joint graph of forward and backward."""
    recomputations: int
    """Runs of the schedule that repeat an operation."""
    verified_bytes: int
    budget_bytes: int | None
    baseline_bytes: int
    """The peak without recomputation."""


@dataclass(frozen=True)
class CodegenResult:
    """The kernels of a model for one GPU."""

    gpu: str
    architecture: str
    graphs: tuple[PlannedGraph, ...]
    infeasible: tuple[str | int, ...]
    """The budgets for which the model has no plan."""
    sources: tuple[KernelSource, ...]
    binaries: tuple[KernelBinary, ...]
    failures: tuple[KernelFailure, ...]
    planning_s: float
    """Seconds of capture, planning and code generation."""
    compiling_s: float

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CodegenResult:
        """Return the result that `to_json` wrote."""
        lists = {
            "graphs": PlannedGraph,
            "sources": KernelSource,
            "binaries": KernelBinary,
            "failures": KernelFailure,
        }
        items = {key: tuple(kind(**item) for item in data[key]) for key, kind in lists.items()}
        return cls(**{**data, **items, "infeasible": tuple(data["infeasible"])})

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON's types."""
        return asdict(self)


@dataclass(frozen=True)
class ModelRequest:
    """A model to plan once for each of `budgets`.

    `factory` is the "module:function" that returns the model and its keyword arguments, `arguments`
    are those of the function. The dtype "bfloat16" runs the model under autocast. `options` are
    more options of the backend.
    """

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    budgets: tuple[str | int, ...] = ("60%",)
    dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class CodegenRequest:
    """The work of a child process, for each of `gpus`: plan a model, if there is one, and compile
    its kernels and `sources`."""

    gpus: tuple[str, ...]
    model: ModelRequest | None = None
    sources: tuple[KernelSource, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CodegenRequest:
        """Return the request that `asdict` wrote."""
        model = None
        if (fields := data["model"]) is not None:
            model = ModelRequest(**{**fields, "budgets": tuple(fields["budgets"])})
        sources = tuple(KernelSource(**item) for item in data["sources"])
        return cls(tuple(data["gpus"]), model, sources)
