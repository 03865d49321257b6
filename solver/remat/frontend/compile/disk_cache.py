"""Plans on disk, for graphs whose code torch keeps in its own cache.

A process that loads code from torch's cache does not call the partitioner. It still needs the plan,
to know what the graph saves while other graphs of the step run.

There is one JSON file for each graph, written atomically; its name is a digest of everything that
decides the plan. An unreadable file counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from pydantic import TypeAdapter
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir

from remat.errors import RematError
from remat.frontend.compile.registry import (
    NO_FEEDBACK,
    CompiledPlan,
    PlannedSplit,
    ReplanFeedback,
)
from remat.plan import Plan

_FORMAT = 7
_SPECIAL_FIELDS = (
    "plan", "retained_names", "storages", "module", "compile_id", "group", "number",
    "infeasible_limits",
)  # fmt: skip
"""Fields with another encoding, and those that belong to one process."""

_PLAIN_FIELDS = [field.name for field in fields(CompiledPlan) if field.name not in _SPECIAL_FIELDS]
_FEEDBACK_AND_SPLIT = TypeAdapter(tuple[ReplanFeedback, PlannedSplit | None])


@dataclass(frozen=True)
class CachedPlan:
    """The plan of a graph with the replan feedback that led to it, and its split. `compiled` is
    None for a graph that needs no plan."""

    compiled: CompiledPlan | None
    feedback: ReplanFeedback = NO_FEEDBACK
    split: PlannedSplit | None = None


def compiled_plan_key(gm: fx.GraphModule, inputs: Sequence[object], uuid: str) -> str:
    """Return the key of the plan of a graph that torch.compile passes to a backend. `uuid`
    identifies the options and everything else that decides the plan."""
    code = [m.code for m in gm.modules() if isinstance(m, fx.GraphModule)]
    signature = [_graph_input_key(item) for item in inputs]
    parts = (_FORMAT, torch.__version__, uuid, _grad_and_autocast_modes(), code, signature)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _grad_and_autocast_modes() -> tuple[object, ...]:
    """Return the gradient and autocast modes: torch caches separate code for each."""
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(k), str(torch.get_autocast_dtype(k))) for k in kinds]
    return (torch.is_grad_enabled(), *autocast)


def _graph_input_key(item: object) -> object:
    """Return the part of a plan's key for an input of the graph: the layout and type of a tensor,
    the symbol and hint of a size, another input itself."""
    if isinstance(item, torch.Tensor):
        layout = [str(n) for n in (*item.shape, *item.stride(), item.storage_offset())]
        return (layout, str(item.dtype), str(item.device), item.requires_grad, type(item))
    if isinstance(item, torch.SymInt):
        return (str(item), item.node.hint)
    return item


def load_compiled_plan(key: str) -> CachedPlan | None:
    """Return the plan on disk with this key; None if there is none or it is unreadable."""
    try:
        data = json.loads(_plan_path(key).read_text("utf-8"))
        record = data["compiled"]
        if record is None:
            return CachedPlan(None)
        plain = {name: record[name] for name in _PLAIN_FIELDS}
        retained_names = frozenset(map(str, record["retained_names"]))
        compiled = CompiledPlan(
            Plan.from_json(record["plan"]), retained_names=retained_names, **plain
        )
        return CachedPlan(compiled, *_FEEDBACK_AND_SPLIT.validate_python(data["feedback"]))
    except (OSError, ValueError, KeyError, TypeError, RematError):
        return None


def save_compiled_plan(key: str, cached: CachedPlan) -> None:
    """Write a plan to disk. If that fails, nothing is raised: a later process replans the graph."""
    compiled = cached.compiled
    feedback = _FEEDBACK_AND_SPLIT.dump_python((cached.feedback, cached.split), mode="json")
    data: dict[str, Any] = {"compiled": None, "feedback": feedback}
    if compiled is not None:
        data["compiled"] = {name: getattr(compiled, name) for name in _PLAIN_FIELDS} | {
            "plan": compiled.plan.to_json(),
            "retained_names": sorted(compiled.retained_names),
        }
    path = _plan_path(key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file)
        Path(temporary).replace(path)


def _plan_path(key: str) -> Path:
    """Return the path of the file of a plan, next to torch's own cache."""
    return Path(cache_dir()) / "remat" / f"{key}.json"


def is_torch_cache_enabled() -> bool:
    """True if torch caches the graphs that AOTAutograd has partitioned, and their code."""
    return bool(functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache)


@contextmanager
def autograd_cache_disabled() -> Iterator[None]:
    """Let torch compile every graph inside of this context without its cache."""
    with functorch_config.patch(enable_autograd_cache=False):
        yield


def torch_cache_hits() -> int:
    """Return the number of this process's graphs that came from AOTAutograd's cache."""
    return counters["aot_autograd"]["autograd_cache_hit"]
