"""The largest tensor that stays whole in a step whose operations are split, and the reason."""

from __future__ import annotations

from remat.documents.trace import Trace
from remat.limits.units import format_bytes
from remat.passes.split.rules import RULES

_MAX_NAMED = 3
"""The most operators that are named."""

_WHOLE_SHARE = 0.5
"""Tensors above this share of the unsplit step's largest one count as whole: pieces are smaller."""


def split_obstacle(trace: Trace, split: Trace) -> str:
    """Return a sentence, without its full stop, about the largest tensor that is still whole: its
    bytes, and the operators without a rule that produce or read it, or that it is an output. "" if
    there is none.

    `trace` is the step, and `split` the same with its largest operations split, as far as they can
    be. The sentence begins with the path of the module that computes the tensor, if that is known.
    """
    largest_bytes = _largest_bytes(trace)
    storages = {
        result.storage: split.storage_bytes[result.storage]
        for node in split.nodes
        if not node.view  # a view has the storage of its base, such as an input
        for result in node.results
    }
    storage = max(storages, key=storages.__getitem__, default=-1)
    if storage < 0 or storages[storage] <= _WHOLE_SHARE * largest_bytes:
        return ""
    touching = [
        node
        for node, operands in zip(split.nodes, split.operands, strict=True)
        if any(split.storage_of[name] == storage for name in operands)
        or any(result.storage == storage for result in node.results)
    ]
    producer = next(n for n in touching if any(r.storage == storage for r in n.results))
    targets = sorted({n.target for n in touching if n.target not in RULES})
    missing = [target for target in targets if not target.startswith("remat.")]
    named = ", ".join(target.removesuffix(".default") for target in missing[:_MAX_NAMED])
    why = f"no rule splits {named}" if missing else "an operation needs its rows together"
    if any(split.storage_of[output.name] == storage for output in split.outputs):
        why = 'the step returns them: see the option outputs="loss"'
    module = f"{producer.module}: " if producer.module else ""
    size = format_bytes(storages[storage])
    return f"{module}{size} of {producer.piece_of or producer.name} exist as a whole, because {why}"


def _largest_bytes(trace: Trace) -> int:
    sizes_bytes = (trace.storage_bytes[r.storage] for node in trace.nodes for r in node.results)
    return max(sizes_bytes, default=0)
