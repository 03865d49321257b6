"""The key under which a cost is kept: everything that decides how long an operation takes.

Two nodes with the same key are measured once; a transformer of any depth has some 60 of them.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from remat.documents.arguments import Argument, Literal, Ref, encode
from remat.documents.records import Node, TensorMeta

_TABLE_SIZED = 64  # offsets are kept modulo this, as they are when operands are made


def cost_key(node: Node, metas: Mapping[str, TensorMeta], home: str) -> dict[str, object]:
    """What JSON can write: operation, tensors by number of first appearance, other arguments.

    `home` is the trace's device type: tensors there are just "home", so that a key does not depend
    on the number of the device.
    """
    seen: dict[str, int] = {}

    def describe(argument: Argument) -> object:
        match argument:
            case Ref(name):
                if name in seen:
                    return {"same": seen[name]}
                seen[name] = len(seen)
                return {"tensor": describe_tensor(metas[name], home)}
            case tuple():
                return [describe(item) for item in argument]
            case Literal("device", text):
                return {"device": _place(text, home)}
            case _:
                return encode(argument)

    return {
        "op": node.target,
        "args": [describe(item) for item in node.args],
        "kwargs": {key: describe(value) for key, value in node.kwargs.items()},
    }


def describe_tensor(meta: TensorMeta, home: str) -> list[object]:
    """dtype, shape, stride, alignment and place of a tensor."""
    offset = meta.offset % _TABLE_SIZED
    place = _place(meta.device, home)
    return [meta.dtype, list(meta.shape), list(meta.stride), offset, place]


def conditions(device: torch.device) -> dict[str, object]:
    """What besides the operation decides its cost: hardware, torch, and torch's switches."""
    found: dict[str, object] = {
        "torch": torch.__version__,
        "device": device_name(device),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": _told(torch.get_float32_matmul_precision),
    }
    if device.type == "cpu":
        found["fp32"] = fp32_precisions("mkldnn")
        found["threads"] = torch.get_num_threads()
    else:
        found["fp32"] = fp32_precisions("cuda")
        found["cuda"] = torch.version.cuda or torch.version.hip
        found["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        found["cudnn_tf32"] = _told(lambda: torch.backends.cudnn.allow_tf32)
    return found


def fp32_precisions(backend: str) -> list[str]:
    """How matrix products, convolutions and recurrent layers of a backend ("cuda", "mkldnn")
    compute in float32: "ieee", "tf32", "bf16", or "none" for the default."""
    ask = torch._C._get_fp32_precision_getter
    return [ask(backend, operation) for operation in ("matmul", "conv", "rnn")]


def _told(ask: Callable[[], object]) -> object:
    """What an older switch says; None where torch refuses, since a newer one was used."""
    try:
        return ask()
    except RuntimeError:
        return None


def device_name(device: torch.device) -> str:
    """ "NVIDIA H200", or the processor's model name."""
    match device.type:
        case "cuda":
            return torch.cuda.get_device_name(device)
        case "cpu":
            return processor_name()
        case _:
            return str(device)


@functools.cache
def processor_name() -> str:
    """The processor's model, as Linux tells it; elsewhere what Python knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "cpu"


def _place(device: str, home: str) -> str:
    kind = device.partition(":")[0]
    return "home" if kind == home else kind
