"""Where torch's CUDA kernels are slower than the roofline: rules with figures measured on an H200.

Each figure is from single operations with operands outside of the L2 cache (torch 2.11, CUDA 13.0,
27 November 2026): of GPT-2 and Llama steps in bfloat16 autocast
(`tests/data/measured_costs/h200.json`), and of a ResNet-50 step in bfloat16 autocast with 128
images in the default memory format (`tests/data/measured_costs/h200_images.json`). Other GPUs were
not measured: their figures are scaled by the number of multiprocessors.

Of images, convolutions in float16 and bfloat16 have rules, and batch norm in bfloat16, which cuDNN
does not run. Images in the memory format `channels_last` need no conversion and have no rules here,
nor have grouped convolutions and batch norm in evaluation, which were not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import cast

from remat.costs.layouts import HALF_DTYPES, is_contiguous, item_bytes
from remat.documents.records import Node, TensorMeta

ELEMENTS_PER_S = 2.5e9
"""Elements per second and multiprocessor of an element-wise kernel that torch does not vectorize
(1.7e9 to 3.4e9 measured): one whose operands are converted, broadcast or strided."""

MISALIGNED_EFFICIENCY = 0.19
"""Rate of a product in half precision, as a share of the rate of large aligned products, if a
matrix has rows whose bytes are no multiple of 16 (0.14 to 0.22 measured, for a vocabulary of
50,257)."""

ALIGNMENT = 8
"""Elements of half precision in 16 bytes."""

CACHED_ROW_BYTES = 48 << 10
"""Rows up to this size stay in shared memory while a softmax kernel needs them."""

REREADS: Mapping[str, int] = {
    "_softmax": 2, "_log_softmax": 2, "_softmax_backward_data": 1, "_log_softmax_backward_data": 1,
}  # fmt: skip
"""How often a softmax over long rows reads its first operand once more."""

PASSES: Mapping[str, float] = {
    "native_layer_norm": 1.2,
    "native_layer_norm_backward": 2.8,
    "embedding_dense_backward": 7.0,
    "max_pool2d_with_indices": 1.2,
    "max_pool2d_with_indices_backward": 14.0,
}
"""Passes over the elements of the first operand, at `ELEMENTS_PER_S`, by operation: of norms, of
an embedding's gradient, which sorts its indices, and of pooling."""

LAUNCHES: Mapping[str, int] = {
    "native_layer_norm_backward": 2,
    "embedding_dense_backward": 10,
    "nll_loss_forward": 3,
}
"""Launches of operations that launch more than one kernel."""

TALL_RATIO, TALL_LAUNCHES = 4, 5
"""A sum over more than `TALL_RATIO` rows for each result is shared by several blocks, which takes
as long as `TALL_LAUNCHES` (16,384 rows of 768 to 3,072)."""

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
_FEW_CHANNELS, _FEW_CHANNELS_SLOWDOWN = 4, 3
"""Convolutions of images with up to four channels pad them: their conversions take longer."""

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "add_product"})
_ELEMENTWISE = frozenset(
    {"_to_copy", "clone", "cat", "neg", "add", "sub", "mul", "div", "slice_backward"}
)
_NO_CONVERSION = frozenset({"bool"})
"""Dtypes that a kernel reads without a conversion, whatever the other operands have: masks."""
_WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def compute_efficiency(node: Node, metas: Mapping[str, TensorMeta]) -> float:
    """Return the share of the attainable arithmetic rate that an operation reaches: less than 1 for
    a matrix product in half precision whose rows are not aligned."""
    matrices = [t for t in _operands_and_results(node, metas) if len(t.shape) >= 2]
    if operation_name(node) not in _PRODUCTS or not any(t.dtype in HALF_DTYPES for t in matrices):
        return 1.0
    is_aligned = all(max(t.stride[-2:]) % ALIGNMENT == 0 for t in matrices)
    return 1.0 if is_aligned else MISALIGNED_EFFICIENCY


def unvectorized_elements(node: Node, metas: Mapping[str, TensorMeta]) -> float:
    """Return the elements that a kernel handles one by one, by which its time is bound from below:
    0 for a kernel that torch vectorizes, and for products."""
    name = operation_name(node)
    operands = [metas[operand] for operand in node.operand_names]
    if name in PASSES:
        return PASSES[name] * prod(operands[0].shape)
    if name not in _ELEMENTWISE:
        return 0.0
    results = [result.tensor for result in node.results]
    tensors = [t for t in (*operands, *results) if prod(t.shape) > 1]
    if not tensors or not (
        _converts_dtype(operands, results) or _is_strided(name, operands, results)
    ):
        return 0.0
    counted = operands if name == "slice_backward" else tensors
    return max(prod(t.shape) for t in counted)


def launch_count(node: Node, metas: Mapping[str, TensorMeta]) -> int:
    """Return the number of empty launches that take as long as the launches of an operation."""
    name = operation_name(node)
    if name == "sum" and node.operand_names:
        results = prod(node.results[0].tensor.shape)
        summed = prod(metas[node.operand_names[0]].shape) // max(results, 1)
        is_over_rows = metas[node.operand_names[0]].shape[-1:] == node.results[0].tensor.shape[-1:]
        return TALL_LAUNCHES if is_over_rows and summed > TALL_RATIO * results else 1
    return LAUNCHES.get(name, 1)


