"""Plans of what torch keeps on disk, beside its own cache: a process that takes its code from there
makes no plan, and has to know what the graph holds while others of the step run.

A file for each graph, by what decides its plan: JSON, written at once or not at all. A file that
cannot be read is as none.
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
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir

from remat.errors import RematError
from remat.frontend.compile.registry import NOTHING, CompiledPlan, Lesson
from remat.plan import Plan

_FORMAT = 2
_OTHERWISE = ("plan", "held_names", "module", "compile_id", "group", "number")
"""Fields that are written otherwise, or that belong to one process."""

_FIELDS = [field.name for field in fields(CompiledPlan) if field.name not in _OTHERWISE]


@dataclass(frozen=True)
class Kept:
    """What a compilation made: a plan, with what it took to make one that fits, or None for a graph
    that needs none."""

    compiled: CompiledPlan | None
    lesson: Lesson = NOTHING


def key_of(gm: fx.GraphModule, inputs: Sequence[object], uuid: str) -> str:
    """Of a graph, as torch.compile hands it to a backend, and what else decides its plan."""
    code = [m.code for m in gm.modules() if isinstance(m, fx.GraphModule)]
    given = [_described(each) for each in inputs]
    known = (_FORMAT, torch.__version__, uuid, _modes(), code, given)
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _modes() -> tuple[object, ...]:
    """Gradients and autocast, on or off: torch keeps other code for them."""
    kinds = ("cpu", "cuda")
    casts = [(torch.is_autocast_enabled(k), str(torch.get_autocast_dtype(k))) for k in kinds]
    return (torch.is_grad_enabled(), *casts)


def _described(given: object) -> object:
    if isinstance(given, torch.Tensor):
        layout = [str(n) for n in (*given.shape, *given.stride(), given.storage_offset())]
        return (layout, str(given.dtype), str(given.device), given.requires_grad, type(given))
    if isinstance(given, torch.SymInt):
        return (str(given), given.node.hint)
    return given


def find(key: str) -> Kept | None:
    """What was kept; None where that is nothing, or no longer can be read."""
    try:
        data = json.loads(_path(key).read_text("utf-8"))
        found = data["compiled"]
        if found is None:
            return Kept(None)
        own = {name: found[name] for name in _FIELDS}
        names = frozenset(map(str, found["held_names"]))
        plan = Plan.from_json(found["plan"])
        lesson = Lesson(int(data["less_bytes"]), frozenset(map(str, data["apart"])))
        return Kept(CompiledPlan(plan, held_names=names, **own), lesson)
    except (OSError, ValueError, KeyError, TypeError, RematError):
        return None


def keep(key: str, kept: Kept) -> None:
    """Write it. Where that fails, a later process plans again."""
    compiled = kept.compiled
    less_bytes, apart = kept.lesson
    data: dict[str, Any] = {"compiled": None, "less_bytes": less_bytes, "apart": sorted(apart)}
    if compiled is not None:
        data["compiled"] = {name: getattr(compiled, name) for name in _FIELDS} | {
            "plan": compiled.plan.to_json(),
            "held_names": sorted(compiled.held_names),
        }
    path = _path(key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file)
        Path(made).replace(path)


def _path(key: str) -> Path:
    return Path(cache_dir()) / "remat" / f"{key}.json"


def torch_keeps() -> bool:
    """Whether torch keeps graphs that AOTAutograd has split."""
    return bool(functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache)


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Within it, torch compiles everything anew."""
    with functorch_config.patch(enable_autograd_cache=False):
        yield


def hits() -> int:
    """How many graphs of this process came from torch's cache."""
    return counters["aot_autograd"]["autograd_cache_hit"]
