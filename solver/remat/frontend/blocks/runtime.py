"""Running a step block by block: planned blocks run their programs, other code is eager.

A block's saved tensors that are offloaded start to leave where its forward ends. They have left
where the forward of the next block ends, and start to come back where the backward of the block
before it in the backward starts. If calls come in another order than planned, tensors come back
where they are needed, and the step waits for them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.blockwise.block_step import AS_IT_IS, CHECKPOINTED
from remat.errors import TraceError
from remat.frontend.blocks.module_state import (
    layer_checkpointing_disabled,
    patched_forwards,
    run_checkpointed,
)
from remat.frontend.capture.model.attribute_guards import AttributeGuards, BoundGuards
from remat.frontend.capture.model.wrapped_code import checkpointing_disabled
from remat.frontend.common.pytree import tensors_in
from remat.frontend.common.step_outputs import drop_model_outputs
from remat.frontend.runtime.dispatch import is_in_function_transform
from remat.frontend.runtime.guards import CallSignature, ModelCall, ModelTracker, call_signature
from remat.frontend.runtime.lower import LoweredProgram
from remat.frontend.runtime.module import BoundProgram
from remat.frontend.runtime.offload import arrive, offload, release, reload
from remat.plan import Plan


@dataclass(frozen=True, slots=True)
class PlannedHostCopies:
    """The host copies of a call: the positions of the saved tensors that it offloads, and the
    number of the call whose tensors start to come back where its backward starts, or None."""

    positions: tuple[int, ...] = ()
    reloads: int | None = None


class _LeavingTensor(NamedTuple):
    """A tensor that is copied to the host, its version when that started, and its handle."""

    tensor: torch.Tensor
    version: int
    handle: torch.Tensor


class StepHostCopies:
    """The copies of one step to the host and back, by the numbers of its block calls.

    Once a tensor has left, only the graph has a reference to its handle: without the graph, the
    copy is of no use.
    """

    def __init__(self, planned: Mapping[int, PlannedHostCopies]) -> None:
        self._planned = planned
        self._offloading: dict[int, list[_LeavingTensor]] = {}
        self._handles: dict[int, dict[int, weakref.ref[torch.Tensor]]] = {}
        self._arriving: dict[int, dict[int, torch.Tensor]] = {}
        self._overwritten: set[int] = set()

    def of_call(self, call: int) -> CallHostCopies | None:
        """Return the copies of call number `call`; None if it neither offloads nor starts a
        reload."""
        return CallHostCopies(self, call) if call in self._planned else None

    def start_offload(self, call: int, saved: list[torch.Tensor]) -> None:
        """Start to copy the tensors that a call offloads to the host, and put handles in their
        positions in `saved`. A tensor that is a part of a larger storage stays."""
        for position in self._planned[call].positions:
            tensor = saved[position]
            if not _fills_its_storage(tensor):
                continue
            handle = offload(tensor.detach())
            saved[position] = handle
            offloading = _LeavingTensor(tensor.detach(), tensor._version, handle)
            self._offloading.setdefault(call, []).append(offloading)
            self._handles.setdefault(call, {})[position] = weakref.ref(handle)

    def end_forward(self, call: int | None = None) -> None:
        """Wait until the tensors of all calls but `call` have left, and free them."""
        for other in [number for number in self._offloading if number != call]:
            self._release(other)

    def _release(self, call: int) -> None:
        for offloading in self._offloading.pop(call, ()):
            release(offloading.handle, offloading.tensor)
            if offloading.tensor._version != offloading.version:
                self._overwritten.add(call)

    def restore(self, call: int, saved: list[torch.Tensor]) -> None:
        """Put tensors in the positions of a call's handles in `saved`, and start to reload the
        tensors of the call whose backward is next. Free tensors that were reloaded for other calls:
        their backward did not come. Raises RuntimeError if a tensor was written into while it
        left."""
        arriving = self._arriving.pop(call, {})
        self._arriving.clear()
        self._release(call)
        if call in self._overwritten:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: an input of a block that was being copied to the host"
            )
        if not arriving:
            arriving = {
                position: reload(saved[position]) for position in self._handles.get(call, ())
            }
        for position in arriving:  # the slots are free once their tensors are here
            saved[position] = arriving[position]
        self._start_reload(self._planned[call].reloads)
        for tensor in arriving.values():
            arrive(tensor)

    def reload_before_backward(self, call: int, result: object) -> None:
        """Let the backward of a call that runs without a program start the reload that is planned
        there, if any: it starts with the first gradient of the call's `result`."""
        planned = self._planned.get(call)
        if planned is None or planned.reloads is None:
            return
        reloads = planned.reloads

        def start(_: torch.Tensor) -> None:
            if reloads not in self._arriving:
                self._arriving.clear()
                self._start_reload(reloads)

        for tensor in tensors_in(result):
            if tensor.requires_grad:
                tensor.register_hook(start)

    def _start_reload(self, call: int | None) -> None:
        if call is None:
            return
        self._release(call)
        handles = {position: ref() for position, ref in self._handles.get(call, {}).items()}
        if all(handle is not None for handle in handles.values()):  # else its backward has run
            self._arriving[call] = {p: reload(h) for p, h in handles.items() if h is not None}

    def abandon(self) -> None:
        """Free the tensors that are offloading, after an error in the forward."""
        self._offloading.clear()


