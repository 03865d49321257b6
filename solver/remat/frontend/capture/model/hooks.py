"""Module hooks during a capture.

Hooks of the model itself are removed: they run around the plan, at each call. Hooks of submodules
run, in the backward too, and their computations become part of the graph. Their other effects
happen during the capture and never in a step, so a `HookWarning` names the hooks that compute
nothing. A hook that stores a tensor, such as an activation for a loss, is an error.
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
from remat.frontend.capture.model.python_state import (
    PythonState,
    contains_capture_values,
)
from remat.frontend.capture.model.values import path_label

_FORWARD_HOOKS, _FORWARD_PRE_HOOKS = "_forward_hooks", "_forward_pre_hooks"
HOOK_KINDS = {
    _FORWARD_HOOKS: "forward hook",
    _FORWARD_PRE_HOOKS: "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
"""The attributes of `nn.Module` that have its hooks, and what to call these hooks."""

GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
"""The tables of torch that have the hooks of all modules."""

_IGNORED_NAMES = frozenset(
    {"output_capturing_hook", "make_inputs_require_grad", "make_inputs_require_grads"}
)
"""Names of hooks of transformers and peft that collect a forward's outputs, or make frozen models
work with checkpointing: no step depends on them."""

_MAX_LISTED = 3

Hook = Callable[..., Any]

_reported: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
"""The keys of the hooks that a warning has named, by module: each is named once, however often its
model is planned."""


@dataclass(frozen=True, eq=False)
class _RegisteredHook:
    """A hook of a submodule: `hook` is at `key` in the attribute `kind` of `module`."""

    module_name: str
    module: nn.Module
    kind: str
    key: int
    hook: Hook


@dataclass
class HookActivity:
    """The hooks that ran during a capture, each with True if it computed part of the graph."""

    model: nn.Module
    computes: dict[_RegisteredHook, bool] = field(default_factory=dict)

    def warn_about_observers(self) -> None:
        """Issue a `HookWarning` that names the hooks which computed nothing."""
        observers = [
            hook
            for hook, computes in self.computes.items()
            if not computes and _is_unreported_hook(hook)
        ]
        if observers:
            warnings.warn(_hook_warning_text(self.model, observers), HookWarning, stacklevel=3)


@contextmanager
def root_hooks_removed(model: nn.Module) -> Iterator[None]:
    """Remove the hooks of the model itself, not of its submodules, within the context. Raises
    `TraceError` if one of them computes the model's weights."""
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
def submodule_hooks_observed(model: nn.Module) -> Iterator[HookActivity]:
    """Record within the context which hooks of submodules compute part of the graph. Raises
    `TraceError` at its end if a hook has stored a tensor outside of the model."""
    activity = HookActivity(model)
    registered = list(_submodule_hooks(model))
    with _hook_tensors_refused(model):
        for hook in registered:
            getattr(hook.module, hook.kind)[hook.key] = _observed_hook(hook, activity)
        try:
            yield activity
        finally:
            for hook in registered:
                table = getattr(hook.module, hook.kind)
                if hook.key in table:  # it may have removed itself
                    table[hook.key] = hook.hook


def hooks_inside(model: nn.Module) -> list[Hook]:
    """Return the hooks that a call of the model's forward runs: hooks of submodules, and torch's
    global module hooks."""
    hooks = [registered.hook for registered in _submodule_hooks(model)]
    for table in GLOBAL_HOOKS:
        hooks += getattr(nn.modules.module, table).values()
    return hooks


@contextmanager
def _hook_tensors_refused(model: nn.Module) -> Iterator[None]:
    """Raise `TraceError` at the end of the context if hooks have stored tensors of the capture in
    closure variables, global variables or objects outside of the model; remove these tensors."""
    if not (hooks := hooks_inside(model)):
        yield
        return
    state = PythonState.of_hooks(hooks, model)
    stored = ""
    try:
        yield
        changes = (change for change in state.changes() if contains_capture_values(change.now))
        stored = next((path_label(change.path) for change in changes), "")
    finally:
        state.remove_tensors_of_capture()
    if stored:
        raise TraceError(
            f"a hook inside of this {type(model).__name__} stores a tensor in {stored}, which a "
            "planned step does not set. Remedy: return the tensor from the forward of the "
            "model, or store it in an attribute of a module there; or plan the blocks inside, "
            "which runs the model's own code and hooks around them: "
            'remat.enable(model, budget, scope="blocks")'
        )


