"""`DroppedOutput`: what a step planned with `outputs="loss"` returns in place of other outputs."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils._pytree import tree_leaves

from remat.errors import OutputNotComputed


class DroppedOutput:
    """Placeholder for a tensor that the step did not return. Operators, functions of torch and
    attributes raise `OutputNotComputed`; `repr`, `is None`, `hash`, pickles and copies do not."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f'<{self._path}: not returned in training, with outputs="loss">'

    def __reduce__(self) -> tuple[Any, ...]:
        return DroppedOutput, (self._path,)

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error()

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise the error in place of any function of torch."""
        leaves = tree_leaves((args, kwargs))
        raise next(leaf for leaf in leaves if isinstance(leaf, cls))._error()

    def _error(self) -> OutputNotComputed:
        return OutputNotComputed(
            f"the output {self._path!r} was not returned: the training step is planned with "
            'outputs="loss", which needs no memory for the other outputs. Read it in evaluation, '
            'under torch.no_grad(), or plan with outputs="dropped", with which it can be read '
            "before the backward"
        )


def _raise_error(self: DroppedOutput, *args: object, **kwargs: object) -> NoReturn:
    raise self._error()


_USES = (
    "abs add and bool call complex contains divmod eq float floordiv ge getitem gt index int "
    "invert iter le len lshift lt matmul mod mul ne neg or pos pow radd rand rfloordiv rlshift "
    "rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor setitem sub truediv xor"
)
for _name in _USES.split():
    setattr(DroppedOutput, f"__{_name}__", _raise_error)
DroppedOutput.__hash__ = object.__hash__  # type: ignore[method-assign]