@dataclass(frozen=True, slots=True)
class CallHostCopies:
    """The copies of one call of a step: see `SavedTensorCopies`."""

    step: StepHostCopies
    call: int

    def start_offload(self, saved: list[torch.Tensor]) -> None:
        """Start the call's copies to the host, and put handles in the tensors' positions in
        `saved`."""
        self.step.start_offload(self.call, saved)

    def restore(self, saved: list[torch.Tensor]) -> None:
        """Put tensors in the positions of the call's handles in `saved`."""
        self.step.restore(self.call, saved)


def _fills_its_storage(tensor: torch.Tensor | None) -> bool:
    """True for a plain tensor that fills its storage."""
    return (
        type(tensor) is torch.Tensor
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and torch.ops.aten.is_non_overlapping_and_dense(tensor)
    )


logger = logging.getLogger("remat")


@dataclass(frozen=True)
class PlannedCall:
    """A block call as it is to run: by its program `lowered`, or else by the option `how` ("as it
    is" or "checkpointed").

    `path` is the block's module path, and `signature` the inputs that the program is for.
    `may_recompute` is False if a second run of the block would compute something else.
    `changes_values` is True if the block changes Python values. `copies` are the copies of the
    program's saved tensors to the host and back. `guards` are the Python values of the block that
    the program is for.
    """

    path: str
    how: str
    signature: CallSignature | None = None
    lowered: LoweredProgram | None = None
    plan: Plan | None = None
    may_recompute: bool = True
    changes_values: bool = True
    copies: PlannedHostCopies | None = None
    guards: AttributeGuards = field(default_factory=AttributeGuards)


class BoundBlocks:
    """The planned block calls of a step, bound to a model.

    `training` is True if the step was planned in training mode. If `returned` is not None, the step
    returns only the outputs that it selects, as the option `differentiate` does, and numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[PlannedCall],
        training: bool,
        returned: str | Sequence[str] | None = None,
    ) -> None:
        self.training = training
        self._returned = returned
        self._model = model
        self._blocks: dict[nn.Module, _BoundBlock] = {}
        for number, call in enumerate(calls):
            module = model.get_submodule(call.path)
            block = self._blocks.setdefault(module, _BoundBlock(call.path, module))
            block.add_call(number, call)
        self._copies = {n: call.copies for n, call in enumerate(calls) if call.copies is not None}
        planned_paths = {call.path for call in calls}
        for call in calls:
            if call.lowered is not None:
                for path, module in _sibling_blocks(model, call.path):
                    # Blocks inside of it have plans of their own.
                    if not any(planned.startswith(f"{path}.") for planned in planned_paths):
                        self._blocks.setdefault(module, _BoundBlock(path, module))

    def run(self, call: ModelCall, original_forward: Callable[..., Any]) -> Any:
        """Run one call of the model with the planned forwards of its blocks."""
        copies = StepHostCopies(self._copies)
        forwards = {module: block.step_forward(copies) for module, block in self._blocks.items()}
        try:
            with (
                layer_checkpointing_disabled(self._model),
                checkpointing_disabled(),
                patched_forwards(forwards),
            ):
                output = original_forward(*call.args, **call.kwargs)
            copies.end_forward()
        finally:
            copies.abandon()
        return output if self._returned is None else drop_model_outputs(output, self._returned)


class StepWithoutBlocks:
    """A step in which none of the `modules` has a backward: the model's own forward runs.

    `is_outdated` is True once a call of a module has a backward, as after a change of an attribute.
    """

    def __init__(self, modules: Sequence[nn.Module], training: bool) -> None:
        self.training = training
        self.is_outdated = False
        self._modules = modules

    def run(self, call: ModelCall, original_forward: Callable[..., Any]) -> Any:
        """Run one call of the model without a plan."""
        with patched_forwards({module: self._observed(module) for module in self._modules}):
            return original_forward(*call.args, **call.kwargs)

    def _observed(self, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def observed_forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not self.is_outdated:
                tensors = (*module.parameters(), *tensors_in((args, kwargs)))
                self.is_outdated = any(t.requires_grad for t in tensors)
            return forward(*args, **kwargs)

        return observed_forward


def _sibling_blocks(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the paths and modules of the class of the block at `path` in its container, the block
    included; none outside of a container. Other steps may call them, too."""
    container_path, _, _ = path.rpartition(".")
    container, block = model.get_submodule(container_path), model.get_submodule(path)
    if isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        for name, child in container.named_children():
            if type(child) is type(block):
                yield f"{container_path}.{name}" if container_path else name, child


