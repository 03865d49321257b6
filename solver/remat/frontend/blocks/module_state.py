"""State of modules for one run: what a forward changes is restored, and forwards are patched.

Planning and recomputation run a block more often than the user's step does: its tensors, attributes
and random number generators are restored afterwards. A forward may write into buffers (batch norm),
frozen parameters (momentum encoders), its inputs, or other tensors. `WriteJournal` copies the
storage of such a tensor just before the first write, so a run without writes costs no memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from remat.frontend.blocks.fsdp2 import gathered_storages, is_dtensor
from remat.frontend.capture.model.attribute_guards import CHECKPOINTING_FLAG
from remat.frontend.capture.model.hooks import hooks_inside
from remat.frontend.capture.model.preserved_state import model_state_preserved
from remat.frontend.capture.model.python_state import PythonState
from remat.frontend.capture.model.wrapped_code import checkpointing_disabled, checkpointing_enabled
from remat.frontend.common.operators import returns_alias, written_arguments
from remat.frontend.common.pytree import tensors_in
from remat.frontend.common.torch_modes import attributes_set


class BufferSnapshot:
    """A copy of a module's buffers, to detect and to undo changes.

    `written` are addresses of storages. If given, it limits the copy to buffers in these storages
    and to buffers that may be running statistics, since the schema of batch norm does not declare
    its writes. So quantized weights are not copied.
    """

    def __init__(self, module: nn.Module, written: Container[int] | None = None) -> None:
        self._tables = [(m._buffers, dict(m._buffers)) for m in module.modules()]
        self._copies = [
            (b, b.detach().clone())
            for b in module.buffers()
            if written is None or _may_be_running_statistics(b) or _storage_address(b) in written
        ]

    def has_changed(self) -> bool:
        """True if a buffer has other elements, or its name refers to another tensor."""
        return any(map(_is_table_modified, self._tables)) or not all(
            torch.equal(buffer, copy) for buffer, copy in self._copies
        )

    def restore(self) -> None:
        """Restore the buffers and their elements. Version counters stay: a graph that saved a
        buffer remains valid, because the elements are those of its forward."""
        for table, original in filter(_is_table_modified, self._tables):
            table.clear()
            table.update(original)
        for buffer, copy in self._copies:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffer):
                buffer.copy_(copy)


def run_checkpointed(
    module: nn.Module,
    original_forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    changes_values: bool = True,
) -> Any:
    """Call the module's forward under `torch.utils.checkpoint`, which saves only its inputs. The
    backward raises RuntimeError if an input was modified in place since.

    The recomputation restores buffers, so that batch norm counts a batch once. It also restores
    Python values; pass `changes_values=False` if the forward changes none. The module's own
    checkpointing is off, in the recomputation too: layers of Transformers decide at each call
    whether to checkpoint.
    """

    versions = [(t, t._version) for t in tensors_in((args, kwargs)) if not t.is_inference()]
    buffer_versions = [(b, b._version) for b in module.buffers() if not b.is_inference()]
    written = {_storage_address(b) for b in module.buffers() if b.is_inference()}

    def forward(*args: Any, **kwargs: Any) -> Any:
        if any(tensor._version != version for tensor, version in versions):
            raise RuntimeError(
                f"an input tensor of this {type(module).__name__} was modified in place after its "
                "forward, and the block is recomputed in the backward: pass a copy of the tensor, "
                "or modify a copy"
            )
        with checkpointing_disabled():
            return original_forward(*args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _RecomputeContext(module, written, changes_values)

    with checkpointing_enabled():
        result = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    # The recomputation writes into the same buffers as the forward.
    written.update(_storage_address(b) for b, version in buffer_versions if b._version != version)
    return result


class _RecomputeContext(AbstractContextManager[None]):
    """Reusable context of a recomputation: buffers and Python values are restored, and layers do
    not checkpoint."""

    def __init__(self, module: nn.Module, written: Container[int], changes_values: bool) -> None:
        self._module = module
        self._written = written
        self._changes_values = changes_values
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.callback(BufferSnapshot(self._module, self._written).restore)
        if self._changes_values:
            state = PythonState(self._module, hooks=hooks_inside(self._module))
            self._stack.callback(state.restore)
        self._stack.enter_context(layer_checkpointing_disabled(self._module))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _may_be_running_statistics(buffer: torch.Tensor) -> bool:
    """True if a buffer may be running statistics of batch norm: a DTensor, or floating-point
    numbers of more than one byte."""
    return is_dtensor(buffer) or (buffer.dtype.is_floating_point and buffer.element_size() > 1)


def _is_table_modified(pair: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    """True if a dict has other keys or other objects than its copy, the second item of the pair."""
    current, copy = pair
    return current.keys() != copy.keys() or any(current[k] is not copy[k] for k in current)


def differentiable_attributes(module: nn.Module) -> dict[tuple[int, str, int], torch.Tensor]:
    """Return the tensors that require a gradient in public attributes of the module and its
    submodules, or in a list or tuple there, by the module's `id`, the attribute's name and the
    tensor's `id`.

    If a call leaves such a tensor (an auxiliary loss, say), code outside the block may read it
    later, which a capture of the block would miss.
    """
    return {
        (id(m), name, id(item)): item
        for m in module.modules()
        for name, value in m.__dict__.items()
        if not name.startswith("_")
        for item in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(item, torch.Tensor) and item.requires_grad
    }


@contextmanager
def state_restored(model: nn.Module, arguments: Any = ()) -> Iterator[None]:
    """Restore the state that a run of the model inside this context changes.

    State is: parameters, their gradients, buffers, and other tensors that existed before the
    context; Python values of the model, and containers in `arguments`; RNG states of torch, Python
    and NumPy.
    """
    python_state = PythonState(model, arguments, hooks_inside(model))
    random_state, numpy_state = random.getstate(), np.random.get_state()
    tensors = [*model.parameters(), *model.buffers()]
    memory = [(t, t.detach(), _storage_address(t)) for t in tensors if not is_dtensor(t)]
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = BufferSnapshot(model, ())  # the journal copies the other buffers
    journal = WriteJournal(gathered_storages(model))
    try:
        with model_state_preserved(model), journal:
            yield
    finally:
        for tensor, alias, address in memory:
            if _storage_address(tensor) != address:  # by `tensor.data = ...`
                tensor.data = alias
        journal.restore()
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:  # an autograd function has called backward()
                parameter.grad = gradient
        if buffers.has_changed():
            buffers.restore()
        python_state.restore()
        random.setstate(random_state)
        np.random.set_state(numpy_state)


def _storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _StorageCopy(NamedTuple):
    """A view of a whole storage as bytes, and a copy of the bytes: on the host if the storage is on
    a GPU, whose memory the run may need."""

    memory: torch.Tensor
    copy: torch.Tensor


class WriteJournal(TorchDispatchMode):
    """A mode that copies each storage that existed before, when an operator first writes into it.
    `ignored` are addresses of storages (`UntypedStorage._cdata`) that are neither copied nor
    restored."""

    def __init__(self, ignored: Iterable[int] = ()) -> None:
        super().__init__()
        self._copies: dict[int, _StorageCopy] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._new_storages: set[int] = set(ignored)

    @property
    def written_storages(self) -> frozenset[int]:
        """The addresses of the storages that were written into (`UntypedStorage._cdata`)."""
        return frozenset(self._copies)

    def restore(self) -> None:
        """Restore the elements and version counters of all written tensors, so that an autograd
        graph that saved one of them stays valid. Call it once, after the mode has ended."""
        for memory, copy in self._copies.values():
            memory.copy_(copy)
        for tensor, version in reversed(self._versions):
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # type: ignore[attr-defined]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # a DTensor's operators on local tensors come here
        for tensor in filter(_has_memory, written_arguments(func, args, kwargs)):
            self._copy_before_write(tensor)
        result = func(*args, **kwargs)
        if not (isinstance(func, OpOverload) and returns_alias(func)):
            old = {
                t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _has_memory(t)
            }
            self._new_storages.update(
                t.untyped_storage()._cdata
                for t in tree_leaves(result)
                if _has_memory(t) and t.untyped_storage()._cdata not in old
            )
        return result

    def _copy_before_write(self, tensor: torch.Tensor) -> None:
        """Copy the storage of a tensor, unless it is new or was copied before."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._new_storages:
            return
        if not tensor.is_inference():
            self._versions.append((tensor, tensor._version))
        if storage._cdata not in self._copies:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copy = memory.cpu() if memory.is_cuda else memory.clone()
            self._copies[storage._cdata] = _StorageCopy(memory, copy)


def _has_memory(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.layout is torch.strided and not item.is_meta


@contextmanager
def patched_forwards(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward of each module that is a key of `forwards` inside this context."""
    originals = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, forward in originals.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


@contextmanager
def layer_checkpointing_disabled(model: nn.Module) -> Iterator[None]:
    """Switch the gradient checkpointing of the layers of Transformers off inside this context: the
    plan decides what is retained."""
    layers = (m for m in model.modules() if getattr(m, CHECKPOINTING_FLAG, False))
    with attributes_set(*((layer, CHECKPOINTING_FLAG, False) for layer in layers)):
        yield
