"""`StepDispatcher`: decides at each call of a model if the planned step or its own forward runs.

Calls inside of a torch.func transform or a capture run the model's own forward. `CallsInFlight`
counts the calls whose backward has not started: the saved tensors of each are in memory meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from remat.errors import InfeasibleBudget, RematError, TraceError, one_line
from remat.frontend.capture.attempts import is_raised_by_model
from remat.frontend.common.pytree import tensors_in
from remat.frontend.runtime.autograd_function import exclude_from_compile
from remat.frontend.runtime.guards import ModelCall, ModelTracker

CAPTURED = "is captured by torch.jit, torch.export, torch.fx or torch.compile"
"""The reason for a call inside of a capture."""


def unplanned_reason(tensors: Sequence[torch.Tensor]) -> str:
    """Return the reason why a call with these input tensors is not planned, as text that follows
    the model's name; "" for a call that can be planned."""
    if is_in_function_transform():
        return "runs inside a transform of torch.func, which a plan does not support"
    is_traced = (
        torch._C._get_tracing_state() is not None  # of torch.jit.trace
        or torch.compiler.is_exporting()
        or get_proxy_mode() is not None
    )
    if is_traced or any(map(_is_traced_tensor, tensors)):
        return CAPTURED
    return ""


def is_in_function_transform() -> bool:
    """True inside of a transform of torch.func, such as `grad`, `jvp` or `vmap`."""
    return torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined]


def has_lazy_parameters(model: nn.Module) -> bool:
    """True if the first call of the model will initialize parameters or buffers."""
    lazy = UninitializedParameter, UninitializedBuffer
    return any(isinstance(t, lazy) for t in (*model.parameters(), *model.buffers()))


def _is_traced_tensor(tensor: torch.Tensor) -> bool:
    """True if a tensor is a fake or functional one, as in a capture."""
    return isinstance(tensor, FakeTensor) or torch._is_functional_tensor(tensor)


class CallsInFlight:
    """Counts of one model's calls in flight. `pending` is their number now.

    `most` is the largest number of calls whose backward ran without another call between. A call
    without a backward counts in it if two backward passes in a row start with the same `pending`:
    then each step has it. A program that never releases such calls has more in each step, and no
    plan has room for them.
    """

    def __init__(self) -> None:
        self.pending = 0
        self.most = 0
        self.ended_in_a_row = 0
        """The number of calls whose backward has started since the last call."""
        self._pending_at_backward = 0
        """`pending` when the latest backward started."""

    def add(self, outputs: Any) -> None:
        """Count a call with these outputs, until its backward starts or its autograd graph is
        freed. Calls without a gradient and calls inside of saved-tensor hooks do not count:
        `torch.utils.checkpoint` recomputes its saved tensors, `save_on_cpu` moves them."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # type: ignore[attr-defined]
            return
        nodes = {t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None}
        if nodes:
            call = _CallInFlight(self)
            for node in nodes:
                node.register_prehook(call.end)

    def note_end(self) -> None:
        """Count the start of the backward of a call, which is still in `pending`."""
        self.ended_in_a_row += 1
        self.most = max(self.most, self.ended_in_a_row)
        if self.ended_in_a_row == 1:
            if self.pending == self._pending_at_backward:
                self.most = max(self.most, self.pending)
            self._pending_at_backward = self.pending


class _CallInFlight:
    """A call in flight. Only hooks of its outputs' autograd nodes refer to it."""

    def __init__(self, calls: CallsInFlight) -> None:
        self._calls = calls
        self._is_pending = True
        calls.pending += 1
        calls.ended_in_a_row = 0

    def end(self, gradients: object) -> None:
        """End the call, because its backward starts. A hook: `gradients` are not used."""
        if self._is_pending:
            self._calls.note_end()
            self._remove_from_pending()

    def __del__(self) -> None:
        self._remove_from_pending()

    def _remove_from_pending(self) -> None:
        """Count the call as not pending, once."""
        if self._is_pending:
            self._is_pending = False
            self._calls.pending -= 1


logger = logging.getLogger("remat")


class PlannedStep(Protocol):
    """A planned training step of a model: of the whole model, or of its blocks."""

    @property
    def training(self) -> bool:
        """True if the step was planned with the model in training mode."""
        ...

    def run(self, call: ModelCall, original_forward: Callable[..., Any]) -> Any:
        """Return the outputs of one call; a plan of blocks runs its blocks in
        `original_forward`."""
        ...


