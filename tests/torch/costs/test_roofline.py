"""FLOPs agree with torch's counter; the roofline prices them and needs neither torch nor a
device."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from remat.costs.devices import DEVICES, DeviceSpec, find_device, match_device
from remat.costs.roofline import (
    COMPUTE_EFFICIENCY,
    Roofline,
    count_flops,
    operation_flops,
    operation_seconds,
    tensor_traffic_bytes,
    traffic_bytes,
)
from remat.documents.arguments import Ref
from remat.documents.records import Node, Result, TensorMeta
from remat.frontend.common.operators import resolve_operator


def meta(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> TensorMeta:
    stride = stride or tuple(torch.empty(shape, device="meta").stride())
    return TensorMeta(dtype=dtype, shape=shape, stride=stride, device="cpu")


def node(target: str, out: TensorMeta, *args: object) -> Node:
    result = Result(name="out", tensor=out, storage=0)
    return Node(name="out", target=target, args=args, results=(result,))  # type: ignore[arg-type]


def e(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


CONV = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
STRIDED = ([2, 2], [0, 1], [1, 2], False, [0, 0], 1)
TRANSPOSED = ([2, 2], [1, 1], [1, 1], True, [0, 0], 1)
NONE = (None,)
HEADS = (e(2, 4, 16, 8), e(2, 4, 24, 8), e(2, 4, 24, 8))


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.mm.default", (e(3, 5), e(5, 7))),
        ("aten.addmm.default", (e(7), e(3, 5), e(5, 7))),
        ("aten.bmm.default", (e(2, 3, 5), e(2, 5, 7))),
        ("aten.baddbmm.default", (e(2, 3, 7), e(2, 3, 5), e(2, 5, 7))),
        ("aten.convolution.default", (e(2, 3, 9, 9), e(4, 3, 3, 3), None, *CONV)),
        ("aten.convolution.default", (e(2, 3, 9, 12), e(4, 3, 3, 3), None, *STRIDED)),
        ("aten.convolution.default", (e(2, 4, 9, 9), e(4, 6, 3, 3), None, *TRANSPOSED)),
        ("aten.convolution.default", (e(2, 6, 9, 9), e(4, 3, 3, 3), None, *CONV[:-1], 2)),
        ("aten.convolution.default", (e(2, 3, 9), e(4, 3, 3), None, [1], [1], [1], False, [0], 1)),
        (
            "aten.convolution_backward.default",
            (e(2, 4, 9, 9), e(2, 3, 9, 9), e(4, 3, 3, 3), None, *CONV, [True, True, False]),
        ),
        (
            "aten.convolution_backward.default",
            (e(2, 4, 9, 9), e(2, 3, 9, 9), e(4, 3, 3, 3), None, *CONV, [False, True, False]),
        ),
        ("aten._scaled_dot_product_flash_attention.default", HEADS),
    ],
    ids=lambda value: value.split(".")[1] if isinstance(value, str) else "",
)
def test_flops_equal_torchs(target: str, args: tuple[object, ...]) -> None:
    operator = resolve_operator(target)
    out = operator(*args)
    formula = flop_registry[operator.overloadpacket]  # type: ignore[attr-defined]
    assert count_flops(target, args) == formula(*args, out_val=out)
    assert count_flops(target, args) > 0


def test_attention_on_the_cpu_has_the_flops_of_other_devices() -> None:
    query, key, value = HEADS
    forward = count_flops("aten._scaled_dot_product_flash_attention_for_cpu.default", HEADS)
    assert forward == 2 * (2 * 2 * 4 * 16 * 24 * 8)
    backward = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    assert count_flops(backward, (query, query, key, value)) == forward // 2 * 5


def test_operations_without_a_formula_have_no_flops() -> None:
    assert count_flops("aten.relu.default", (e(3),)) == 0


def test_matrix_products_are_bound_by_arithmetic_and_additions_by_memory() -> None:
    n = 8192
    big = meta(n, n, dtype="bfloat16")
    h200 = Roofline("h200")
    mm = node("aten.mm.default", big, Ref("a"), Ref("b"))
    metas = {"a": big, "b": big}
    assert operation_flops(mm, metas.__getitem__) == 2 * n**3
    seconds = operation_seconds(mm, metas, h200)
    assert seconds == pytest.approx(2 * n**3 / (989.4e12 * COMPUTE_EFFICIENCY), rel=0.05)
    add = node("aten.add.Tensor", big, Ref("a"), Ref("b"))
    assert traffic_bytes(add, metas) == 3 * 2 * n * n
    assert operation_seconds(add, metas, h200) == pytest.approx(
        6 * n * n / (4.8e12 * 0.85), rel=0.1
    )
    assert (
        operation_seconds(node("aten.add.Tensor", meta(1), Ref("a"), 1), {"a": meta(1)}, h200)
        > 1e-6
    )


def test_single_precision_uses_tensor_cores_only_if_allowed() -> None:
    assert Roofline("a100", allow_tf32=True).flops_per_s("float32") == pytest.approx(
        156e12 * COMPUTE_EFFICIENCY
    )
    assert Roofline("a100").flops_per_s("float32") == pytest.approx(19.5e12 * COMPUTE_EFFICIENCY)
    assert Roofline("a100").flops_per_s("float64") == pytest.approx(9.7e12 * COMPUTE_EFFICIENCY)
    assert Roofline("v100").flops_per_s("float16") > Roofline("v100").flops_per_s("float32")


def test_traffic_counts_the_bytes_that_are_read_and_written() -> None:
    assert tensor_traffic_bytes(meta(4, 8, stride=(0, 1))) == 8 * 4
    assert tensor_traffic_bytes(meta(4, 8, dtype="bool")) == 32
    same = node("aten.mul.Tensor", meta(8), Ref("a"), Ref("a"))
    assert traffic_bytes(same, {"a": meta(8)}) == 2 * 32
    lookup = node("aten.embedding.default", meta(4, 16), Ref("table"), Ref("i"))
    metas = {"table": meta(50000, 16), "i": meta(4, dtype="int64")}
    assert traffic_bytes(lookup, metas) == 2 * 4 * 16 * 4 + 32


def test_views_cost_nothing() -> None:
    view = node("aten.view.default", meta(8), Ref("a")).model_copy(update={"view": True})
    assert operation_seconds(view, {"a": meta(8)}, Roofline("cpu")) == 0


def test_unknown_devices_are_refused_with_a_list_of_names() -> None:
    with pytest.raises(ValueError, match=r"'tpu'; known are .*h200.*Roofline\.custom"):
        Roofline("tpu")
    with pytest.raises(ValueError, match="efficiency"):
        Roofline("h200", compute_efficiency=1.5)
    with pytest.raises(ValueError, match="above zero"):
        Roofline.custom("mine", fp32_flops_per_s=0, bytes_per_s=1)


def test_custom_devices_can_be_described() -> None:
    custom = Roofline.custom("mine", fp32_flops_per_s=1e12, bytes_per_s=1e11, launch_s=0)
    assert custom.seconds(0, 10**11, "float32") == pytest.approx(1 / 0.85)
    assert custom.flops_per_s("float64") == pytest.approx(0.5e12 * COMPUTE_EFFICIENCY)


def test_devices_are_looked_up_by_name_and_by_description() -> None:
    names = {
        "RTX 4090": "rtx4090", "4090": "rtx4090", "NVIDIA GeForce RTX 3090": "rtx3090",
        "A10G": "a10g", "A6000": "rtxa6000", "RTX A6000": "rtxa6000", "A100 40GB": "a100-40gb",
        "a100-80gb": "a100", "A100": "a100", "L40": "l40", "H20": "h20", "MI250": "mi250",
        "AMD Instinct MI250": "mi250", "Instinct MI250": "mi250",
        "GH200": "gh200", "4070 Ti Super": "rtx4070-ti-super", "5090": "rtx5090",
        "Tesla V100 16GB": "v100-16gb", "RTX 6000 Ada": "rtx6000-ada", "H100 PCIe": "h100-pcie",
    }  # fmt: skip
    for name, device in names.items():
        assert find_device(name) is DEVICES[device], name
    descriptions = {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA A100-PCIE-40GB": "a100-40gb", "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA GeForce RTX 4070 Ti SUPER": "rtx4070-ti-super", "NVIDIA RTX A6000": "rtxa6000",
        "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada", "Tesla V100-SXM2-16GB": "v100-16gb",
        "Tesla V100-SXM2-32GB": "v100", "NVIDIA A10G": "a10g", "NVIDIA A10": "a10",
        "NVIDIA L40S": "l40s", "NVIDIA L40": "l40", "NVIDIA GeForce RTX 5090": "rtx5090",
    }  # fmt: skip
    for description, device in descriptions.items():
        assert match_device(description) is DEVICES[device], description
    for description in descriptions:
        assert find_device(description) is match_device(description), description
    unlisted = [
        "RTX 4090 Laptop GPU", "RTX 4090 D", "RTX 4080 SUPER", "RTX 4070 SUPER", "H100 NVL",
        "H100 96GB", "A100-SXM-64GB", "H20-3e", "A100-SXM4-80GB MIG 1g.10gb", "A10-24Q",
        "GRID A100-40C", "cpu",
    ]  # fmt: skip
    for description in unlisted:
        assert match_device(f"NVIDIA {description}") is None, description
    assert match_device("NVIDIA GH200 480GB") is DEVICES["gh200"]
    assert match_device("NVIDIA A800-SXM4-80GB") is DEVICES["a100"]
    assert match_device("Abacus") is None


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_rates_of_the_data_sheets_are_plausible(device: DeviceSpec) -> None:
    assert device.half_flops_per_s >= device.tf32_flops_per_s >= device.fp32_flops_per_s
    assert device.fp32_flops_per_s >= device.fp64_flops_per_s > 0
    assert 1e9 < device.bytes_per_s < 1e13
