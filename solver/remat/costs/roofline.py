"""The roofline model: an operation takes as long as its arithmetic or its memory traffic, whichever
is longer, plus a launch.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009. It needs no device and no torch. Attainable rates replace a model
of tiling, wave and cache effects; where torch's CUDA kernels are known to be slower, `cuda_kernels`
says by how much. What torch's kernels allocate while they run is in `workspaces`, without cuDNN's.

FLOPs are counted as by `torch.utils.flop_counter` where it has a formula (a multiply-add counts as
two, causal masks are not subtracted), plus attention on the CPU. One exception is the weight
gradient of a grouped convolution: torch's formula ignores the groups, this one counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

from remat.costs import cuda_kernels
from remat.costs.devices import PCIE_4, DeviceSpec, Link, find_device
from remat.costs.layouts import item_bytes
from remat.documents.arguments import Argument, Ref, referenced_names
from remat.documents.records import Node, TensorMeta
from remat.documents.targets import OFFLOAD_TARGETS, WRITE_ROWS_TARGET
from remat.documents.writes import call_of_write, is_write, written_buffer
from remat.errors import DocumentError


@runtime_checkable
class HasShape(Protocol):
    """Any object with a `shape`: a tensor, or the metadata of one."""

    @property
    def shape(self) -> Sequence[int]: ...


def count_flops(target: str, args: Sequence[object]) -> int:
    """Return the FLOPs of one call. Zero for operations without a formula, which are memory-bound.

    `args` are the positional arguments, with any object with a `shape` for a tensor.
    """
    formula = _FORMULAS.get(target.rpartition(".")[0])
    return formula(args) if formula else 0


def _argument_shape(argument: object) -> Sequence[int]:
    """Return the shape of an argument. Raises TypeError if it has none."""
    if not isinstance(argument, HasShape):
        raise TypeError(f"expected a tensor, got {argument!r}")
    return argument.shape


def _matmul_flops(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the FLOPs of `a @ b` for these shapes, batched or not."""
    return 2 * prod(a) * b[-1]


def _mm_flops(args: Sequence[object]) -> int:
    """Return the FLOPs of a matrix product, batched or not."""
    return _matmul_flops(_argument_shape(args[0]), _argument_shape(args[1]))


def _addmm_flops(args: Sequence[object]) -> int:
    """Return the FLOPs of a matrix product that is added to the first argument."""
    return _matmul_flops(_argument_shape(args[1]), _argument_shape(args[2]))


def _matrix_vector_flops(args: Sequence[object]) -> int:
    """Return the FLOPs of a product with a vector."""
    return 2 * prod(_argument_shape(args[0]))


def _linear_flops(args: Sequence[object]) -> int:
    """Return the FLOPs of a linear layer, without its bias."""
    return 2 * prod(_argument_shape(args[0])) * _argument_shape(args[1])[0]


def _convolution_shape_flops(
    x: Sequence[int], weight: Sequence[int], out: Sequence[int], transposed: bool
) -> int:
    """Return the FLOPs of a convolution with these shapes; `weight` is (out, in / groups, ...), or
    (in, out / groups, ...) if transposed."""
    return 2 * prod((x if transposed else out)[2:]) * x[0] * prod(weight)


