"""`Flat`: the model as a function from a flat list of tensors to a flat tuple of tensors.

The capture calls it in place of the model. It rebuilds the arguments, calls the model with every
operation labelled by its module, takes the tensors out of the outputs and makes them fit to be
outputs of one autograd node:

* a loss-returning model is differentiated through the loss only: the other outputs are detached,
  so that no gradient of the size of the logits is materialised;
* an output that looks into an input, a parameter or another output becomes a copy of its own;
* a buffer that the model replaced (`self.buf = ...`) is written in place instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.traceback
from torch import nn

from remat.documents.structure import Structure
from remat.errors import TraceError
from remat.frontend.capture.eager_kernels.autocast_cache import Casts
from remat.frontend.capture.model.context import buffers_by_module
from remat.frontend.common.pytree import flatten, unflatten

MODULE_KEY = "remat_module"


@dataclass
class OutputInfo:
    """What the last call returned: its structure, which tensors carry a gradient, and which of
    those the step differentiates. And which inputs required one."""

    structure: Structure | None = None
    differentiable: list[bool] = field(default_factory=list)
    differentiated: list[bool] = field(default_factory=list)
    inputs_differentiable: list[bool] = field(default_factory=list)


class Flat(nn.Module):
    """`model` behind flat arguments; `info` tells what it returned, `held` which parameters it has,
    by all of their names: while it is captured, others are in their places."""

    def __init__(self, model: nn.Module, inputs: Structure, outputs: str | Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.wanted = outputs
        self.info = OutputInfo()
        self.casts = Casts()
        self.held = dict(model.named_parameters(remove_duplicate=False))

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = unflatten(self.inputs, leaves)
        before = buffers_by_module(self.model)
        self.casts.begin([*self._tied(), *([leaf] for leaf in leaves)])
        with labelled(self.model):
            returned = self.model(*args, **kwargs)
        _write_back_buffers(self.model, before)
        tensors, structure = flatten(returned, "the model's output ")
        if not tensors:
            raise TraceError("the model returns no tensor, so there is nothing to differentiate")
        differentiable = [t.requires_grad for t in tensors]
        chosen = differentiated(structure, tensors, self.wanted)
        given = [leaf.requires_grad for leaf in leaves]
        self.info = OutputInfo(structure, differentiable, chosen, given)
        owned = {_storage(t) for t in (*leaves, *self.parameters(), *self.buffers())}
        return tuple(
            _own(tensor if wanted else tensor.detach(), owned)
            for tensor, wanted in zip(tensors, chosen, strict=True)
        )

    def _tied(self) -> Iterator[list[torch.Tensor]]:
        """What is in the places of each parameter now."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.held.items():
            names.setdefault(id(parameter), []).append(name)
        now = dict(self.model.named_parameters(remove_duplicate=False))
        for tied in names.values():
            yield [now[name] for name in tied]


def differentiated(
    structure: Structure, tensors: list[torch.Tensor], wanted: str | Sequence[str]
) -> list[bool]:
    """Which outputs get a gradient. "auto": the output named `loss`, or the first of a tuple if
    it is a scalar, where there is one; else every differentiable output."""
    grad = [t.requires_grad for t in tensors]
    if not any(grad):
        raise TraceError(
            "no output of the model depends on a parameter or input that requires a gradient; "
            "unfreeze a parameter, or call the model with inputs that require grad"
        )
    if wanted == "all":
        return grad
    paths = [structure.path_of(i) for i in range(len(tensors))]
    if wanted != "auto":
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        if missing := [n for n in names if n not in paths]:
            raise TraceError(f"the model has no output {missing[0]!r}; it returns {paths}")
        return [g and p in names for g, p in zip(grad, paths, strict=True)]
    scalars = [g and t.numel() == 1 for g, t in zip(grad, tensors, strict=True)]
    for path in ("loss", "[0]"):
        if path in paths and scalars[paths.index(path)] and sum(scalars) == 1:
            return [p == path for p in paths]
    return grad


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _own(tensor: torch.Tensor, owned: set[int]) -> torch.Tensor:
    """The tensor as an output of its own: no view for autograd, no storage of anything else."""
    if _storage(tensor) in owned:
        tensor = tensor.clone()
    owned.add(_storage(tensor))
    if tensor._base is not None or not tensor.requires_grad:
        return torch.ops.aten._unsafe_view.default(tensor, list(tensor.shape))
    return tensor


def _write_back_buffers(
    model: nn.Module, before: dict[tuple[nn.Module, str], torch.Tensor | None]
) -> None:
    changed = {
        (module, name): old
        for (module, name), old in before.items()
        if module._buffers.get(name) is not old
    }
    written = {_storage(old) for old in changed.values() if old is not None}
    assigned: dict[tuple[nn.Module, str], torch.Tensor | None] = {}
    for module, name in changed:
        new = module._buffers.get(name)
        if new is not None and _storage(new) in written:
            new = new.detach().clone()  # what another buffer was: that is written, too
        assigned[module, name] = new
    for (module, name), old in changed.items():
        new = assigned[module, name]
        if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
            raise TraceError(
                f"{type(module).__name__} replaces its buffer {name!r} by one of another shape or "
                "dtype during the forward; write into it in place (buffer.copy_(...)) instead"
            )
        with torch.no_grad():
            old.copy_(new)
        module._buffers[name] = old


@contextmanager
def labelled(model: nn.Module) -> Iterator[None]:
    """Label every traced operation with the path of the module that runs it."""
    entered: list[Any] = []
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: object) -> None:
        label = torch.fx.traceback.annotate({MODULE_KEY: names.get(module, "")})
        label.__enter__()
        entered.append(label)

    def leave(module: nn.Module, args: object, output: object) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    handles: list[Any] = []
    for module in names:
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