class _BoundBlock:
    """A block of the model with its planned calls, in the order of the forward."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path = path
        self._module = module
        self._tracker = ModelTracker(module)
        self._calls: list[PlannedCall] = []
        self._guards: dict[AttributeGuards, BoundGuards] = {}
        self._numbers: list[int] = []
        self._programs: dict[int, BoundProgram] = {}
        self._has_reported = False

    def add_call(self, number: int, call: PlannedCall) -> None:
        """Append the next planned call of this block in a step, in which it has this number."""
        self._calls.append(call)
        self._numbers.append(number)
        if call.guards not in self._guards:
            self._guards[call.guards] = call.guards.bind(self._module)

    def _bound_program(self, index: int, call: PlannedCall) -> BoundProgram:
        """Return the program of a call, bound to the block's parameters. It is bound at the call
        because FSDP2 gathers the parameters only just before, possibly in another dtype."""
        if index not in self._programs:
            assert call.lowered is not None
            self._programs[index] = BoundProgram(call.lowered, self._module, call.plan)
        return self._programs[index]

    def step_forward(self, copies: StepHostCopies) -> Callable[..., Any]:
        """Return the block's forward for one step, which follows the planned calls in order."""
        calls = enumerate(self._calls)
        original_forward = self._module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or is_in_function_transform():
                return original_forward(*args, **kwargs)
            index, planned = next(calls, (0, None))
            if planned is None:
                result = self._run_eagerly(None, original_forward, args, kwargs)
                copies.end_forward()
                return result
            number = self._numbers[index]
            call = None
            if planned.lowered is not None:
                call = self._matching_call(planned, args, kwargs)
            if call is not None:
                program = self._bound_program(index, planned)
                result = program(call, copies.of_call(number))
            else:
                result = self._run_eagerly(planned, original_forward, args, kwargs)
                copies.reload_before_backward(number, result)
            copies.end_forward(number)
            return result

        return forward

    def _run_eagerly(
        self,
        planned: PlannedCall | None,
        original_forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call without a program: as it is if that is planned or the block must not run
        twice, else checkpointed. `planned` is None for a call that the plan does not have."""
        if planned is not None and planned.how == AS_IT_IS:
            return original_forward(*args, **kwargs)
        if planned is None or planned.how != CHECKPOINTED:
            self._report_once()
        if not all(call.may_recompute for call in self._calls):
            return original_forward(*args, **kwargs)
        changes_values = not self._calls or any(call.changes_values for call in self._calls)
        return run_checkpointed(
            self._module, original_forward, args, kwargs, changes_values=changes_values
        )

    def _matching_call(
        self, planned: PlannedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ModelCall | None:
        """Return the call if it has the planned signature and the guards hold, else None."""
        try:
            call = ModelCall.of(args, dict(kwargs), "the arguments ")
        except TraceError:
            return None
        if self._tracker.refresh():
            self._programs.clear()
            self._guards = {guards: guards.bind(self._module) for guards in self._guards}
        signature = call_signature(self._tracker, call.structure, call.leaves)
        assert planned.signature is not None
        if planned.signature.accumulates_gradients:  # without gradients, such a program also runs
            signature = signature._replace(accumulates_gradients=True)
        is_as_planned = signature == planned.signature and self._guards[planned.guards].hold()
        return call if is_as_planned else None

    def _report_once(self) -> None:
        if not self._has_reported:
            self._has_reported = True
            logger.info(
                "%s is called differently than when the step was planned, with the same inputs of "
                "the model: such calls run without a plan, and the peak may differ from the plan's",
                self._path,
            )