def reread_bytes(node: Node, metas: Mapping[str, TensorMeta], size_bytes: int) -> int:
    """Return the bytes that a softmax reads more than once, for a first operand of `size_bytes`; 0
    for short rows, and for nearly all other operations.

    With rows above `CACHED_ROW_BYTES`, the forward reads its operand three times (maximum, sum,
    result), and the backward the gradient twice. Products with weights in 4 bits write and read the
    dequantized weight.
    """
    if operation_name(node) == "gemm_4bit":
        item = item_bytes(metas[node.operand_names[0]].dtype)
        return 2 * item * prod(cast("Sequence[int]", node.args[2]))
    times = REREADS.get(operation_name(node), 0)
    if not times:
        return 0
    rows = prod(metas[node.operand_names[0]].shape[:-1])
    return times * size_bytes if size_bytes > rows * CACHED_ROW_BYTES else 0


def operation_name(node: Node) -> str:
    """Return the name of an operation without its namespace and overload."""
    return node.target.split(".")[1]


def _operands_and_results(node: Node, metas: Mapping[str, TensorMeta]) -> list[TensorMeta]:
    """Return the metadata of the tensors that a node reads and returns."""
    return [*(metas[n] for n in node.operand_names), *(r.tensor for r in node.results)]


def _converts_dtype(operands: Sequence[TensorMeta], results: Sequence[TensorMeta]) -> bool:
    """True if an operand is converted to another dtype, except by a copy to a narrower one, which
    torch vectorizes."""
    dtypes = {t.dtype for t in (*operands, *results)} - _NO_CONVERSION
    if len(dtypes) < 2:
        return False
    is_narrowing = len(operands) == 1 and (
        _WIDTHS.get(operands[0].dtype, 0) > _WIDTHS.get(results[0].dtype, 0)
    )
    return not is_narrowing


def _is_strided(name: str, operands: Sequence[TensorMeta], results: Sequence[TensorMeta]) -> bool:
    """True if an operand is broadcast, or has other strides than the result."""
    if name in ("cat", "slice_backward"):
        return not all(map(is_contiguous, operands))
    result = results[0]
    return any(
        prod(t.shape) > 1
        and (t.shape != result.shape or _relevant_strides(t) != _relevant_strides(result))
        for t in operands
    )


def _relevant_strides(tensor: TensorMeta) -> list[int]:
    """Return the strides of the dimensions with several elements. The strides of others have no
    effect."""
    return [s for s, n in zip(tensor.stride, tensor.shape, strict=True) if n > 1]


def image_seconds(node: Node, metas: Mapping[str, TensorMeta], multiprocessors: int) -> float:
    """Return the seconds that an operation on images takes in addition to the roofline's; 0 for
    operations without a rule."""
    name = operation_name(node)
    operands = [metas[operand] for operand in node.operand_names]
    if not operands or len(operands[0].shape) < 4 or not _is_default_format(operands[0]):
        return 0.0
    if name in _NORMS and operands[0].dtype == "bfloat16":
        return _batch_norm_seconds(operands[0], _NORMS[name], multiprocessors)
    is_plain = name in _GROUPS and len(node.args) > _GROUPS[name] and node.args[_GROUPS[name]] == 1
    if is_plain and operands[0].dtype in HALF_DTYPES:
        elements = _converted_elements(name, operands, [r.tensor for r in node.results])
        return elements / (CONVERTED_ELEMENTS_PER_S * multiprocessors)
    return 0.0


def _batch_norm_seconds(images: TensorMeta, direction: str, multiprocessors: int) -> float:
    """Return the seconds of a batch norm in bfloat16, in the "forward" or "backward"."""
    elements = prod(images.shape)
    return max(
        elements / images.shape[1] / CHANNEL_ELEMENTS_PER_S[direction],
        elements / (NORM_ELEMENTS_PER_S[direction] * multiprocessors),
    )


def _converted_elements(name: str, operands: list[TensorMeta], results: list[TensorMeta]) -> float:
    """Return the elements of images that a convolution converts between memory formats: 0 if it is
    a matrix product (a kernel of 1 x 1 with stride 1) of aligned rows. Images of few channels count
    several times."""
    images, weight = (operands[0], operands[1]) if name == "convolution" else operands[1:3]
    all_images = [t for t in (*operands, *results) if len(t.shape) > 2 and t.shape != weight.shape]
    result = results[0] if name == "convolution" else operands[0]
    is_product = prod(weight.shape[2:]) == 1 and images.shape[2:] == result.shape[2:]
    if is_product and prod(images.shape[2:]) % ALIGNMENT == 0:
        return 0.0
    slowdown = _FEW_CHANNELS_SLOWDOWN if images.shape[1] <= _FEW_CHANNELS else 1
    return slowdown * sum(float(prod(t.shape)) for t in all_images)


def _is_default_format(tensor: TensorMeta) -> bool:
    """True for images in the default memory format (not channels-last), whose rows are
    contiguous."""
    return tensor.stride[-1] == 1 and tensor.stride[1] != 1
