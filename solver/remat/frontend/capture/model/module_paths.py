"""The path of the module that an operation of a captured step belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


class ModulePaths:
    """The path of the running module: in a forward within `followed_forward`, and in the backward
    after `follow_backward`, where it is the module whose forward created the running node of
    autograd.

    Autograd numbers its nodes in the order of their creation. Between two nodes it sums gradients,
    which belong to no module. A module that the backward calls has the path of the node that calls
    it.
    """

    def __init__(self) -> None:
        self._active = [""]
        self._first_numbers: list[int] = []
        self._paths: list[str] = []
        """Nodes from `_first_numbers[i]` on belong to `_paths[i]`."""

    @property
    def current(self) -> str:
        """The path of the module that runs, or "" for the model itself and for autograd."""
        return self._active[-1]

    @contextmanager
    def followed_forward(self, model: nn.Module) -> Iterator[None]:
        """Follow a forward of the model within the context."""
        names = {module: name for name, module in model.named_modules()}
        self._active = [""]
        self._first_numbers, self._paths = [], []
        self._note_path()

        def enter(module: nn.Module, args: object) -> None:
            self._active.append(names.get(module, ""))
            self._note_path()

        def leave(module: nn.Module, args: object, output: object) -> None:
            if len(self._active) > 1:
                self._active.pop()
                self._note_path()

        handles: list[Any] = []
        for module in names:
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def follow_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Follow the backward of these outputs of the last forward."""
        self._active = [""]
        nodes: list[Any] = [output.grad_fn for output in outputs]
        seen: set[Any] = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            node.register_prehook(partial(self._enter_node, self._path_of(node._sequence_nr())))
            node.register_hook(self._leave_node)
            nodes += [following for following, _ in node.next_functions]

    def _enter_node(self, path: str, gradients: object) -> None:
        self._active.append(path)

    def _leave_node(self, gradients: object, results: object) -> None:
        self._active.pop()

    def _path_of(self, number: int) -> str:
        return self._paths[bisect_right(self._first_numbers, number) - 1]

    def _note_path(self) -> None:
        self._first_numbers.append(torch.autograd._get_sequence_nr())
        self._paths.append(self._active[-1])