def _convolution_output_shape(args: Sequence[object]) -> list[int]:
    """Return the output shape of `aten.convolution`, with 0 channels, which no formula reads."""
    x, weight = _argument_shape(args[0]), _argument_shape(args[1])
    stride, padding, dilation = (_repeated_integers(args[i], len(x) - 2) for i in (3, 4, 5))
    sizes = [
        (x[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1
        for i in range(len(x) - 2)
    ]
    return [x[0], 0, *sizes]


def _repeated_integers(argument: object, count: int) -> list[int]:
    """Return an argument as a list of `count` integers; a single integer is repeated."""
    items = list(argument) if isinstance(argument, (list, tuple)) else [argument]
    integers = [item for item in items if isinstance(item, int)]
    return integers if len(integers) == count else integers * count


def _transposed_flops(args: Sequence[object]) -> int:
    """Return the FLOPs of a product with a weight (out, in), whose shape is an argument."""
    weight = args[2] if isinstance(args[2], (list, tuple)) else _argument_shape(args[1])
    return 2 * prod(_argument_shape(args[0])) * int(weight[0])  # type: ignore[arg-type]


def _convolution_flops(args: Sequence[object]) -> int:
    """Return the FLOPs of `aten.convolution`."""
    transposed = bool(args[6])
    out = [] if transposed else _convolution_output_shape(args)
    return _convolution_shape_flops(
        _argument_shape(args[0]), _argument_shape(args[1]), out, transposed
    )


def _convolution_backward_flops(args: Sequence[object]) -> int:
    """Return the FLOPs of a convolution's backward: as many as the forward for the input's
    gradient, and as many for the weight's, if it computes them."""
    output_mask = args[10]
    gradient_count = 2
    if isinstance(output_mask, (list, tuple)):
        gradient_count = sum(map(bool, output_mask[:2]))
    x, weight, out = _argument_shape(args[1]), _argument_shape(args[2]), _argument_shape(args[0])
    return gradient_count * _convolution_shape_flops(x, weight, out, bool(args[7]))


def _attention_flops(args: Sequence[object], start: int = 0) -> int:
    """Return the FLOPs of attention: query times key, and probabilities times value. Query, key and
    value are the arguments from `start` on."""
    return sum(_attention_matmul_flops(args, start))


def _attention_backward_flops(args: Sequence[object]) -> int:
    """Return the FLOPs of attention's backward: the recomputed scores, and the gradients of value,
    probabilities, query and key."""
    score_flops, value_flops = _attention_matmul_flops(args, 1)
    return 3 * score_flops + 2 * value_flops


def _attention_matmul_flops(args: Sequence[object], start: int) -> tuple[int, int]:
    """Return the FLOPs of query times key and of probabilities times value; query, key and value
    are the arguments from `start` on."""
    query, key, value = (_argument_shape(args[start + i]) for i in range(3))
    score_elements = prod(query[:-1]) * key[-2]
    return 2 * score_elements * query[-1], 2 * score_elements * value[-1]


def _packed_attention_flops(args: Sequence[object]) -> int:
    """Return the FLOPs of attention for packed sequences, each counted as the longest one."""
    query, value = _argument_shape(args[0]), _argument_shape(args[2])
    return 2 * prod(query[:2]) * _integer(args[6]) * (query[-1] + value[-1])


def _packed_attention_backward_flops(args: Sequence[object]) -> int:
    """Return the FLOPs of its backward; see `_attention_backward_flops`."""
    query, value = _argument_shape(args[1]), _argument_shape(args[3])
    return 2 * prod(query[:2]) * _integer(args[9]) * (3 * query[-1] + 2 * value[-1])


def _integer(argument: object) -> int:
    return argument if isinstance(argument, int) else 0


_FORMULAS: dict[str, Callable[[Sequence[object]], int]] = {
    "aten.mm": _mm_flops,
    "aten.bmm": _mm_flops,
    "aten.addmm": _addmm_flops,
    "aten.baddbmm": _addmm_flops,
    "aten._addmm_activation": _addmm_flops,
    "remat.add_product": _addmm_flops,
    "aten.mv": _matrix_vector_flops,
    "aten.dot": _matrix_vector_flops,
    "aten.linear": _linear_flops,
    "bitsandbytes.gemm_4bit": _transposed_flops,
    "bitsandbytes.int8_scaled_mm": _transposed_flops,
    "aten.convolution": _convolution_flops,
    "aten._convolution": _convolution_flops,
    "aten.convolution_backward": _convolution_backward_flops,
    "torch_attn._varlen_attn": _packed_attention_flops,
    "torch_attn._varlen_attn_backward": _packed_attention_backward_flops,
}
for _target in (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "remat.flex_attention",
):
    _FORMULAS[_target] = _attention_flops
    _FORMULAS[f"{_target}_backward"] = _attention_backward_flops


COMPUTE_EFFICIENCY = 0.75
"""Share of the peak that large matrix products reach (cuBLAS on H200, bfloat16: 690 to 830 of 989
TFLOP/s measured in steps of GPT-2 and Llama)."""

BANDWIDTH_EFFICIENCY = 0.85
"""Share of the peak bandwidth that element-wise kernels on large tensors reach (STREAM-like)."""

_LOOKUPS = frozenset({"embedding", "index_select", "gather", "index", "_unsafe_index"})
"""Operations that read only those elements of their first operand that they return."""

_SECTOR_BYTES = 32
"""Bytes that a GPU reads for a single element: a sector."""

_PICKS = {"nll_loss_forward": (0, 1), "nll_loss2d_forward": (0, 1)}
"""Operations that read one element of an operand for each element of another: positions of both."""

_NOT_READ = {"nll_loss_backward": 1, "nll_loss2d_backward": 1}
"""Operations with an operand that they do not read, by its position: they need its shape."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device to estimate operations for: `Roofline("h200")`, or `Roofline.custom(...)`.

    `allow_tf32` is the value that `torch.backends.cuda.matmul.allow_tf32` will have. The
    efficiencies are the attainable fractions of the peak rates. Raises ValueError for a name
    without a data sheet.
    """

    name: str
    allow_tf32: bool = False
    compute_efficiency: float = COMPUTE_EFFICIENCY
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY
    device: DeviceSpec = None  # type: ignore[assignment]  # filled from the name

    def __post_init__(self) -> None:
        if self.device is None:
            object.__setattr__(self, "device", find_device(self.name))
        for efficiency in (self.compute_efficiency, self.bandwidth_efficiency):
            if not 0 < efficiency <= 1:
                raise ValueError(f"an efficiency is above 0 and at most 1, got {efficiency}")

    @classmethod
    def custom(
        cls,
        name: str,
        *,
        fp32_flops_per_s: float,
        bytes_per_s: float,
        half_flops_per_s: float | None = None,
        tf32_flops_per_s: float | None = None,
        fp64_flops_per_s: float | None = None,
        memory_bytes: int = 0,
        launch_s: float = 4e-6,
        allow_tf32: bool = False,
        link: Link = PCIE_4,
    ) -> Roofline:
        """Return a roofline for a device by its rates; omitted ones are derived from
        `fp32_flops_per_s` (half precision and TF32 as fast, double precision half as fast). `link`
        has the bandwidth of copies between device and host, for offloading."""
        device = DeviceSpec(
            name,
            half_flops_per_s=half_flops_per_s or fp32_flops_per_s,
            tf32_flops_per_s=tf32_flops_per_s or fp32_flops_per_s,
            fp32_flops_per_s=fp32_flops_per_s,
            fp64_flops_per_s=fp64_flops_per_s or fp32_flops_per_s / 2,
            bytes_per_s=bytes_per_s,
            memory_bytes=memory_bytes,
            launch_s=launch_s,
            link=link,
        )
        rates = (device.fp32_flops_per_s, device.bytes_per_s, device.half_flops_per_s)
        if min(*rates, device.tf32_flops_per_s, device.fp64_flops_per_s) <= 0 or launch_s < 0:
            raise ValueError(f"device {name!r}: rates must be above zero")
        return cls(name, allow_tf32=allow_tf32, device=device)

    @property
    def link(self) -> Link:
        """The link between the device and its host."""
        return self.device.link

    def flops_per_s(self, dtype: str) -> float:
        """Return the attainable arithmetic rate for matrix products in a dtype."""
        device = self.device
        if dtype in ("float16", "bfloat16") or dtype.startswith("float8"):
            peak = device.half_flops_per_s
        elif dtype in ("float64", "complex128"):
            peak = device.fp64_flops_per_s
        else:
            peak = device.tf32_flops_per_s if self.allow_tf32 else device.fp32_flops_per_s
        return peak * self.compute_efficiency

    def seconds(self, flops: int, traffic_bytes: int, dtype: str) -> float:
        """Return the time of a kernel with these FLOPs and this memory traffic, with its launch."""
        memory_s = traffic_bytes / (self.device.bytes_per_s * self.bandwidth_efficiency)
        return self.device.launch_s + max(flops / self.flops_per_s(dtype), memory_s)


def operation_seconds(node: Node, metas: Mapping[str, TensorMeta], roofline: Roofline) -> float:
    """Return the seconds that an operation takes, zero for a view. `metas` has the metadata of the
    tensors that it reads. Raises `DocumentError` for invalid arguments."""
    if node.view:
        return 0.0
    node, metas = call_of_write(node, metas)
    # The first result's dtype decides the rate: later ones may be statistics in float32.
    dtype = node.results[0].tensor.dtype if node.results else "float32"
    try:
        flops = operation_flops(node, metas.__getitem__)
        size_bytes = traffic_bytes(node, metas)
        if roofline.device.capability is None:
            return roofline.seconds(flops, size_bytes, dtype)
        return _cuda_seconds(node, metas, roofline, flops, size_bytes, dtype)
    except (ArithmeticError, IndexError, LookupError, TypeError, ValueError) as error:
        raise DocumentError(
            f"operation {node.name} has other arguments than {node.target} takes ({error})"
        ) from None


def _cuda_seconds(
    node: Node,
    metas: Mapping[str, TensorMeta],
    roofline: Roofline,
    flops: int,
    size_bytes: int,
    dtype: str,
) -> float:
    """Return the seconds of an operation on a CUDA device, by the rules of `cuda_kernels`."""
    device = roofline.device
    if node.operand_names:
        first_bytes = tensor_traffic_bytes(metas[node.operand_names[0]])
        size_bytes += cuda_kernels.reread_bytes(node, metas, first_bytes)
    efficiency = cuda_kernels.compute_efficiency(node, metas) if flops else 1.0
    elements = cuda_kernels.unvectorized_elements(node, metas)
    elements_s = elements / (cuda_kernels.ELEMENTS_PER_S * device.multiprocessors)
    launch_s = device.launch_s * cuda_kernels.launch_count(node, metas)
    seconds = roofline.seconds(int(flops / efficiency), size_bytes, dtype) - device.launch_s
    images_s = cuda_kernels.image_seconds(node, metas, device.multiprocessors)
    return launch_s + images_s + max(seconds, elements_s)


def operation_flops(node: Node, meta_of: Callable[[str], TensorMeta]) -> int:
    """Return the floating point operations of a node, as `torch.utils.flop_counter` counts them."""

    def with_metas(argument: Argument) -> object:
        if isinstance(argument, Ref):
            return meta_of(argument.name)
        if isinstance(argument, tuple):
            return tuple(with_metas(item) for item in argument)
        return argument

    if is_write(node):
        name = written_buffer(node)
        node, metas = call_of_write(node, {name: meta_of(name)})
        return operation_flops(node, lambda n: metas[n] if n in metas else meta_of(n))
    return 0 if node.view else count_flops(node.target, [with_metas(item) for item in node.args])


def traffic_bytes(node: Node, metas: Mapping[str, TensorMeta]) -> int:
    """Return the bytes that an operation must read and write: each operand and result once; of a
    buffer or table, the elements that are written or looked up. 0 for copies to the host or back,
    which run during other operations."""
    if node.target in OFFLOAD_TARGETS:
        return 0
    if node.target == WRITE_ROWS_TARGET:
        return 2 * sum(tensor_traffic_bytes(metas[n]) for n in referenced_names(node.args[1]))
    written_bytes = sum(tensor_traffic_bytes(result.tensor) for result in node.results)
    read_bytes = {name: tensor_traffic_bytes(metas[name]) for name in node.operand_names}
    name = cuda_kernels.operation_name(node)
    if is_write(node):
        return traffic_bytes(*call_of_write(node, metas))
    if name in _LOOKUPS and node.args and isinstance(node.args[0], Ref):
        table = node.args[0].name
        read_bytes[table] = min(read_bytes[table], written_bytes)
    if name in _PICKS and len(node.args) > max(_PICKS[name]):
        table, index = (node.args[position] for position in _PICKS[name])
        if isinstance(table, Ref) and isinstance(index, Ref):
            picked_bytes = _SECTOR_BYTES * prod(metas[index.name].shape)
            read_bytes[table.name] = min(read_bytes[table.name], picked_bytes)
    if name in _NOT_READ and len(node.args) > _NOT_READ[name]:
        unread = node.args[_NOT_READ[name]]
        if isinstance(unread, Ref):
            read_bytes[unread.name] = 0
    return written_bytes + sum(read_bytes.values())


def tensor_traffic_bytes(meta: TensorMeta) -> int:
    """Return the bytes of a tensor's distinct elements: an expanded dimension counts once."""
    elements = prod(
        1 if stride == 0 and size > 1 else size
        for size, stride in zip(meta.shape, meta.stride, strict=True)
    )
    return elements * item_bytes(meta.dtype)
