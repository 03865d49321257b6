"""Keys of the cost cache: everything that decides how long an operation takes.

Operations with the same key are measured once; a transformer of any depth has some 60 keys.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from remat.documents.arguments import Argument, Literal, Ref, encode_argument
from remat.documents.records import Node, TensorMeta
from remat.documents.writes import call_of_write, is_write

MEASUREMENT_VERSION = 3
"""To be raised when an operation or a link is measured in another way than before: entries of a
cache from before are not used then. Version 3 ends on the CPU once blocks of calls agree."""

_OFFSET_MODULUS = 64
"""Storage offsets count modulo this number of elements, as when operands are created."""


def cost_key(
    node: Node, metas: Mapping[str, TensorMeta], trace_device_type: str
) -> dict[str, object]:
    """Return the key of an operation: its target, the layouts of its tensors, other arguments.

    A tensor that occurs a second time is described by the number of its first occurrence. Tensors
    on `trace_device_type` have the device "home", so that a key does not depend on the device's
    index.
    """
    tensor_numbers: dict[str, int] = {}

    def described(argument: Argument) -> object:
        match argument:
            case Ref(name):
                if name in tensor_numbers:
                    return {"same": tensor_numbers[name]}
                tensor_numbers[name] = len(tensor_numbers)
                return {"tensor": tensor_key(metas[name], trace_device_type)}
            case tuple():
                return [described(item) for item in argument]
            case Literal("device", text):
                return {"device": _device_label(text, trace_device_type)}
            case _:
                return encode_argument(argument)

    call, metas = call_of_write(node, metas)
    key: dict[str, object] = {
        "op": node.target,
        "args": [described(item) for item in call.args],
        "kwargs": {key: described(value) for key, value in call.kwargs.items()},
    }
    if is_write(node):
        (part,) = call.results
        key |= {"op": node.args[1], "part": tensor_key(part.tensor, trace_device_type)}
    return key


def tensor_key(meta: TensorMeta, trace_device_type: str) -> list[object]:
    """Return the dtype, shape, stride, alignment and device of a tensor, as part of a key.
    `trace_device_type` is the type that a key calls "home"."""
    offset = meta.offset % _OFFSET_MODULUS
    device = _device_label(meta.device, trace_device_type)
    return [meta.dtype, list(meta.shape), list(meta.stride), offset, device]


def environment_key(device: torch.device) -> dict[str, object]:
    """Return the part of a key that all operations on a device share: hardware, torch version and
    settings."""
    key: dict[str, object] = {
        "measurement": MEASUREMENT_VERSION,
        "torch": torch.__version__,
        "device": device_name(device),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": _legacy_setting(torch.get_float32_matmul_precision),
    }
    if device.type == "cpu":
        key["fp32"] = fp32_precisions("mkldnn")
        key["threads"] = torch.get_num_threads()
    else:
        key["fp32"] = fp32_precisions("cuda")
        key["cuda"] = torch.version.cuda or torch.version.hip
        key["cudnn"] = torch.backends.cudnn.version() if torch.backends.cudnn.enabled else None
        key["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        key["cudnn_tf32"] = _legacy_setting(lambda: torch.backends.cudnn.allow_tf32)
    return key


def fp32_precisions(backend: str) -> list[str]:
    """Return the float32 precision of matrix products, convolutions and recurrent layers of a
    backend ("cuda", "mkldnn"): "ieee", "tf32", "bf16", or "none" for the default."""
    precision = torch._C._get_fp32_precision_getter
    return [precision(backend, operation) for operation in ("matmul", "conv", "rnn")]


def _legacy_setting(read: Callable[[], object]) -> object:
    """Return the value of an older setting of torch, or None where torch refuses to report it
    because the newer setting was used."""
    try:
        return read()
    except RuntimeError:
        return None


def device_name(device: torch.device) -> str:
    """Return the name of a device's model, such as "NVIDIA H200"."""
    match device.type:
        case "cuda":
            return torch.cuda.get_device_name(device)
        case "cpu":
            return processor_name()
        case _:
            return str(device)


@functools.cache
def processor_name() -> str:
    """Return the processor's model name, from `/proc/cpuinfo` on Linux or else from Python."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "cpu"


def _device_label(device: str, trace_device_type: str) -> str:
    """Return "home" for a device of the trace's type, or else the type of the device."""
    device_type = device.partition(":")[0]
    return "home" if device_type == trace_device_type else device_type
