"""`AttributeGuards`: the Python values that a recorded step read, compared at each call.

A plan is valid for these values. If one of them has changed, the step is captured for the new
values.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_, itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from remat.frontend.capture.model.attribute_access import Read
from remat.frontend.capture.model.reached_code import NamedTable, reachable_variables
from remat.frontend.capture.model.values import (
    ABSENT,
    MAX_ITEMS,
    OBJECT_DEPTH,
    Code,
    Comparable,
    Path,
    attribute_or_absent,
    attributes_of,
    comparable,
    is_compared_by_class,
    is_container,
    is_plain_value,
    path_label,
)

CHECKPOINTING_FLAG = "gradient_checkpointing"
"""The attribute by which layers of Transformers checkpoint themselves. A step has it off, whatever
it is between steps, so guards do not compare it."""


class Variable(NamedTuple):
    """A variable whose reads cannot be intercepted: a global variable, a class attribute, or a
    closure variable that the model's code may have read. `owner` is the name of the Python module,
    class or function."""

    owner: str
    name: str
    value: Comparable


@dataclass(frozen=True)
class AttributeGuards:
    """The values that the code of a model read. The path of a read begins with the path of a
    module. Guards have no reference to the model, so they can be pickled and bound to a copy."""

    reads: tuple[Read, ...] = ()
    variables: tuple[Variable, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, reads: Iterable[Read]) -> AttributeGuards:
        """Return the guards for these reads, and for the variables that the model's code names and
        that can be compared."""
        variables = [
            Variable(table.owner, name, value)
            for table in reachable_variables(model)
            for name in sorted(table.names)
            if (value := _comparable_variable(table, name)) is not None
        ]
        compared = dict.fromkeys(read for read in reads if read.name != CHECKPOINTING_FLAG)
        return cls(tuple(compared), tuple(variables))

    def bind(self, model: nn.Module) -> BoundGuards:
        """Return the guards bound to the attributes of this model."""
        return BoundGuards(self, model)

    @classmethod
    def of_submodules(cls, guards: Iterable[tuple[str, AttributeGuards]]) -> AttributeGuards:
        """Return the guards of a model, merged from pairs of a submodule's path and guards."""
        reads: dict[Read, None] = {}
        variables: dict[Variable, None] = {}
        for path, part in guards:
            variables |= dict.fromkeys(part.variables)
            for read in part.reads:
                module = f"{path}.{read.path[0]}" if read.path[0] else path
                reads[read._replace(path=(module, *read.path[1:]))] = None
        return cls(tuple(reads), tuple(variables))


class BoundGuards:
    """Guards of one model, with references to the dictionaries of the values to compare."""

    def __init__(self, guards: AttributeGuards, model: nn.Module) -> None:
        self.guards = guards
        self._model = model
        self._reads: dict[Path, dict[str | None, Comparable]] = {}
        for read in guards.reads:
            self._reads.setdefault(read.path, {})[read.name] = read.value
        self._roots = {path[0]: _submodule_or_absent(model, str(path[0])) for path in self._reads}
        self._owners: dict[Path, Any] = {}
        self._bind()

    def __reduce__(self) -> tuple[Any, ...]:
        return BoundGuards, (self.guards, self._model)

    def hold(self) -> bool:
        """True if all values are equal to those that the recorded code read."""
        for path in self._paths_below:
            if self._owner(path) is not self._owners[path]:
                self._bind()  # another object or container is at this place
                break
        return self._is_equal and all(check() for check in self._checks)

    def difference(self) -> str:
        """Return the first value that differs, as text for messages: "layers.0.p is 0.2 instead of
        0.1"; "" if no value differs."""
        return next(self._differences(), "")

    def _bind(self) -> None:
        """Look up the dictionaries of the values, and compare all values once.

        If all are equal, `hold` compares later values with copies of the present ones, which is
        fast. If not, the guards do not hold until an object or container at a path is replaced.
        """
        self._owners = {path: self._owner(path) for path in self._reads}
        self._paths_below = [path for path in self._reads if len(path) > 1]
        """Containers and objects are found by their paths: the training loop may replace them."""
        self._is_equal = self.difference() == ""
        self._checks: list[Callable[[], bool]] = []
        """Functions that return True if some values have not changed; the fast ones first."""
        others = [
            check
            for path, values in self._reads.items()
            for check in self._checks_of_owner(self._owners[path], values)
        ]
        for table, values in self._variable_tables():
            plain = self._add_plain(table.variables, values)
            if deep := {name: value for name, value in values.items() if name not in plain}:
                others.append(
                    partial(_are_guarded_values_equal, partial(_comparable_variable, table), deep)
                )
        self._checks += others

    def _add_plain(self, table: Mapping[str, Any], names: Iterable[str]) -> set[str]:
        """Add a check that compares the plain values of `table` among these names with copies of
        them. Return the names that it covers."""
        plain = [name for name in names if name in table and _is_directly_comparable(table[name])]
        if plain:
            self._checks.append(_PlainValueGuards(table, plain).hold)
        return set(plain)

    def _checks_of_owner(
        self, owner: Any, values: Mapping[str | None, Comparable]
    ) -> Iterator[Callable[[], bool]]:
        """Add the check of an object's plain attributes. Yield the checks of the other attributes,
        of absent ones, and of the content of a container; `values` are the recorded values by
        name."""
        attributes = attributes_of(owner)
        if attributes is None:
            attributes = {}
        names = [name for name in values if name is not None]
        others = {
            name: comparable(attributes[name], 0)
            for name in set(names).difference(self._add_plain(attributes, names))
            if name in attributes
        }
        absent = frozenset(name for name in names if name not in attributes)
        of_class = set(absent)
        for cls in type(owner).__mro__ if absent else ():
            data = {name for name in of_class if _is_plain_class_attribute(cls, name)}
            of_class -= self._add_plain(vars(cls), data)
        if absent:
            yield lambda: absent.isdisjoint(attributes)
        classes = {n: type(attributes[n]) for n, v in others.items() if is_compared_by_class(v)}
        if classes:
            yield lambda: all(type(attributes.get(n)) is cls for n, cls in classes.items())
        if compared := {n: v for n, v in others.items() if n not in classes}:
            yield partial(
                _are_guarded_values_equal,
                lambda name: comparable(attributes.get(name), 0),
                compared,
            )
        if None in values:
            if _is_directly_comparable(owner):
                yield partial(_is_unchanged, owner, copy.copy(owner))
            else:
                yield lambda: bool(comparable(owner) == values[None])

    def _variable_tables(self) -> Iterator[tuple[NamedTable, dict[str, Comparable]]]:
        by_owner: dict[str, dict[str, Comparable]] = {}
        for variable in self.guards.variables:
            by_owner.setdefault(variable.owner, {})[variable.name] = variable.value
        for table in reachable_variables(self._model):
            if table.owner in by_owner:
                yield table, by_owner.pop(table.owner)

    def _owner(self, path: Path) -> Any:
        """Return the object at a path; `ABSENT` if there is none."""
        owner: Any = self._roots[path[0]]
        try:
            for step in path[1:]:
                is_item = is_container(owner)
                owner = owner[step] if is_item else attribute_or_absent(owner, str(step))
                if isinstance(owner, weakref.ref):
                    owner = owner()
        except (AttributeError, LookupError, TypeError):
            return ABSENT
        return owner

    def _differences(self) -> Iterator[str]:
        for path, values in self._reads.items():
            owner = self._owner(path)
            for name, before in values.items():
                if name is None:
                    now = comparable(owner)
                else:
                    now = comparable(attribute_or_absent(owner, name), 0)
                if now != before:
                    label = path_label(path if name is None else (*path, name))
                    yield _guard_difference_text(label, now, before)
        for table, values in self._variable_tables():
            for name, before in values.items():
                if (now := _comparable_variable(table, name)) != before:
                    yield _guard_difference_text(f"{table.owner}.{name}", now, before)


