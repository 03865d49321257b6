"""`FlatModel`: a model as a function from a flat list of tensors to a flat tuple of tensors.

The capture calls it in place of the model. It rebuilds the arguments, calls the model, notes which
module runs when, and flattens the outputs. One autograd node must be able to return them, so:

* a model that returns a loss is differentiated through the loss only: its other outputs are
  detached, so that no gradient of the size of the logits is allocated;
* an output that is a view of an input, a parameter or another output is cloned;
* a buffer that the model replaces (`self.buf = ...`) is written in place instead;
* tensors that the model stores (in attributes, or containers among its arguments) are outputs too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import nn

from remat.documents.records import Store
from remat.documents.structure import Structure
from remat.errors import TraceError
from remat.frontend.capture.eager_kernels.autocast import AutocastCache
from remat.frontend.capture.model.attribute_access import AttributeAccess
from remat.frontend.capture.model.forward_checks import CallLimit
from remat.frontend.capture.model.module_paths import ModulePaths
from remat.frontend.capture.model.preserved_state import registered_buffers
from remat.frontend.capture.model.python_state import Change, PythonState
from remat.frontend.capture.model.stores import (
    StoredValue,
    input_leaves_marked,
    stored_arguments,
    stored_attributes,
)
from remat.frontend.common.pytree import flatten, unflatten
from remat.frontend.common.quantized import quantization_states
from remat.frontend.common.step_outputs import outputs_to_differentiate
from remat.frontend.common.torch_modes import capture_paused


@dataclass
class OutputInfo:
    """The outputs of a model's last call: the structure of the return value, the stored values, and
    for each output tensor if it is returned, requires a gradient, and is differentiated by the
    step. Also which inputs required a gradient."""

    structure: Structure | None = None
    stores: tuple[Store, ...] = ()
    returned: list[bool] = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    differentiated: list[bool] = field(default_factory=list)
    inputs_require_grad: list[bool] = field(default_factory=list)


class FlatModel(nn.Module):
    """A model that takes and returns flat tuples of tensors. `output_info` describes its last call,
    `changes` are the Python values that changed since `start_call`, and `access` has the attributes
    that the call read and wrote.

    `inputs` is the structure of its arguments, and `differentiate` selects the outputs that
    gradients come from. `are_leaves` says of each tensor of the arguments if it is a leaf of
    autograd: only then does autocast cache its cast. `parameters_by_name` has the parameters by all
    of their names. It is read before the capture, during which other tensors are in their places.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Structure,
        differentiate: str | Sequence[str],
        are_leaves: Sequence[bool],
    ) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.differentiate = differentiate
        self.are_leaves = are_leaves
        self.output_info = OutputInfo()
        self.autocast_cache = AutocastCache()
        self.module_paths = ModulePaths()
        self.parameters_by_name = dict(model.named_parameters(remove_duplicate=False))
        self.changes: list[Change] = []
        self.start_call()

    def start_call(self) -> PythonState:
        """Prepare a call, and return a snapshot of the model's Python values before it."""
        # A capture replaces these tensors, as it replaces parameters.
        self._quantized = {
            (id(state.attributes), name)
            for state in quantization_states(self.model)
            for name in state.tensors()
        }
        self.state = PythonState(self.model)
        self.access = AttributeAccess(self.model)
        return self.state

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model with these tensors as the leaves of its arguments. Return the tensors that
        it returns or stores, each in a storage that no other and no input has."""
        args, kwargs = unflatten(self.inputs, leaves)
        with capture_paused():
            arguments = PythonState(nn.Module(), (args, kwargs))
        buffers = registered_buffers(self.model)
        cached_inputs = ([leaf] for leaf in compress(leaves, self.are_leaves))
        self.autocast_cache.start_forward([*self._tied_parameters(), *cached_inputs])
        with self.module_paths.followed_forward(self.model), CallLimit(self.model):
            returned = self.model(*args, **kwargs)
        _write_replaced_buffers(self.model, buffers)
        with capture_paused():
            changes = self.state.changes()
            self.changes = [c for c in changes if (id(c.container), c.key) not in self._quantized]
            changed_arguments = arguments.changes()
        stored = [
            *stored_attributes(self.model, self.changes),
            *self._constant_writes(),
            *stored_arguments((args, kwargs), changed_arguments),
        ]
        tensors = self._describe_outputs(returned, stored, leaves)
        if any(tensor.retains_grad for tensor in tensors):
            raise TraceError(
                "the forward of the model calls retain_grad() of a tensor that it returns or "
                "stores, and a plan does not retain this gradient. Remedy: compute the gradient by "
                "torch.autograd.grad, or plan the blocks, which runs the model's own code around "
                'them: remat.enable(model, budget, scope="blocks")'
            )
        storages = {_storage_id(t) for t in (*leaves, *self.parameters(), *self.buffers())}
        return tuple(
            _separate_output(tensor if is_differentiated else tensor.detach(), storages)
            for tensor, is_differentiated in zip(
                tensors, self.output_info.differentiated, strict=True
            )
        )

    def _describe_outputs(
        self, returned: Any, stored: Sequence[StoredValue], leaves: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Set `output_info`. Return the tensors of all outputs: first the returned ones, then those
        that are only stored."""
        tensors, result = flatten(returned, "the model's output ")
        if not tensors:
            raise TraceError("the model returns no tensor, so there is nothing to differentiate")
        differentiated = outputs_to_differentiate(result, tensors, self.differentiate)
        number_of = {id(tensor): number for number, tensor in enumerate(tensors)}
        stores: list[Store] = []
        for item in stored:
            parts, value = flatten(item.value, item.label)
            value = input_leaves_marked(value, parts, leaves)
            for leaf in value.leaves():
                if id(parts[leaf]) not in number_of:
                    number_of[id(parts[leaf])] = len(tensors)
                    tensors.append(parts[leaf])
            value = value.with_leaves(partial(_output_leaf, parts, number_of))
            stores.append(
                Store(kind=item.kind, place=item.place, value=value, is_content=item.is_content)
            )
        stored_only = tensors[len(differentiated) :]
        self.output_info = OutputInfo(
            result,
            tuple(stores),
            [True] * len(differentiated) + [False] * len(stored_only),
            [tensor.requires_grad for tensor in tensors],
            differentiated + [self._differentiates_stored(t) for t in stored_only],
            [leaf.requires_grad for leaf in leaves],
        )
        return tensors

    def _differentiates_stored(self, tensor: torch.Tensor) -> bool:
        """True if the step differentiates this tensor, which the model stores and does not return:
        one that requires a gradient and, if `differentiate` names outputs, has one element."""
        is_small = tensor.numel() == 1
        return tensor.requires_grad and (self.differentiate in ("auto", "all") or is_small)

    def _constant_writes(self) -> Iterator[StoredValue]:
        """Yield the attributes of modules that the call set to the value that they already had."""
        changed = {change.path for change in self.changes}
        for path, name in self.access.writes:
            value = vars(self.model.get_submodule(path)).get(name)
            if (path, name) not in changed and isinstance(value, (bool, int, float, str)):
                yield StoredValue("attribute", (path, name), value, False)

    def _tied_parameters(self) -> Iterator[list[torch.Tensor]]:
        """Yield, for each parameter, the tensors that now are at all of its names."""
        names_by_id: dict[int, list[str]] = {}
        for name, parameter in self.parameters_by_name.items():
            names_by_id.setdefault(id(parameter), []).append(name)
        current = dict(self.model.named_parameters(remove_duplicate=False))
        for names in names_by_id.values():
            yield [current[name] for name in names]


