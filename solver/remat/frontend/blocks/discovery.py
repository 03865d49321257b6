"""The modules of a model that are planned by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Site:
    """A module of the model, by its path."""

    path: str
    module: nn.Module

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.module).__name__


def blocks_of(model: nn.Module) -> list[Site]:
    """The repeated blocks: modules of one class that stand in one list, the outermost of them."""
    return list(_unique(_repeated("", model)))


def parts_of(site: Site) -> list[Site]:
    """What a module is made of: repeated blocks, and the modules beside them; lists are looked
    through. Modules without parameters stay outside."""
    found: list[Site] = []
    for child in _children(site):
        if type(child.module).forward is nn.Module.forward:  # it has none: a list
            found += parts_of(child)
        elif _has_parameters(child.module):
            found.append(child)
    return list(_unique(found))


def _repeated(path: str, module: nn.Module) -> Iterator[Site]:
    if isinstance(module, _LISTS):
        counts = Counter(type(child) for child in module.children() if _has_parameters(child))
        alike = {cls for cls, count in counts.items() if count > 1}
    else:
        alike = set[type]()
    for child in _children(Site(path, module)):
        if type(child.module) in alike:
            yield child
        else:
            yield from _repeated(child.path, child.module)


def _children(site: Site) -> Iterator[Site]:
    for name, child in site.module.named_children():
        yield Site(f"{site.path}.{name}" if site.path else name, child)


def _unique(sites: Iterable[Site]) -> Iterator[Site]:
    """Each module once, by the first of its names."""
    seen: set[int] = set()
    for site in sites:
        if id(site.module) not in seen:
            seen.add(id(site.module))
            yield site


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def trained(sites: Sequence[Site]) -> list[nn.Parameter]:
    """The parameters of these modules that get a gradient, each once."""
    found = {id(p): p for s in sites for p in s.module.parameters() if p.requires_grad}
    return list(found.values())