class _PlainValueGuards:
    """The guards of some plain values of one dictionary: copies from the time of `__init__`."""

    def __init__(self, table: Mapping[str, Any], names: Sequence[str]) -> None:
        self._table = table
        self._get = itemgetter(*names, names[0])  # twice, so that one name gives a tuple
        self._values = tuple(copy.copy(v) if is_container(v) else v for v in self._get(table))

    def hold(self) -> bool:
        """True if the values are the same."""
        try:
            now = self._get(self._table)
            return all(map(is_, now, self._values)) or all(map(_is_unchanged, now, self._values))
        except Exception:  # a value was removed
            return False


def _is_unchanged(value: Any, before: Any) -> bool:
    """True if a value that `_is_directly_comparable` equals an earlier one, or the copy of an
    earlier container, as `comparable` compares them. That is fast for identical items."""
    if value is before:
        return True
    if type(value) is not type(before):
        return False
    if is_container(value) and len(value) == len(before) and all(map(is_, value, before)):
        items = (value.values(), before.values()) if isinstance(value, dict) else ((), ())
        if all(map(is_, *items)):
            return True
    return bool(comparable(value) == comparable(before))


def _are_guarded_values_equal(
    read: Callable[[str], Comparable], values: Mapping[str, Comparable]
) -> bool:
    """True if `read` returns, for each name, the value that the recorded code read."""
    return all(read(name) == value for name, value in values.items())


def _comparable_variable(table: NamedTable, name: str) -> Comparable | None:
    """Return the value of a variable as `comparable` does; None if there is no such variable, or
    its value is not compared, as most objects of installed packages."""
    if name not in table.variables:
        return None
    value = table.variables[name]
    if _is_directly_comparable(value):
        return comparable(value)
    if table.attributes is None:
        return None
    compared = comparable(value, OBJECT_DEPTH, table.attributes)
    return None if is_compared_by_class(compared) else compared


def _submodule_or_absent(model: nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return ABSENT


def _is_directly_comparable(value: Any) -> bool:
    """True for a plain value, code, or a container of at most `MAX_ITEMS` plain values that can be
    copied."""
    if isinstance(value, MappingProxyType):
        return False
    if is_container(value):
        items = value.values() if isinstance(value, dict) else value
        return len(value) <= MAX_ITEMS and all(map(is_plain_value, items))
    return is_plain_value(value) or isinstance(comparable(value, 0), Code)


def _is_plain_class_attribute(cls: type, name: str) -> bool:
    """True if a class attribute is a plain value, and neither a method nor a property."""
    value = vars(cls).get(name, ABSENT)
    return is_plain_value(value) and not hasattr(value, "__get__")


def _guard_difference_text(label: str, now: Comparable, before: Comparable) -> str:
    """Return the message about a changed value: "p is 0.2 instead of 0.1". Containers and arrays
    are described, not printed."""
    texts = _guarded_value_text(now), _guarded_value_text(before)
    if texts[0] == texts[1]:
        return f"{label} is {texts[0]} with other content"
    return f"{label} is {texts[0]} instead of {texts[1]}"


def _guarded_value_text(value: Comparable) -> str:
    match value:
        case (str(), item):
            return str(item)
        case (str(),):
            return f"of the class {value[0]}"
        case (str(kind), int(count), tuple() | frozenset()):
            items = "1 item" if count == 1 else f"{count} items"
            return f"a {kind.removeprefix('builtins.')} of {items}"
        case (str(), tuple(), str(), bytes()):
            return f"a {value[0]} of shape {value[1]}"
        case _:
            return str(value)
