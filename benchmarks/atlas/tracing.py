"""Traces of the atlas's models for an absent GPU, and their graphs with the costs on all GPUs.

Each model is built on the meta device and traced for an H100: the kernels that torch chooses, their
workspaces and the sizes of allocations are those of an H100. Only the costs are those of each GPU.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

import remat
from benchmarks.atlas.catalogue import Entry
from benchmarks.atlas.graph_file import AtlasGraph
from benchmarks.atlas.language import LANGUAGE_MODELS
from benchmarks.atlas.results import GPUS
from benchmarks.atlas.vision import VISION_MODELS
from benchmarks.models.traced import default_cache, tracer_digest
from remat.costs.roofline import Roofline
from remat.documents.base import write_atomically
from remat.documents.plan import GraphRecord

TRACED_FOR = "h100"

# It warns that kernels depend on the GPU, for each trace and each of its forms.
logging.getLogger("remat.costs.trace_costs").setLevel(logging.ERROR)

MODELS: dict[str, Entry] = {entry.name: entry for entry in (*LANGUAGE_MODELS, *VISION_MODELS)}
"""The models by name."""


def trace_of(name: str, folder: Path | None = None) -> remat.Trace:
    """Return a model's trace without costs, from the cache folder if this code has written it."""
    folder = folder or default_cache() / "atlas"
    path, about = folder / f"{name}.trace.json.gz", folder / f"{name}.about.json"
    code = tracer_digest()
    if path.exists() and about.exists() and json.loads(about.read_text())["code"] == code:
        return remat.Trace.load(path)
    trace = _trace(MODELS[name])
    folder.mkdir(parents=True, exist_ok=True)
    trace.save(path)
    write_atomically(about, json.dumps({"code": code}).encode())
    return trace


def _trace(entry: Entry) -> remat.Trace:
    with torch.device("meta"):
        model, batch = entry.build()
    model = model.to(entry.dtype).train()
    return remat.trace(model, (), _cast(batch, entry.dtype), device=TRACED_FOR)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a batch whose floating-point tensors have a dtype."""
    if isinstance(value, dict):
        return {key: _cast(part, dtype) for key, part in value.items()}
    return value.to(dtype) if value.is_floating_point() else value


def measured(trace: remat.Trace, gpu: str) -> remat.Trace:
    """Return a trace with the roofline costs of a GPU, and the workspaces on an H100."""
    step = remat.measure(trace, Roofline(TRACED_FOR))
    if gpu == TRACED_FOR:
        return step
    costs = remat.measure(trace, Roofline(gpu))
    pairs = zip(step.nodes, costs.nodes, strict=True)
    timed = (node.model_copy(update={"cost_s": other.cost_s}) for node, other in pairs)
    return step.replace(nodes=tuple(timed))


def graph_of(name: str, trace: remat.Trace) -> AtlasGraph:
    """Return the graph of a model's trace, with the costs on all GPUs."""
    graphs = {gpu: measured(trace, gpu).graph() for gpu in GPUS}
    return AtlasGraph(
        name=name,
        title=MODELS[name].title,
        torch=trace.environment.torch,
        costs_s={gpu: tuple(o.cost_s for o in g.operations) for gpu, g in graphs.items()},
        graph=GraphRecord.of(graphs[GPUS[0]]),
    )
