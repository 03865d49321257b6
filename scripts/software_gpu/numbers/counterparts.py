"""CPU versions of operations that are different on CUDA, or exist only there.

A counterpart receives the arguments by name, defaults included, as CPU tensors over the memory of
the CUDA tensors, and the state of the generator if the operation samples. It returns the
operation's results; None stands for one that needs no values. Dtypes and strides need not be
those of CUDA: results are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from scripts.software_gpu.numbers import attention, recurrent
from scripts.software_gpu.numbers.precision import in_float32
from scripts.software_gpu.numbers.random_numbers import PhiloxState
from torch import Tensor

Counterpart = Callable[[Mapping[str, Any], Any], Any]


def _float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _softmax(arguments: Mapping[str, Any], _: object) -> Tensor:
    """`_softmax`: CUDA can return float32 for half precision, and always accumulates in it."""
    return torch.ops.aten._softmax(_float32(arguments["self"]), arguments["dim"], False)


def _log_softmax(arguments: Mapping[str, Any], _: object) -> Tensor:
    """`_log_softmax`."""
    return torch.ops.aten._log_softmax(_float32(arguments["self"]), arguments["dim"], False)


def _softmax_backward(arguments: Mapping[str, Any], _: object) -> Tensor:
    """`_softmax_backward_data`."""
    gradient, output = _float32(arguments["grad_output"]), _float32(arguments["output"])
    backward = torch.ops.aten._softmax_backward_data
    return backward(gradient, output, arguments["dim"], gradient.dtype)


def _log_softmax_backward(arguments: Mapping[str, Any], _: object) -> Tensor:
    """`_log_softmax_backward_data`."""
    gradient, output = _float32(arguments["grad_output"]), _float32(arguments["output"])
    backward = torch.ops.aten._log_softmax_backward_data
    return backward(gradient, output, arguments["dim"], gradient.dtype)


def _batch_norm(name: str) -> Counterpart:
    """Return the counterpart of a batch norm. In evaluation CUDA returns the running statistics,
    as mean and reciprocal standard deviation, where the CPU returns nothing."""
    overload = getattr(torch.ops.aten, name).default
    names = [argument.name for argument in overload._schema.arguments]

    def batch_norm(arguments: Mapping[str, Any], _: object) -> tuple[Tensor, ...]:
        raised = in_float32({n: arguments[n] for n in names})
        results = overload(**raised)
        running = ("running_mean", "running_var")
        for n in running:
            if raised[n] is not None:
                arguments[n].copy_(raised[n])
        if arguments["training"]:
            return results
        mean, variance = (raised[n] for n in running)
        return results[0], mean, (variance + arguments["eps"]).rsqrt()

    return batch_norm


def _log_sigmoid_backward(arguments: Mapping[str, Any], _: object) -> Tensor:
    """`log_sigmoid_backward`, without the buffer, which only the CPU's forward returns."""
    tensor = _float32(arguments["self"])
    return arguments["grad_output"] * torch.sigmoid(-tensor)


def _histogram(arguments: Mapping[str, Any], _: object) -> Tensor:
    """`histc`, which the CPU has for floating-point numbers only."""
    tensor, bounds = arguments["self"], (arguments["min"], arguments["max"])
    if not tensor.is_floating_point():
        tensor = tensor.double()
    return torch.histc(tensor, arguments["bins"], *bounds)


def _fused_dropout(arguments: Mapping[str, Any], state: PhiloxState) -> tuple[Tensor, Tensor]:
    """`_fused_dropout`, whose `p` is the probability to keep an element."""
    tensor, keep = arguments["self"], arguments["p"]
    mask = torch.rand(tensor.size(), generator=state.generator()) < keep
    return tensor * mask / keep, mask


def _masked_scale(arguments: Mapping[str, Any], _: object) -> Tensor:
    """`_masked_scale`."""
    return arguments["self"] * arguments["mask"] * arguments["scale"]


def _rms_norm_backward(arguments: Mapping[str, Any], _: object) -> tuple[Tensor, Tensor | None]:
    """`_fused_rms_norm_backward`."""
    gradient, tensor = arguments["grad_out"].float(), arguments["input"].float()
    rstd, weight = arguments["rstd"].float(), arguments["weight"]
    dimensions = tuple(range(-len(arguments["normalized_shape"]), 0))
    normalized = tensor * rstd
    scaled = gradient if weight is None else gradient * weight.float()
    mean = (scaled * normalized).mean(dimensions, keepdim=True)
    of_weight = None if weight is None else (gradient * normalized).sum_to_size(weight.size())
    return (scaled - normalized * mean) * rstd, of_weight


def _product(name: str) -> Counterpart:
    """Return the counterpart of a matrix product with another dtype for its result."""

    def product(arguments: Mapping[str, Any], _: object) -> Tensor:
        names = ("self", "mat1", "mat2", "batch1", "batch2")
        tensors = [_float32(arguments[n]) for n in names if n in arguments]
        factors = {n: arguments[n] for n in ("beta", "alpha") if n in arguments}
        return getattr(torch, name)(*tensors, **factors)

    return product


def _depthwise_convolution(arguments: Mapping[str, Any], _: object) -> Tensor:
    """`_conv_depthwise2d` and `conv_depthwise3d`."""
    tensor = arguments["self"]
    names = ("weight", "bias", "stride", "padding", "dilation")
    rest = [arguments[name] for name in names]
    dimensions = len(arguments["stride"])
    return torch.ops.aten.convolution(
        tensor, *rest, False, [0] * dimensions, tensor.shape[-dimensions - 1]
    )


COUNTERPARTS: dict[str, Counterpart] = {
    **attention.COUNTERPARTS,
    **recurrent.COUNTERPARTS,
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "native_batch_norm": _batch_norm("native_batch_norm"),
    "_native_batch_norm_legit": _batch_norm("_native_batch_norm_legit"),
    "_native_batch_norm_legit.out": _batch_norm("_native_batch_norm_legit"),
    "log_sigmoid_backward": _log_sigmoid_backward,
    "histc": _histogram,
    "_fused_dropout": _fused_dropout,
    "_masked_scale": _masked_scale,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_conv_depthwise2d": _depthwise_convolution,
    "conv_depthwise3d": _depthwise_convolution,
    **{
        f"{name}.{overload}": _product(name)
        for name in ("mm", "bmm", "addmm", "baddbmm")
        for overload in ("dtype", "dtype_out")
    },
}
"""Counterparts by the name of the operation, with the overload where only that one differs."""


def counterpart_of(name: str) -> Counterpart | None:
    """Return the counterpart of an overload such as `aten::mm.dtype`, if it has one."""
    name = name.removeprefix("aten::")
    return COUNTERPARTS.get(name) or COUNTERPARTS.get(name.partition(".")[0])
