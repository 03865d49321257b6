"""One replaced operation: CPU first, then CUDA, then the results of the first into the second.

The CPU goes first because the CUDA operation may read the results (of `nonzero`, to allocate), and
advances the random generator. Arguments that it writes are cloned for the CPU, so that both start
from the same values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from scripts.software_gpu.numbers import precision
from scripts.software_gpu.numbers.allocations import allocation_of
from scripts.software_gpu.numbers.counterparts import counterpart_of
from scripts.software_gpu.numbers.cuda_graphs import Recording, active_recording
from scripts.software_gpu.numbers.host_memory import host_tensor, write
from scripts.software_gpu.numbers.operators import Operator
from scripts.software_gpu.numbers.random_numbers import PhiloxState, default_generator, state_of
from torch import Tensor

COMPUTED_AT_ONCE = frozenset({"convolution", "_convolution", "convolution_backward"})
"""Operations whose CUDA kernel is made of others that need not be computed, too."""

_thread = threading.local()


def _computes() -> bool:
    return not getattr(_thread, "computes_nothing", False)


@contextmanager
def nothing_computed() -> Iterator[None]:
    """Run CUDA operations of this thread without results, as the software GPU does alone."""
    before = not _computes()
    _thread.computes_nothing = True
    try:
        yield
    finally:
        _thread.computes_nothing = before


class MissingCounterpartError(NotImplementedError):
    """An operation on the software GPU whose results are not computed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"{name} has no right results on the software GPU: {reason}. Add a function to "
            "scripts/software_gpu/numbers/counterparts.py"
        )