def _output_leaf(
    tensors: Sequence[torch.Tensor], number_of: Mapping[int, int], leaf: int
) -> Structure:
    return Structure(kind="leaf", leaf=number_of[id(tensors[leaf])])


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _separate_output(tensor: torch.Tensor, storages: set[int]) -> torch.Tensor:
    """Return the tensor as an output that is not a view for autograd; a clone if its storage is
    among `storages`. Add the storage of the output to them."""
    if _storage_id(tensor) in storages:
        tensor = tensor.clone()
    storages.add(_storage_id(tensor))
    if tensor._base is not None or not tensor.requires_grad:
        return torch.ops.aten._unsafe_view.default(tensor, list(tensor.shape))
    return tensor


def _write_replaced_buffers(
    model: nn.Module, before: dict[tuple[nn.Module, str], torch.Tensor | None]
) -> None:
    """Register the buffers `before` a call again, and copy into them what the call assigned. Raises
    `TraceError` if that has another shape or dtype."""
    replaced = {
        (module, name): old
        for (module, name), old in before.items()
        if module._buffers.get(name) is not old
    }
    written = {_storage_id(old) for old in replaced.values() if old is not None}
    assigned: dict[tuple[nn.Module, str], torch.Tensor | None] = {}
    for module, name in replaced:
        new = module._buffers.get(name)
        if new is not None and _storage_id(new) in written:
            new = new.detach().clone()  # the previous value of another replaced buffer
        assigned[module, name] = new
    for (module, name), old in replaced.items():
        new = assigned[module, name]
        if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
            raise TraceError(
                f"{type(module).__name__} replaces its buffer {name!r} by one of another shape or "
                "dtype during the forward; write into it in place (buffer.copy_(...)) instead"
            )
        with torch.no_grad():
            old.copy_(new)
        module._buffers[name] = old
