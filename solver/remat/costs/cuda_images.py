"""Kernels of images in half precision that are slower than the roofline, measured on an H200.

Convolutions in float16 and bfloat16, and batch norm in bfloat16, which cuDNN does not run. Figures
are from single operations of a ResNet-50 step in bfloat16 autocast with 128 images, in the default
memory format, with operands that are not in the L2 cache (torch 2.11, CUDA 13.0, 27 November 2026;
`tests/data/measured_costs/h200_images.json`). Images in the memory format `channels_last` need no
conversion. They have no rules here, and neither have grouped convolutions and batch norm in
evaluation, which were not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from remat.documents.records import Node, TensorMeta

CONVERTED_ELEMENTS_PER_S = 2.5e9
"""Elements per second and multiprocessor that cuDNN converts between NCHW and NHWC."""

CHANNEL_ELEMENTS_PER_S = {"forward": 1.0e9, "backward": 0.53e9}
"""Elements per second of one channel of a batch norm in bfloat16, which has one block of threads
for each channel."""
NORM_ELEMENTS_PER_S = {"forward": 1.3e9, "backward": 1.15e9}
"""Elements per second and multiprocessor of such a batch norm, if there are many channels."""

_NORMS = {
    "_batch_norm_with_update": "forward",
    "_batch_norm_with_update_functional": "forward",
    "batch_norm_backward": "backward",
}
_GROUPS = {"convolution": 8, "convolution_backward": 9}
"""Position of the number of groups among the arguments."""
_HALF = ("float16", "bfloat16")
_ALIGNMENT = 8
_FEW_CHANNELS, _FEW_CHANNELS_SLOWDOWN = 4, 3
"""Convolutions of images with up to four channels pad them: their conversions take longer."""


def image_seconds(node: Node, metas: Mapping[str, TensorMeta], multiprocessors: int) -> float:
    """Return the seconds that an operation takes in addition to those of the roofline; 0 for
    operations without a rule."""
    name = node.target.split(".")[1]
    operands = [metas[operand] for operand in node.operand_names]
    if not operands or len(operands[0].shape) < 4 or not _is_contiguous(operands[0]):
        return 0.0
    if name in _NORMS and operands[0].dtype == "bfloat16":
        return _norm_seconds(operands[0], _NORMS[name], multiprocessors)
    is_plain = name in _GROUPS and len(node.args) > _GROUPS[name] and node.args[_GROUPS[name]] == 1
    if is_plain and operands[0].dtype in _HALF:
        elements = _converted_elements(name, operands, [r.tensor for r in node.results])
        return elements / (CONVERTED_ELEMENTS_PER_S * multiprocessors)
    return 0.0


def _norm_seconds(images: TensorMeta, direction: str, multiprocessors: int) -> float:
    elements = prod(images.shape)
    return max(
        elements / images.shape[1] / CHANNEL_ELEMENTS_PER_S[direction],
        elements / (NORM_ELEMENTS_PER_S[direction] * multiprocessors),
    )


def _converted_elements(name: str, operands: list[TensorMeta], results: list[TensorMeta]) -> float:
    """Return the elements of images that a convolution converts: none if it is a matrix product of
    aligned rows, a kernel of 1 x 1 with stride 1."""
    images, weight = (operands[0], operands[1]) if name == "convolution" else operands[1:3]
    all_images = [t for t in (*operands, *results) if len(t.shape) > 2 and t.shape != weight.shape]
    result = results[0] if name == "convolution" else operands[0]
    is_product = prod(weight.shape[2:]) == 1 and images.shape[2:] == result.shape[2:]
    if is_product and prod(images.shape[2:]) % _ALIGNMENT == 0:
        return 0.0
    slowdown = _FEW_CHANNELS_SLOWDOWN if images.shape[1] <= _FEW_CHANNELS else 1
    return slowdown * sum(float(prod(t.shape)) for t in all_images)


def _is_contiguous(tensor: TensorMeta) -> bool:
    """True for images in the default memory format, whose rows are contiguous."""
    return tensor.stride[-1] == 1 and tensor.stride[1] != 1
