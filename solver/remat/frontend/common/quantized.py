"""Tensors of quantized weights that are no parameters and no buffers.

bitsandbytes stores the scales of a weight in 4 bits in a `QuantState`, an attribute of the
parameter, and a weight in 8 bits with its scales in the `MatmulLtState` of its layer. A step reads
them like buffers: a capture takes each as a buffer with the path of its attribute, such as
"q_proj.weight.quant_state.absmax". The parts of a tensor of torchao are
attributes of the parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

ATTRIBUTES = "_remat_attributes"
"""Name of the attribute of a fake parameter that stores the `__dict__` of the real parameter."""


def parameter_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that libraries and the model's code have set of a parameter; of the
    fake tensor in its place, the parameter's."""
    return vars(parameter).get(ATTRIBUTES, vars(parameter))


def is_quantized_subclass(tensor: torch.Tensor) -> bool:
    """True for a frozen tensor that consists of others, as torchao's do; False for torch's
    subclasses, such as DTensor."""
    return (
        is_traceable_wrapper_subclass(tensor)
        and not tensor.requires_grad
        and type(tensor).__module__.partition(".")[0] != "torch"
    )


class QuantizationState(NamedTuple):
    """An object with tensors of a quantized weight, and its path in the model."""

    path: str
    owner: Any

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the object, by name: a change of the dictionary changes them."""
        return vars(self.owner)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the attributes that are tensors, by name; of a tensor of torchao, its parts."""
        if isinstance(self.owner, torch.Tensor):
            names, _ = self.owner.__tensor_flatten__()  # type: ignore[attr-defined]
            return {name: getattr(self.owner, name) for name in names}
        return {k: v for k, v in self.attributes.items() if isinstance(v, torch.Tensor)}


def quantization_states(model: nn.Module) -> Iterator[QuantizationState]:
    """Yield the objects with tensors of a model's quantized weights. A layer of bitsandbytes in 8
    bits that has not run yet gets its state, as in its first call."""
    for name, parameter in model.named_parameters():
        if is_quantized_subclass(parameter):
            yield QuantizationState(name, parameter)
        state, path = parameter_attributes(parameter).get("quant_state"), f"{name}.quant_state"
        while state is not None:
            yield QuantizationState(path, state)
            state, path = state.state2, f"{path}.state2"
    for name, module in model.named_modules():
        if is_8bit_layer(module):
            _initialise_8bit_layer(module)
            yield QuantizationState(f"{name}.state" if name else "state", module.state)


def quantization_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of quantized weights that are no parameters, by their paths."""
    parameters = set(map(memory_of, model.parameters()))
    return {
        f"{state.path}.{name}": tensor
        for state in quantization_states(model)
        for name, tensor in state.tensors().items()
        if memory_of(tensor) not in parameters
    }


def replace_quantization_tensors(
    model: nn.Module, replacements: Mapping[str, torch.Tensor]
) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """Replace the tensors of quantized weights by others, which `replacements` has by path.

    The weight of a layer in 8 bits is a parameter and an attribute: `replacements` has it once, by
    its name as a parameter. Returns the attributes of each object, with the previous tensors.
    """
    names = {memory_of(p): name for name, p in model.named_parameters()}
    previous = []
    for state in quantization_states(model):
        tensors = state.tensors()
        previous.append((state.attributes, tensors))
        for name, tensor in tensors.items():
            path = names.get(memory_of(tensor), f"{state.path}.{name}")
            state.attributes[name] = replacements[path]
    return previous


def memory_of(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    """Return a key that is equal for tensors with the same storage and shape."""
    return tensor.untyped_storage()._cdata, tensor.shape


QUANTIZED_NAMESPACE = "bitsandbytes"


def quantized_operators(model: nn.Module) -> frozenset[str]:
    """Return the namespace of bitsandbytes' operators if a model has quantized weights."""
    return frozenset({QUANTIZED_NAMESPACE} if any(quantization_states(model)) else ())


def is_8bit_layer(module: nn.Module) -> bool:
    """True for a linear layer of bitsandbytes in 8 bits."""
    return type(vars(module).get("state")).__name__ == "MatmulLtState"


def _initialise_8bit_layer(module: Any) -> None:
    """Move the weight of a layer in 8 bits to its state, as its next call does."""
    if getattr(module._parameters.get("weight"), "CB", None) is not None:
        module.init_8bit_state()


class QuantizationTable(NamedTuple):
    """The tensors of the quantized weight of a module, by the paths of their attributes."""

    module: nn.Module

    def get(self, path: str) -> torch.Tensor | None:
        """Return the tensor that is at a path now, since weights and their scales may be replaced;
        None without one."""
        _initialise_8bit_layer(self.module)
        try:
            tensor = attrgetter(path)(self.module)
        except AttributeError:
            return None
        return tensor if isinstance(tensor, torch.Tensor) else None


def find_quantization_table(model: nn.Module, path: str) -> tuple[QuantizationTable, str]:
    """Return the table of the module at the start of a path, and the rest of the path."""
    module, names = model, path.split(".")
    while (child := module._modules.get(names[0])) is not None and len(names) > 1:
        module = child
        del names[0]
    return QuantizationTable(module), ".".join(names)


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the data of a quantized parameter as an ordinary tensor; another one as it is."""
    if type(tensor).__module__.partition(".")[0] != "bitsandbytes":
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


@contextmanager
def int8_matmul_as_on_cuda() -> Iterator[None]:
    """Within the context, let layers of 8 bits compute as bitsandbytes does on CUDA: in integers,
    and without the columns of outliers, whose number depends on values. No-op without
    bitsandbytes."""
    library: Any = sys.modules.get("bitsandbytes")
    if library is None:
        yield
        return
    original = library.matmul

    def matmul(a: Any, b: Any, out: Any = None, state: Any = None, **options: Any) -> Any:
        threshold, state.threshold = state.threshold, 0.0
        try:
            bias = options.get("bias")
            return library.autograd._functions.MatMul8bitLt.apply(a, b, out, bias, state)
        finally:
            state.threshold = threshold

    library.matmul = matmul
    try:
        yield
    finally:
        library.matmul = original
