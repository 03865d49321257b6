"""Checks of a captured forward: the number of its operations, and what a planned step would not
repeat, which is to print and to draw random numbers other than torch's.

A loop over tokens or time steps in Python code gives hundreds of thousands of operations. Their
capture takes minutes, and no plan of so many is found in reasonable time. So the capture ends with
an error as soon as the forward has called too many.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from remat.errors import TraceError
from remat.frontend.capture.model.preserved_state import rng_state_preserved
from remat.frontend.capture.model.reached_code import is_user_module
from remat.frontend.common.code_origin import frame_line, is_framework_code
from remat.frontend.common.torch_modes import attributes_set

log = logging.getLogger("remat")

MAX_CALLS = 30_000
"""Tensor functions that one forward may call. The training step has three to four times as many
operations. GPT-2 with 96 layers calls about 3,000."""

_SAMPLED_CALLS = 1_000
"""The last calls before the limit, whose lines of code are counted: one loop has most of them."""


class CallLimit(TorchFunctionMode):
    """A mode for the forward of a model, which raises `TraceError` once it has called more than
    `MAX_CALLS` functions that return tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model_name = type(model).__name__
        self._calls = 0
        self._lines: Counter[str] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._calls += 1
            if self._calls > MAX_CALLS - _SAMPLED_CALLS:
                self._lines[_innermost_model_line(sys._getframe(1))] += 1
            if self._calls > MAX_CALLS:
                raise self._error()
        return result

    def _error(self) -> TraceError:
        line, _ = self._lines.most_common(1)[0]
        return TraceError(
            f"{self._model_name} calls more than {MAX_CALLS:,} operations in one forward, most of "
            f"them by then at {line}: a loop in Python code, as over tokens or time steps, gives "
            "a graph that is too large to plan as a whole. Use a model whose code calls one "
            "operation for the loop (install the kernel that it uses on a GPU), or shorter "
            'sequences; or plan block by block with remat.enable(model, budget, scope="blocks")'
        )


def _innermost_model_line(frame: FrameType | None) -> str:
    """Return the innermost line, from `frame` outwards, that is the model's code; "an unknown line"
    if none is."""
    frames = (f for f, _ in traceback.walk_stack(frame))
    of_model = (f for f in frames if not is_framework_code(Path(f.f_code.co_filename)))
    return next(map(frame_line, of_model), "an unknown line")


_STATE_FUNCTIONS = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")

_RNG_FUNCTIONS: list[tuple[Any, str]] = [
    *itertools.product((torch, torch.random, torch.cuda, torch.cuda.random), _STATE_FUNCTIONS),
    *itertools.product(
        (torch.cuda, torch.cuda.random),
        ("manual_seed_all", "seed_all", "get_rng_state_all", "set_rng_state_all"),
    ),
    (random, "setstate"),
    (np.random, "set_state"),
]
"""Functions that seed generators, or read or set their states. Python's and NumPy's generators are
also compared at the end of a capture, which does not notice a state that the model restores."""


