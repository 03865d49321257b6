"""`Draft`: a Trace in the making, and what is known of its tensors by name."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from remat.documents.arguments import refs
from remat.documents.records import Gradient, Node, Output, Placeholder, Result, TensorMeta
from remat.errors import TraceError
from remat.frontend.capture.symbolic_sizes import Sizes


@dataclass
class Draft:
    """Placeholders, nodes, outputs and gradients as read so far; passes edit it in place.

    `storage_of` and `meta_of` are by tensor name, `owned` are the storages of what exists: a node
    whose results all live in owned storages is a view.
    """

    placeholders: list[Placeholder] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    storage_of: dict[str, int] = field(default_factory=dict)
    meta_of: dict[str, TensorMeta] = field(default_factory=dict)
    owned: set[int] = field(default_factory=set)
    sizes: Sizes = field(default_factory=Sizes)
    _numbers: dict[int, int] = field(default_factory=dict)

    def storage(self, tensor: torch.Tensor) -> int:
        """The number of a fake tensor's storage; a new one where it was not seen before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self.storages)
            self.storages.append(self.sizes(storage.nbytes()))
        return self._numbers[key]

    def meta(self, tensor: torch.Tensor) -> TensorMeta:
        """Shape, stride, dtype and device of a tensor, real or fake."""
        if type(tensor).__name__ not in ("Tensor", "Parameter", "FakeTensor", "Buffer"):
            raise TraceError(
                f"tensors of type {type(tensor).__name__} (subclasses) are not supported"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise TraceError(f"only strided dense tensors are supported, not {tensor.layout}")
        return TensorMeta(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(map(self.sizes, tensor.shape)),
            stride=tuple(map(self.sizes, tensor.stride())),
            offset=self.sizes(tensor.storage_offset()),
            device=str(tensor.device),
        )

    def result(self, name: str, tensor: torch.Tensor, position: int = -1) -> Result:
        """A tensor that a traced node returns."""
        meta = self.meta(tensor)
        return self._known(name, meta, self.storage(tensor), position)

    def fresh_result(self, name: str, like: TensorMeta, stride: tuple[int, ...]) -> Result:
        """A tensor that no traced node returns, dense in a storage of its own."""
        elements = 1 + sum((n - 1) * s for n, s in zip(like.shape, stride, strict=True))
        itemsize = getattr(torch, like.dtype).itemsize
        self.storages.append(0 if 0 in like.shape else elements * itemsize)
        meta = like.model_copy(update={"stride": stride, "offset": 0})
        return self._known(name, meta, len(self.storages) - 1, -1)

    def _known(self, name: str, meta: TensorMeta, storage: int, position: int) -> Result:
        self.meta_of[name] = meta
        self.storage_of[name] = storage
        return Result(name=name, tensor=meta, storage=storage, position=position)

    def place(self, placeholder: Placeholder) -> None:
        """Add a placeholder."""
        self.placeholders.append(placeholder)
        self.meta_of[placeholder.name] = placeholder.tensor
        self.storage_of[placeholder.name] = placeholder.storage
        self.owned.add(placeholder.storage)

    def reads(self, node: Node, storage: int) -> bool:
        """Whether a node reads a storage, directly or through a view."""
        return any(self.storage_of[name] == storage for name in read_names(node))

    def device(self) -> str:
        """The device of the step: the accelerator with most tensors, else the CPU."""
        counts: dict[str, int] = {}
        for meta in self.meta_of.values():
            counts[meta.device] = counts.get(meta.device, 0) + 1
        return max(counts, key=lambda name: (name != "cpu", counts[name]))


def read_names(node: Node) -> tuple[str, ...]:
    """The tensors that a node reads."""
    return tuple(refs((node.args, *node.kwargs.values())))
