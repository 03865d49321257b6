"""A step with each of its blocks as it was planned; what is outside of them runs as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.blockwise.plan import AS_IT_IS, CHECKPOINTED
from remat.errors import TraceError
from remat.frontend.blocks.module_state import checkpointed
from remat.frontend.blocks.patching import checkpointing_off, replaced
from remat.frontend.capture.model.checkpoints import checkpointing_disabled
from remat.frontend.runtime.guards import Call, Signature, Watch, signature
from remat.frontend.runtime.lower import Compiled
from remat.frontend.runtime.module import Ready
from remat.plan import Plan

logger = logging.getLogger("remat")


@dataclass(frozen=True)
class PlannedCall:
    """One call of the block at `path`: by its program, or (without one) `how` says. One that may
    not run again would do something else then."""

    path: str
    how: str
    key: Signature | None = None
    compiled: Compiled | None = None
    plan: Plan | None = None
    may_run_again: bool = True


class ReadyBlocks:
    """The calls bound to a model. `training` is whether they were planned in training mode."""

    def __init__(self, model: nn.Module, calls: Sequence[PlannedCall], training: bool) -> None:
        self.training = training
        self._model = model
        self._blocks: dict[nn.Module, _Block] = {}
        for call in calls:
            module = model.get_submodule(call.path)
            block = self._blocks.setdefault(module, _Block(call.path, module))
            block.add(call)
        for call in calls:
            if call.compiled is not None:
                for path, module in _siblings(model, call.path):
                    self._blocks.setdefault(module, _Block(path, module))

    def run(self, call: Call, own: Callable[..., Any]) -> Any:
        """One call of the model."""
        forwards = {module: block.begun() for module, block in self._blocks.items()}
        with checkpointing_off(self._model), checkpointing_disabled(), replaced(forwards):
            return own(*call.args, **call.kwargs)


def _siblings(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The blocks in the same list, of the same class: other steps may call those, too."""
    outer, _, _ = path.rpartition(".")
    parent, own = model.get_submodule(outer), model.get_submodule(path)
    if isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        for name, child in parent.named_children():
            if type(child) is type(own):
                yield f"{outer}.{name}" if outer else name, child


class _Block:
    def __init__(self, path: str, module: nn.Module) -> None:
        self._path = path
        self._module = module
        self._watch = Watch(module)
        self._calls: list[PlannedCall] = []
        self._ready: dict[int, Ready] = {}
        self._told = False

    def add(self, call: PlannedCall) -> None:
        """The next of its calls in a step."""
        self._calls.append(call)

    def _bound(self, number: int, call: PlannedCall) -> Ready:
        """What runs as it. Made at the call: FSDP2 gathers the block's parameters just before, in
        another type maybe."""
        if number not in self._ready:
            assert call.compiled is not None
            self._ready[number] = Ready(call.compiled, self._module, call.plan)
        return self._ready[number]

    def begun(self) -> Callable[..., Any]:
        """Its forward, for one step."""
        calls = enumerate(self._calls)
        own = self._module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return own(*args, **kwargs)
            number, planned = next(calls, (0, None))
            if planned is not None and planned.how == AS_IT_IS:
                return own(*args, **kwargs)
            if planned is not None and planned.compiled is not None:
                found = self._fitting(planned, args, kwargs)
                if found is not None:
                    return self._bound(number, planned)(found.leaves)
            if planned is None or planned.how != CHECKPOINTED:
                self._tell()
            if not all(each.may_run_again for each in self._calls):
                return own(*args, **kwargs)
            return checkpointed(self._module, own, args, kwargs)

        return forward

    def _fitting(
        self, planned: PlannedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Call | None:
        """The call, if it is as it was planned."""
        try:
            call = Call.of(args, dict(kwargs), "the arguments ")
        except TraceError:
            return None
        if self._watch.look():
            self._ready.clear()
        return call if signature(self._watch, call.structure, call.leaves) == planned.key else None

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "%s is called otherwise than when the step was planned, with the same inputs of the"
                " model: such calls are not planned, and the peak may be another one",
                self._path,
            )
