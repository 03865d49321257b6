"""Hooks, while a model is captured.

Those of the model itself are away: they run around the plan, at each call. Those of the modules
inside run, in the backward too, and what they compute is captured as whatever the model computes.
What else they do happens here and never in a step, so the ones that only look are told of.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from remat.errors import HookWarning, TraceError

_FORWARD, _BEFORE = "_forward_hooks", "_forward_pre_hooks"
HOOK_KINDS = {
    _FORWARD: "forward hook",
    _BEFORE: "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_EXPECTED = frozenset(
    {"output_capturing_hook", "make_inputs_require_grad", "make_inputs_require_grads"}
)
"""Hooks of transformers and peft by which a forward collects what it returns, or which see to it
that frozen models can be checkpointed: nobody waits for what they see."""

_NAMED = 3

Hook = Callable[..., Any]

_told: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
"""Each hook is told of once, however often its model is planned."""


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a hook is: `module`, by its `name`, in its table `kind` under the number `key`."""

    name: str
    module: nn.Module
    kind: str
    key: int
    hook: Hook


@dataclass
class Seen:
    """The hooks that ran, and whether they computed anything for the graph."""

    model: nn.Module
    computes: dict[_Place, bool] = field(default_factory=dict)

    def tell(self) -> None:
        """A `HookWarning` that names the hooks that only look."""
        looking = [p for p, computes in self.computes.items() if not computes and _is_new(p)]
        if looking:
            warnings.warn(_message(self.model, looking), HookWarning, stacklevel=3)


@contextmanager
def own_hooks_away(model: nn.Module) -> Iterator[None]:
    """Without the hooks of the model itself. Raises `TraceError` where it does not do without."""
    for hook in model._forward_pre_hooks.values():
        if type(hook).__module__.startswith("torch.nn.utils."):
            raise TraceError(
                f"a hook of this {type(model).__name__} itself makes its weights "
                f"({type(hook).__name__}), and hooks of the model itself run outside of the plan; "
                "put it into another module, as nn.Sequential(model), or use "
                "torch.nn.utils.parametrizations"
            )
    before = {kind: model.__dict__[kind] for kind in HOOK_KINDS if kind in model.__dict__}
    model.__dict__.update({kind: OrderedDict() for kind in before})
    try:
        yield
    finally:
        model.__dict__.update(before)


@contextmanager
def watched(model: nn.Module) -> Iterator[Seen]:
    """Look at what the hooks of modules inside do."""
    seen = Seen(model)
    places = list(_hooks_inside(model))
    for place in places:
        getattr(place.module, place.kind)[place.key] = _observed(place, seen)
    try:
        yield seen
    finally:
        for place in places:
            table = getattr(place.module, place.kind)
            if place.key in table:  # it may have removed itself
                table[place.key] = place.hook


def is_part(hook: Hook) -> bool:
    """Whether what it does is part of what is planned."""
    return getattr(hook, "__name__", None) not in _EXPECTED


def _hooks_inside(model: nn.Module) -> Iterator[_Place]:
    for name, module in model.named_modules():
        for kind in HOOK_KINDS:
            for key, hook in getattr(module, kind).items() if name else ():
                if is_part(hook):
                    yield _Place(name, module, kind, key, hook)


def _observed(place: _Place, seen: Seen) -> Hook:
    def run(module: nn.Module, *given: Any) -> Any:
        before = _state(place, given)
        returned = place.hook(module, *given)
        computes = not _is_passed_on(place.kind, given, returned) or _state(place, given) != before
        seen.computes[place] = computes or seen.computes.get(place, False)
        return returned

    return run


def _is_passed_on(kind: str, given: tuple[Any, ...], returned: Any) -> bool:
    """Whether a hook returned nothing, or what it would have replaced."""
    replaced = given[-1:] if kind == _FORWARD else (given[0], given)
    return returned is None or any(_ids(returned) == _ids(each) for each in replaced)


def _ids(tree: Any) -> list[int]:
    return [id(leaf) for leaf in tree_leaves(tree)]


def _state(place: _Place, given: tuple[Any, ...]) -> list[tuple[int, int, bool]]:
    """What a hook may change in place: what it is given, and buffers. One that runs before the
    forward may also set the weights that it is about to use, as `weight_norm` does."""
    module = place.module
    found = [*tree_leaves(given), *module.buffers()]
    if place.kind == _BEFORE:
        found += [*module.__dict__.values(), *module._parameters.values()]
    tensors = [t for t in found if isinstance(t, torch.Tensor)]
    return [(id(t), t._version, t.requires_grad) for t in tensors]


def _is_new(place: _Place) -> bool:
    known = _told.setdefault(place.module, set())
    is_new = place.key not in known
    known.add(place.key)
    return is_new


def _message(model: nn.Module, looking: list[_Place]) -> str:
    places: dict[str, list[str]] = {}
    for place in looking:
        hook = getattr(place.hook, "__qualname__", type(place.hook).__name__)
        places.setdefault(f"the {HOOK_KINDS[place.kind]} {hook}", []).append(place.name)
    what = "; ".join(f"{hook} of {_listed(names)}" for hook, names in places.items())
    return (
        f"hooks inside of {type(model).__name__} change nothing that they are given, so that they "
        f"are no part of its step and do not run in it: {what}. They ran while it was captured, on "
        "tensors without data. What should see each step may be a hook of the model itself, and "
        "look at what the model returns; without gradients the model runs as it is, with all "
        "hooks. Where this is meant, ignore remat.HookWarning"
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
