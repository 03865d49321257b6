"""A traced graph on fake CUDA tensors.

A CPU build of torch runs no autograd on fake CUDA tensors: its engine asks for the device's stream.
So a model is traced on the CPU, with the operators that it runs on a GPU (as by remat's own capture
for an absent GPU), and the devices of the joint graph are replaced before it is planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map

CUDA = torch.device("cuda", 0)


def move_to_cuda(gm: fx.GraphModule) -> list[Any]:
    """Replace the CPU by a GPU in the fake tensors and arguments of a joint graph. Return the
    values of its inputs."""
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = fakes_on_cuda(node.meta["val"])
        node.args = map_aggregate(node.args, _device_argument)
        node.kwargs = map_aggregate(node.kwargs, _device_argument)
    gm.recompile()
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def fakes_on_cuda(values: Any) -> Any:
    """Return a tree of values with its fake CPU tensors on a GPU. Storages remain shared."""
    return tree_map(_on_cuda, values)


def _on_cuda(value: object) -> object:
    if not isinstance(value, FakeTensor) or value.device.type != "cpu":
        return value
    with unset_fake_temporarily():
        tensor = torch.empty(0, dtype=value.dtype, device="meta")
        storage = value.untyped_storage()
        tensor.set_(storage, value.storage_offset(), value.size(), value.stride())
        return FakeTensor(value.fake_mode, tensor, CUDA)


def _device_argument(argument: Any) -> Any:
    is_cpu = isinstance(argument, torch.device) and argument.type == "cpu"
    return CUDA if is_cpu else argument


def zeros_like_outputs(gm: fx.GraphModule) -> list[Any]:
    """Return CPU tensors of zeros in the shapes of the outputs of Dynamo's graph, so that a frame
    can go on without its graph having run."""
    (outputs,) = gm.graph.output_node().args
    assert isinstance(outputs, Sequence)
    return [_zeros(item.meta["example_value"] if isinstance(item, fx.Node) else item)
            for item in outputs]  # fmt: skip


def _zeros(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    zeros = torch.zeros(value.shape, dtype=value.dtype)
    return zeros.requires_grad_(value.requires_grad)