@contextmanager
def rng_changes_forbidden(model: nn.Module) -> Iterator[None]:
    """Raise `TraceError` if the model's code uses random numbers of Python or NumPy within the
    context, or calls one of `_RNG_FUNCTIONS`: a plan would do it once instead of in each step. The
    generators of Python and NumPy are restored."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    thread = threading.get_ident()

    def refusing(module: Any, name: str) -> tuple[Any, str, Callable[..., Any]]:
        original = getattr(module, name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            caller = Path(sys._getframe(1).f_code.co_filename)
            if threading.get_ident() != thread or is_framework_code(caller):
                return original(*args, **kwargs)
            raise TraceError(rng_error(model, f"calls {module.__name__}.{name}"))

        return module, name, refuse

    use = ""
    try:
        with attributes_set(*(refusing(module, name) for module, name in _RNG_FUNCTIONS)):
            yield
        if random.getstate() != python_state:
            use = "draws Python's random numbers"
        if not all(map(np.array_equal, np.random.get_state(), numpy_state)):
            use = "draws NumPy's random numbers"
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    if use:
        raise TraceError(rng_error(model, use))


def rng_error(model: nn.Module, use: str) -> str:
    """Return the error message for a forward that uses random numbers other than torch's. `use` is
    its predicate: "draws NumPy's random numbers"."""
    return (
        f"the forward of {type(model).__name__} {use}, which a plan would do once for all steps. "
        "Remedy: do so outside of the model, and pass the result as an argument; or use torch.rand "
        'and torch.where; or plan the blocks inside: remat.enable(model, budget, scope="blocks")'
    )


class GeneratorWatch:
    """Notices that the model's code seeds torch's default generators or sets their states.

    A capture samples no random numbers, so the generators have the seed that this object has set.
    Each random operation gives them another one: then a state from before the operation has another
    seed than the one from after it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._generators = (torch.default_generator, *torch.cuda.default_generators)
        self._set_seed()

    def note_random_operation(self) -> None:
        """Give the generators another seed. Raises `TraceError` as `check` does."""
        self.check()
        self._set_seed()

    def check(self) -> None:
        """Raise `TraceError` if the model's code has changed a state."""
        if any(generator.initial_seed() != self._seed for generator in self._generators):
            use = "seeds a default generator of torch, or restores its state"
            raise TraceError(rng_error(self._model, use))

    def _set_seed(self) -> None:
        self._seed = int.from_bytes(os.urandom(7), "little")
        for generator in self._generators:
            generator.manual_seed(self._seed)


@contextmanager
def generator_changes_forbidden(model: nn.Module) -> Iterator[GeneratorWatch]:
    """Raise `TraceError` if the model's code changes the state of a default generator of torch
    within the context: by `torch.random.fork_rng`, or by methods of the generator. Yield the object
    to be notified of random operations. The states are restored at the end."""
    with rng_state_preserved():
        watch = GeneratorWatch(model)
        yield watch
        watch.check()


_reported_lines: set[str] = set()
"""Lines of code whose output was reported. Each capture runs them, and one warning is enough."""


class _ObservedStream:
    """A stream that calls `note` before each write."""

    def __init__(self, stream: Any, note: Any) -> None:
        self._stream = stream
        self._note = note

    def write(self, text: str) -> Any:
        self._note("prints")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def text_output_reported(model: nn.Module) -> Iterator[None]:
    """Log a warning at the end of the context for each line of the user's code that prints or logs
    in it, once per process: a plan does not run this code. Libraries are left out, because most of
    their messages appear once."""
    thread = threading.get_ident()
    lines: dict[str, str] = {}

    def note(action: str) -> None:
        if threading.get_ident() == thread and (line := _line_of_user_output(sys._getframe(2))):
            lines.setdefault(line, action)

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        note("logs")
        original_handle(logger, record)

    original_handle = logging.Logger.handle
    streams = sys.stdout, sys.stderr
    observed = tuple(_ObservedStream(stream, note) if stream else stream for stream in streams)
    logging.Logger.handle = handle  # type: ignore[method-assign]
    sys.stdout, sys.stderr = observed
    try:
        yield
    finally:
        logging.Logger.handle = original_handle  # type: ignore[method-assign]
        if sys.stdout is observed[0]:
            sys.stdout = streams[0]
        if sys.stderr is observed[1]:
            sys.stderr = streams[1]
    for line, action in lines.items():
        if line not in _reported_lines:
            _reported_lines.add(line)
            log.warning(
                "the forward of %s %s a text at %s: planning runs this code, and planned steps do "
                "not. Remedy: put it outside of the forward or, with "
                'scope="blocks", into the code around the blocks',
                type(model).__name__,
                action,
                line,
            )


def _line_of_user_output(frame: FrameType | None) -> str:
    """Return the line of the user's code that calls functions of Python, such as `print` or those
    of `logging`; "" if the caller is a package."""
    while frame is not None and _package_of_frame(frame) in sys.stdlib_module_names - {"__main__"}:
        frame = frame.f_back
    if frame is None or not is_user_module(frame.f_globals):
        return ""
    return frame_line(frame)


def _package_of_frame(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]
