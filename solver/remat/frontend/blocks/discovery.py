"""Discovery of a model's blocks: the submodules that are planned separately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Submodule:
    """A submodule of the model with its module path."""

    path: str
    module: nn.Module

    @property
    def class_name(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__


def repeated_blocks(model: nn.Module) -> list[Submodule]:
    """Return the model's repeated blocks: the outermost submodules with parameters that share a
    container (such as `nn.ModuleList`) with others of the same class. A single layer of
    torch.nn is not a block: the container around it is planned as a whole."""
    return list(_unique_submodules(_repeated_blocks_below("", model)))


def children_with_parameters(submodule: Submodule) -> list[Submodule]:
    """Return the child modules that have parameters. A container without a forward is replaced by
    its own children."""
    children: list[Submodule] = []
    for child in _child_submodules(submodule):
        if type(child.module).forward is nn.Module.forward:  # no forward of its own: a container
            children += children_with_parameters(child)
        elif _has_parameters(child.module):
            children.append(child)
    return list(_unique_submodules(children))


def _repeated_blocks_below(path: str, module: nn.Module) -> Iterator[Submodule]:
    if isinstance(module, _CONTAINERS):
        counts = Counter(type(child) for child in module.children() if _may_be_block(child))
        repeated_classes = {cls for cls, count in counts.items() if count > 1}
    else:
        repeated_classes = set[type]()
    for child in _child_submodules(Submodule(path, module)):
        if type(child.module) in repeated_classes:
            yield child
        else:
            yield from _repeated_blocks_below(child.path, child.module)


def _child_submodules(submodule: Submodule) -> Iterator[Submodule]:
    for name, child in submodule.module.named_children():
        yield Submodule(f"{submodule.path}.{name}" if submodule.path else name, child)


def _unique_submodules(submodules: Iterable[Submodule]) -> Iterator[Submodule]:
    """Yield each module once, under the first of its paths."""
    seen: set[int] = set()
    for submodule in submodules:
        if id(submodule.module) not in seen:
            seen.add(id(submodule.module))
            yield submodule


def _may_be_block(module: nn.Module) -> bool:
    """True for a module with parameters that is no single layer of torch.nn."""
    is_layer = type(module).__module__.startswith("torch.") and not [*module.children()]
    return _has_parameters(module) and not is_layer


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def trainable_parameters(submodules: Sequence[Submodule]) -> list[nn.Parameter]:
    """Return the parameters of the submodules that require a gradient, each once."""
    parameters = {id(p): p for s in submodules for p in s.module.parameters() if p.requires_grad}
    return list(parameters.values())