class Replacement:
    """The kernel that is registered for an operation on CUDA, in place of torch's `original`."""

    def __init__(self, operator: Operator, original: Any) -> None:
        self.operator = operator
        self.original = original
        self.counterpart = counterpart_of(operator.name)
        self.allocate = allocation_of(operator.name)

    def __call__(self, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run the operation: `args` and `kwargs` are those of torch's dispatcher."""
        arguments = dict(zip(self.operator.names, args, strict=False)) | kwargs
        if not _computes():
            return self.call_cuda(keys, arguments)
        with torch._C.DisableTorchFunction():
            recording = active_recording()
            if recording is not None:
                return self.record(recording, keys, arguments)
            state = state_of(generator_of(arguments)) if self.operator.is_random else None
            computed, results = self.compute(arguments, state)
            if self.allocate is not None:
                actual = self.allocate(self.operator, arguments, results)
            else:
                actual = self.call_cuda(keys, arguments)
            return self.write_results(arguments, computed, actual, results)

    def record(
        self, recording: Recording, keys: torch._C.DispatchKeySet, arguments: dict[str, Any]
    ) -> Any:
        """Call torch's kernel, which a capture records, and have replays compute the results."""
        state = recording.sample(generator_of(arguments)) if self.operator.is_random else None
        actual = self.call_cuda(keys, arguments, are_parts_computed=False)
        saved = {name: _on_host(value, None) for name, value in arguments.items()}
        results = _on_host(actual, None)

        def compute() -> None:
            computed, values = self.compute(saved, state() if state is not None else None)
            self.write_results(saved, computed, results, values)

        recording.append(compute, [actual, [arguments.get(n) for n in self.operator.mutated]])
        return actual

    def call_cuda(
        self,
        keys: torch._C.DispatchKeySet,
        arguments: Mapping[str, Any],
        *,
        are_parts_computed: bool = True,
    ) -> Any:
        """Call torch's kernel for CUDA, with its checks and allocations. The operations that it is
        made of are computed, too: it may read their results."""
        is_whole = not are_parts_computed or self.operator.base_name in COMPUTED_AT_ONCE
        with nothing_computed() if is_whole else nullcontext():
            return self.original.call_boxed(keys, **self._with_tensors(arguments))

    def _with_tensors(
        self, arguments: Mapping[str, Any], *, is_host: bool = False
    ) -> dict[str, Any]:
        """Return the arguments, with numbers that stand for tensors as tensors: torch's binding to
        Python has unpacked them. Their dtypes give results the dtype that the numbers give, and on
        the host half-precision tensors multiply with a float32 number, as CUDA's kernels do."""
        result = dict(arguments)
        for name in self.operator.tensors:
            number = result.get(name)
            if isinstance(number, (bool, int, float, complex)):
                tensors = [v for v in result.values() if isinstance(v, Tensor)]
                dtype = torch.result_type(tensors[0], number) if tensors else None
                if is_host and dtype in precision.LOW_PRECISION:
                    dtype = torch.float32
                result[name] = torch.tensor(number, dtype=dtype)
        return result

    def compute(
        self, arguments: Mapping[str, Any], state: PhiloxState | None
    ) -> tuple[dict[str, Any], Any]:
        """Compute the operation on the host; return its arguments there, and its results."""
        clones: dict[int, Tensor] = {}
        host = {
            name: _on_host(value, clones if name in self.operator.mutated else None)
            for name, value in self._with_tensors(arguments, is_host=True).items()
            if name != "pin_memory"
        }
        if "device" in host:
            host["device"] = torch.device("cpu")
        if "generator" in self.operator.names and state is not None:
            host["generator"] = state.generator()
        if self.counterpart is None:
            return self._call_cpu(host, state)
        results = self.counterpart({**self.operator.defaults, **host}, state)
        outputs = results if isinstance(results, tuple) else (results,)
        host.update(zip(self.operator.outputs, outputs, strict=False))
        return host, results

    def _call_cpu(
        self, host: dict[str, Any], state: PhiloxState | None
    ) -> tuple[dict[str, Any], Any]:
        if not self.operator.has_cpu_kernel:
            raise MissingCounterpartError(self.operator.name, "it exists for CUDA only")
        if precision.is_computed_in_float32(self.operator):
            host = precision.in_float32(host)
        try:
            return host, self._seeded(host, state)
        except (RuntimeError, NotImplementedError) as error:
            if not precision.is_about_the_dtype(error) or not precision.has_low_precision(host):
                raise
            host = precision.in_float32(host)
            return host, self._seeded(host, state)

    def _seeded(self, host: Mapping[str, Any], state: PhiloxState | None) -> Any:
        function: Callable[..., Any] = self.operator.overload
        if state is None or "generator" in self.operator.names:
            return function(**host)
        with default_generator(state):
            return function(**host)

    def write_results(
        self, arguments: Mapping[str, Any], host: Mapping[str, Any], actual: Any, results: Any
    ) -> Any:
        """Write the host's results into those of the CUDA call, and return the latter."""
        for name in self.operator.mutated:
            self._write(arguments.get(name), host.get(name))
        returns = self.operator.overload._schema.returns
        if len(returns) == 1:
            return self._written(returns[0], actual, results)
        if not returns:
            return actual
        pairs = zip(returns, actual, results, strict=True)
        return tuple(self._written(*pair) for pair in pairs)

    def _written(self, declared: torch.Argument, actual: Any, results: Any) -> Any:
        if declared.alias_info is not None:  # an argument, which is written already
            return actual
        if isinstance(actual, (Tensor, list, tuple)):
            self._write(actual, results)
            return actual
        return actual if results is None else results

    def _write(self, actual: Any, results: Any) -> None:
        if results is None or actual is None:
            return
        if isinstance(actual, Tensor):
            if actual.numel() == 0:  # CUDA does not return it, as with some workspaces
                return
            if actual.size() != results.size():
                sizes = (
                    f"its sizes are {tuple(actual.size())} on CUDA, {tuple(results.size())} here"
                )
                raise MissingCounterpartError(self.operator.name, sizes)
            write(actual, results)
        elif isinstance(actual, (list, tuple)):
            for one, result in zip(actual, results, strict=True):
                self._write(one, result)


def _on_host(value: Any, clones: dict[int, Tensor] | None) -> Any:
    """Return an argument on the host; `clones` has the clones of written tensors by identity."""
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(one, clones) for one in value)
    if not isinstance(value, Tensor):
        return value
    if clones is None:
        return host_tensor(value)
    if id(value) not in clones:
        clones[id(value)] = _clone(host_tensor(value))
    return clones[id(value)]


def _clone(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, also where memory is not dense."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def generator_of(arguments: Mapping[str, Any]) -> torch.Generator:
    """Return the CUDA generator that an operation samples from."""
    if arguments.get("generator") is not None:
        return arguments["generator"]
    device = next(
        (v.device for v in arguments.values() if isinstance(v, Tensor) and v.is_cuda),
        arguments.get("device"),
    )
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    return torch.cuda.default_generators[index]