class StepProvider(Protocol):
    """Provides the planned step for each call of a module: a planner, or one fixed program."""

    timings_s: dict[str, float]

    def step_for(self, tracker: ModelTracker, call: ModelCall) -> PlannedStep:
        """Return the planned step for a call of the tracked model."""
        ...

    def current_step(self) -> PlannedStep | None:
        """Return the step that ran or was planned last, None before the first."""
        ...

    def note_call(self, outputs: Any) -> None:
        """Note a call of the model that returned these outputs."""
        ...

    def copy_for(self, model: nn.Module) -> StepProvider:
        """Return a provider of the same plans for a copy of the model."""
        ...

    def rebind(self, model: nn.Module) -> None:
        """Bind the plans to the model's current submodules, after some were replaced."""
        ...


class StepDispatcher:
    """Decides at each call of a model whether the planned step or its original forward runs.

    `original_forward` is the model's `forward` unless it is passed.
    """

    def __init__(
        self,
        model: nn.Module,
        provider: StepProvider,
        original_forward: Callable[..., Any] | None = None,
    ) -> None:
        self.model = model
        self.provider = provider
        self._original_forward = original_forward
        self._tracker: ModelTracker | None = None
        if provider.current_step() is not None:  # it is bound to the model as it is now
            self._tracker = ModelTracker(model, sees_replaced_methods=True)
        self._reported: set[str] = set()
        # Planning, and plans of blocks, replace methods of the model's modules for a while.
        self._lock = threading.RLock()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of one call of the model, by the planned step or its own forward. The
        model's own hooks do not run."""
        if not torch.is_grad_enabled():  # torch.compile compiles this
            return self._run_original(*args, **kwargs)
        return self._run_with_grad(args, kwargs)

    @exclude_from_compile
    def _run_with_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of a call with gradients enabled. One thread runs at a time."""
        with self._lock:
            return self._run_planned(args, kwargs)

    def _run_planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of the planned step; of the original forward, with a log message, if
        the call cannot be planned."""
        if self._tracker is None:
            if has_lazy_parameters(self.model):
                self._log_unplanned_once(
                    "has lazy modules, which this call initializes: it runs without a plan, and "
                    "the next call is planned",
                    logging.INFO,
                )
                return self._run_original(*args, **kwargs)
            self._tracker = ModelTracker(self.model, sees_replaced_methods=True)
        step = call = None
        level = logging.WARNING
        reason = unplanned_reason(tensors_in((args, kwargs)))
        if reason == CAPTURED:
            level = logging.INFO
        if not reason:
            try:
                call = ModelCall.of(args, kwargs, "the arguments ")
                step = self._step_for(self._tracker, call)
            except (TraceError, InfeasibleBudget) as error:
                if is_raised_by_model(error):
                    self._run_original(*args, **kwargs)  # raises the exception of the model's code
                if self.model.training:
                    raise
                reason = f"is in evaluation mode, and cannot be planned ({one_line(error)})"
            except RematError:
                raise
            except Exception:
                self._run_original(*args, **kwargs)  # raises the error, if it is the model's own
                raise
        if reason:
            self._log_unplanned_once(
                f"{reason}: such calls run the model's own forward without a plan", level
            )
        if step is None or call is None:
            return self._run_original(*args, **kwargs)
        outputs = step.run(call, self._run_original)
        self.provider.note_call(outputs)
        return outputs

    def _step_for(self, tracker: ModelTracker, call: ModelCall) -> PlannedStep | None:
        """Return the planned step for a call; None if no parameter or input requires a gradient."""
        if tracker.refresh():
            self.provider.rebind(self.model)
        if not tracker.has_trainable_parameters and not any(t.requires_grad for t in call.leaves):
            return None
        return self.provider.step_for(tracker, call)

    def _log_unplanned_once(self, reason: str, level: int) -> None:
        """Log the reason why a call runs without a plan, unless it was logged before."""
        if reason not in self._reported:
            self._reported.add(reason)
            logger.log(level, "this %s %s", type(self.model).__name__, reason)

    def _run_original(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the model's original forward."""
        return (self._original_forward or self.model.forward)(*args, **kwargs)
