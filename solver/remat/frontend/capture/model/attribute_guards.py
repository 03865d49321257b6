"""`AttributeGuards`: the Python values that a recorded step read, compared at each call.

A plan is valid for these values. If one of them has changed, the step is captured for the new
values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import nn

from remat.frontend.capture.model.attribute_access import Read
from remat.frontend.capture.model.comparable import (
    MAX_ITEMS,
    Code,
    Comparable,
    comparable,
    deep_comparable,
    is_by_class_only,
    is_container,
    is_plain,
)
from remat.frontend.capture.model.named_state import NamedTable, variables_of
from remat.frontend.capture.model.python_state import ABSENT, Path, path_label

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
        """Return the guards for these reads, and for the variables that the model's code names."""
        variables = [
            Variable(table.owner, name, value)
            for table in variables_of(model)
            for name in sorted(table.names)
            if (value := _value_of(table, name)) is not None
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
        self._roots = {path[0]: _submodule(model, str(path[0])) for path in self._reads}
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
        return (
            self._is_equal
            and all(map(_PlainValues.hold, self._plain))
            and all(map(_OtherValues.hold, self._others))
            and all(map(_DeepValues.hold, self._deep))
        )

    def difference(self) -> str:
        """Return the first value that differs, as text for messages: "layers.0.p is 0.2 instead of
        0.1"; "" if no value differs."""
        return next(self._differences(), "")

    def _bind(self) -> None:
        """Find the dictionaries of the values, and compare all values once.

        If all are equal, `hold` compares later values with copies of the present ones, which is
        fast. If not, the guards do not hold until an object or container at a path is replaced.
        """
        self._owners = {path: self._owner(path) for path in self._reads}
        self._paths_below = [path for path in self._reads if len(path) > 1]
        """Containers and objects are found by their paths: the training loop may replace them."""
        self._is_equal = self.difference() == ""
        self._plain: list[_PlainValues] = []
        self._others: list[_OtherValues] = []
        self._deep: list[_DeepValues] = []
        for path, values in self._reads.items():
            self._add_owner(self._owners[path], values)
        for table, values in self._variable_tables():
            present = table.variables
            plain = [n for n in values if n in present and _is_plain(present[n])]
            if plain:
                self._plain.append(_PlainValues(present, plain))
            if deep := values.keys() - plain:
                self._deep.append(_DeepValues(table, {n: values[n] for n in deep}))

    def _add_owner(self, owner: Any, values: Mapping[str | None, Comparable]) -> None:
        attributes = _attributes(owner)
        names = [name for name in values if name is not None]
        plain = [n for n in names if n in attributes and _is_plain(attributes[n])]
        if plain:
            self._plain.append(_PlainValues(attributes, plain))
        absent = [n for n in names if n not in attributes]
        of_class: list[str] = []
        for cls in type(owner).__mro__ if absent else ():
            data = [n for n in absent if n not in of_class and _is_plain_data(cls, n)]
            if data:
                self._plain.append(_PlainValues(vars(cls), data))
                of_class += data
        others = _OtherValues(owner, attributes)
        others.absent = frozenset(absent)
        for name in names:
            if name in attributes and name not in plain:
                value = comparable(attributes[name], with_items=False)
                if is_by_class_only(value):
                    others.classes.append((name, type(attributes[name])))
                else:
                    others.values.append((name, value))
        if None in values:
            others.content = copy.copy(owner) if _is_plain(owner) else values[None]
            others.has_plain_content = _is_plain(owner)
        if absent or others.classes or others.values or None in values:
            self._others.append(others)

    def _variable_tables(self) -> Iterator[tuple[NamedTable, dict[str, Comparable]]]:
        by_owner: dict[str, dict[str, Comparable]] = {}
        for variable in self.guards.variables:
            by_owner.setdefault(variable.owner, {})[variable.name] = variable.value
        for table in variables_of(self._model):
            if table.owner in by_owner:
                yield table, by_owner.pop(table.owner)

    def _owner(self, path: Path) -> Any:
        """Return the object at a path; `ABSENT` if there is none."""
        owner = self._roots[path[0]]
        try:
            for step in path[1:]:
                owner = owner[step] if is_container(owner) else getattr(owner, str(step))
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
                    now = comparable(getattr(owner, name, ABSENT), with_items=False)
                if now != before:
                    label = path_label(path if name is None else (*path, name))
                    yield _difference(label, now, before)
        for table, values in self._variable_tables():
            for name, before in values.items():
                if (now := _value_of(table, name)) != before:
                    yield _difference(f"{table.owner}.{name}", now, before)


class _PlainValues:
    """Plain values of one dictionary, compared with a copy from the time of `__init__`."""

    def __init__(self, table: Mapping[str, Any], names: Sequence[str]) -> None:
        self._table = table
        self._get = itemgetter(*names, names[0])  # twice, so that one name gives a tuple
        self._values = tuple(copy.copy(v) if is_container(v) else v for v in self._get(table))

    def hold(self) -> bool:
        """True if the values and their types are the same."""
        try:
            now = self._get(self._table)
            if all(map(is_, now, self._values)):
                return True
            return bool(now == self._values) and all(map(_has_same_type, now, self._values))
        except Exception:  # a value was removed, or its `==` raises an error
            return False


class _DeepValues:
    """Variables that are objects, or containers of others, compared with all that they contain."""

    def __init__(self, table: NamedTable, values: Mapping[str, Comparable]) -> None:
        self._table, self._values = table, values

    def hold(self) -> bool:
        """True if nothing has changed."""
        return all(_value_of(self._table, name) == v for name, v in self._values.items())


class _OtherValues:
    """Values of one object that are not plain.

    `absent` are names that must not be in its `__dict__`, `classes` are the classes of its
    attributes, `values` are attributes that are compared by value, and `content` is the content of
    a container.
    """

    def __init__(self, owner: Any, attributes: Mapping[str, Any]) -> None:
        self._owner, self._attributes = owner, attributes
        self.absent: frozenset[str] = frozenset()
        self.classes: list[tuple[str, type]] = []
        self.values: list[tuple[str, Comparable]] = []
        self.content: Any = None
        self.has_plain_content = False

    def hold(self) -> bool:
        """True if nothing has changed."""
        if not self.absent.isdisjoint(self._attributes):
            return False
        attributes = self._attributes
        if any(type(attributes.get(name)) is not cls for name, cls in self.classes):
            return False
        if any(
            comparable(attributes.get(name), with_items=False) != value
            for name, value in self.values
        ):
            return False
        if self.content is None:
            return True
        now = self._owner if self.has_plain_content else comparable(self._owner)
        return bool(now == self.content)


def _has_same_type(a: object, b: object) -> bool:
    return type(a) is type(b)


def _value_of(table: NamedTable, name: str) -> Comparable | None:
    """Return the value of a variable in a form that can be compared; None if it is not compared,
    as most objects of installed packages."""
    if name not in table.variables:
        return None
    value = table.variables[name]
    if _is_plain(value):
        return comparable(value)
    if table.attributes is None:
        return None
    compared = deep_comparable(value, table.attributes)
    return None if is_by_class_only(compared) else compared


def _submodule(model: nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return ABSENT


def _attributes(owner: Any) -> Mapping[str, Any]:
    """Return the `__dict__` of an object; {} if it has none."""
    attributes = getattr(owner, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def _is_plain(value: Any) -> bool:
    """True for a plain value, code, or a container of at most `MAX_ITEMS` plain values. For these,
    equal types and `==` decide as `comparable` does."""
    if is_container(value):
        items = value.values() if isinstance(value, dict) else value
        return len(value) <= MAX_ITEMS and all(map(is_plain, items))
    return is_plain(value) or isinstance(comparable(value, with_items=False), Code)


def _is_plain_data(cls: type, name: str) -> bool:
    """True if a class attribute is a plain value, and neither a method nor a property."""
    value = vars(cls).get(name, ABSENT)
    return is_plain(value) and not hasattr(value, "__get__")


def _difference(label: str, now: Comparable, before: Comparable) -> str:
    """Return the text of a changed value. Containers and arrays are described, not printed."""
    texts = _text(now), _text(before)
    if texts[0] == texts[1]:
        return f"{label} is {texts[0]} with other content"
    return f"{label} is {texts[0]} instead of {texts[1]}"


def _text(value: Comparable) -> str:
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