def is_planned_hook(hook: Hook) -> bool:
    """True if a plan depends on the hook: adding or removing it triggers a replan. False for some
    hooks of transformers and peft, by their names."""
    return getattr(hook, "__name__", None) not in _IGNORED_NAMES


def _submodule_hooks(model: nn.Module) -> Iterator[_RegisteredHook]:
    """Yield the hooks of the submodules, not of the model itself, on which a plan depends."""
    for name, module in model.named_modules():
        for kind in HOOK_KINDS:
            for key, hook in getattr(module, kind).items() if name else ():
                if is_planned_hook(hook):
                    yield _RegisteredHook(name, module, kind, key, hook)


def _observed_hook(registered: _RegisteredHook, activity: HookActivity) -> Hook:
    """Return a hook that calls the registered one and records if it computed anything."""

    def run(module: nn.Module, *args: Any) -> Any:
        before = _mutable_tensor_state(registered, args)
        returned = registered.hook(module, *args)
        computes = (
            not _is_hook_result_unchanged(registered.kind, args, returned)
            or _mutable_tensor_state(registered, args) != before
        )
        activity.computes[registered] = computes or activity.computes.get(registered, False)
        return returned

    return run


def _is_hook_result_unchanged(kind: str, args: tuple[Any, ...], returned: Any) -> bool:
    """True if a hook returned None, or the same value that its result would replace."""
    replaceable = args[-1:] if kind == _FORWARD_HOOKS else (args[0], args)
    return returned is None or any(
        _hook_leaf_ids(returned) == _hook_leaf_ids(x) for x in replaceable
    )


def _hook_leaf_ids(tree: Any) -> list[int]:
    return [id(leaf) for leaf in tree_leaves(tree)]


def _mutable_tensor_state(
    registered: _RegisteredHook, args: tuple[Any, ...]
) -> list[tuple[int, int, bool]]:
    """Return identity, version and `requires_grad` of the tensors that a hook may change: its
    arguments and the module's buffers; for a forward pre-hook also the module's weights, which
    `weight_norm` sets."""
    module = registered.module
    items = [*tree_leaves(args), *module.buffers()]
    if registered.kind == _FORWARD_PRE_HOOKS:
        items += [*module.__dict__.values(), *module._parameters.values()]
    tensors = [t for t in items if isinstance(t, torch.Tensor)]
    return [(id(t), t._version, t.requires_grad) for t in tensors]


def _is_unreported_hook(hook: _RegisteredHook) -> bool:
    """True if no warning has named the hook yet. Note that one names it now."""
    keys = _reported.setdefault(hook.module, set())
    is_new = hook.key not in keys
    keys.add(hook.key)
    return is_new


def _hook_warning_text(model: nn.Module, observers: list[_RegisteredHook]) -> str:
    modules_by_hook: dict[str, list[str]] = {}
    for observer in observers:
        name = getattr(observer.hook, "__qualname__", type(observer.hook).__name__)
        label = f"the {HOOK_KINDS[observer.kind]} {name}"
        modules_by_hook.setdefault(label, []).append(observer.module_name)
    hooks = "; ".join(
        f"{label} of {_join_module_names(names)}" for label, names in modules_by_hook.items()
    )
    return (
        f"hooks inside of {type(model).__name__} compute nothing, so a planned step does not call "
        f"them: {hooks}. Tensors that they store in attributes of modules are set in each step; "
        "their other effects happened once, while the model was captured, on tensors without data. "
        "To observe each step, use a hook of the model itself, on what the model returns. Calls "
        "without gradients run the original model with all hooks. If this is intended, ignore "
        "remat.HookWarning"
    )


def _join_module_names(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
