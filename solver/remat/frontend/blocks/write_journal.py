"""`WriteJournal`: records and undoes in-place writes into tensors that existed before a run.

A forward may write into buffers (batch norm), frozen parameters (momentum encoders), its inputs, or
other tensors. The journal copies the storage of such a tensor just before the first write, so a run
without writes costs no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Copy(NamedTuple):
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
        self._copies: dict[int, _Copy] = {}
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
        for tensor in _written_arguments(func, args, kwargs):
            self._note(tensor)
        result = func(*args, **kwargs)
        if not _returns_alias(func):
            old = {
                t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _has_memory(t)
            }
            self._new_storages.update(
                t.untyped_storage()._cdata
                for t in tree_leaves(result)
                if _has_memory(t) and t.untyped_storage()._cdata not in old
            )
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        """Copy the storage of a tensor, unless it is new or was copied before."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._new_storages:
            return
        if not tensor.is_inference():
            self._versions.append((tensor, tensor._version))
        if storage._cdata not in self._copies:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copy = memory.cpu() if memory.is_cuda else memory.clone()
            self._copies[storage._cdata] = _Copy(memory, copy)


def _has_memory(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.layout is torch.strided and not item.is_meta


def _written_arguments(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments that an operator writes into."""
    positions, names = _written_positions(func)
    items = [args[p] for p in positions if p < len(args)]
    items += [kwargs[name] for name in names if name in kwargs]
    yield from filter(_has_memory, tree_leaves(items))


@lru_cache(maxsize=4096)
def _written_positions(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the positions and names of the arguments that an operator writes into."""
    schema = getattr(func, "_schema", None)
    written = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments if schema is not None else ())
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(position for position, _ in written), tuple(name for _, name in written)


@lru_cache(maxsize=4096)
def _returns_alias(func: Any) -> bool:
    """True if an operator returns a view of an argument, or an argument."""
    schema = getattr(func, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)
