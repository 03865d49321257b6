"""The data sheet's seconds against operations that were timed on an H200."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
from tests.helpers.paths import ROOT

from remat.costs import cuda_kernels
from remat.costs.roofline import Roofline, operation_seconds
from remat.documents.arguments import Literal, Ref
from remat.documents.records import Node, Result, TensorMeta
from remat.frontend.common.operators import resolve_operator, tensor_meta

H200 = Roofline("h200")


class Operation:
    """A row of the table, as a node with the metadata of its operands."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.target: str = row["target"]
        self.measured_s = row["microseconds"] * 1e-6
        self.metas: dict[str, TensorMeta] = {}
        args = [self._argument(value, for_torch=False) for value in row["args"]]
        tensors = [self._argument(value, for_torch=True) for value in row["args"]]
        dtype = row["kwargs"].get("dtype", {}).get("dtype")
        kwargs = {} if dtype is None else {"dtype": getattr(torch, dtype)}
        if "memory_format" in row["kwargs"]:
            kwargs["memory_format"] = torch.contiguous_format
        result = resolve_operator(self.target)(*tensors, **kwargs)
        results = [result] if isinstance(result, torch.Tensor) else result
        self.node = Node(
            name="out",
            target=self.target,
            args=tuple(args),
            kwargs={} if dtype is None else {"dtype": Literal("dtype", dtype)},
            results=tuple(
                Result(name=f"out{i}", tensor=tensor_meta(r), storage=i, position=i)
                for i, r in enumerate(results)
                if r is not None
            ),
        )

    def _argument(self, value: Any, *, for_torch: bool) -> Any:
        if isinstance(value, list):
            items = [self._argument(item, for_torch=for_torch) for item in value]
            return items if for_torch else tuple(items)
        if not isinstance(value, dict):
            return value
        dtype = getattr(torch, value["dtype"])
        if "shape" not in value:
            return dtype if for_torch else Literal("dtype", value["dtype"])
        tensor = torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device="meta")
        if for_torch:
            return tensor
        name = f"operand{len(self.metas)}"
        self.metas[name] = tensor_meta(tensor)
        return Ref(name)

    @property
    def predicted_s(self) -> float:
        return operation_seconds(self.node, self.metas, H200)

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s


@cache
def operations(name: str = "h200") -> list[Operation]:
    text = (ROOT / f"tests/data/measured_costs/{name}.json").read_text()
    return [Operation(row) for row in json.loads(text)["operations"]]


def test_every_operation_is_predicted_within_a_factor_of_2() -> None:
    assert len(operations()) > 200
    wrong = [(o.target, o.node.args, o.ratio) for o in operations() if not 0.5 <= o.ratio <= 2]
    assert not wrong


def test_the_median_error_is_below_a_tenth() -> None:
    errors = [abs(o.ratio - 1) for o in operations()]
    assert statistics.median(errors) < 0.1
    assert sum(error < 0.25 for error in errors) > 0.8 * len(errors)


def test_the_sum_of_each_operator_is_predicted_within_a_third() -> None:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for operation in operations():
        sums[operation.target][0] += operation.predicted_s
        sums[operation.target][1] += operation.measured_s
    wrong = {t: p / m for t, (p, m) in sums.items() if not 0.66 <= p / m <= 1.5}
    assert not wrong
    predicted, measured = (sum(s[i] for s in sums.values()) for i in (0, 1))
    assert predicted == pytest.approx(measured, rel=0.1)


def test_without_the_rules_the_same_operations_are_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the rules, and not a generous limit, pass the tests above."""
    monkeypatch.setattr(cuda_kernels, "ELEMENTS_PER_S", 1e30)
    monkeypatch.setattr(cuda_kernels, "MISALIGNED_EFFICIENCY", 1.0)
    monkeypatch.setattr(cuda_kernels, "CACHED_ROW_BYTES", 1 << 40)
    assert sum(o.predicted_s for o in operations()) < 0.7 * sum(o.measured_s for o in operations())
    assert statistics.median(abs(o.ratio - 1) for o in operations()) > 0.15


def test_rules_are_for_cuda_only() -> None:
    (product,) = [o for o in operations() if o.target == "aten.mm.default" and o.measured_s > 13e-3]
    on_cpu = operation_seconds(product.node, product.metas, Roofline("cpu"))
    assert on_cpu == pytest.approx(2 * 16384 * 768 * 50257 / Roofline("cpu").flops_per_s("x"), 0.01)


@pytest.mark.parametrize(("width", "efficiency"), [(50257, 0.19), (50304, 1.0)])
def test_products_are_slow_where_a_row_is_no_multiple_of_16_bytes(
    width: int, efficiency: float
) -> None:
    def tensor(*shape: int) -> dict[str, object]:
        return {"dtype": "bfloat16", "shape": shape, "stride": (shape[1], 1)}

    row = {"target": "aten.mm.default", "args": [tensor(64, 768), tensor(768, width)], "kwargs": {}}
    product = Operation(row | {"microseconds": 1.0})
    assert cuda_kernels.compute_efficiency(product.node, product.metas) == efficiency


def test_operations_of_images_are_predicted() -> None:
    images = operations("h200_images")
    wrong = [(o.target, o.node.args, o.ratio) for o in images if not 0.4 <= o.ratio <= 2]
    assert not wrong
    errors = [abs(o.ratio - 1) for o in images]
    assert statistics.median(errors) < 0.2
    for target in {o.target for o in images}:
        predicted_s, measured_s = (
            sum(s)
            for s in zip(
                *((o.predicted_s, o.measured_s) for o in images if o.target == target), strict=True
            )
        )
        assert predicted_s == pytest.approx(measured_s, rel=0.25), target


def test_images_in_channels_last_need_no_conversion() -> None:
    """There, cuDNN's kernels run without conversions, and norms have other kernels."""
    convolution = next(o for o in operations("h200_images") if "convolution" in o.target)
    contiguous_s = convolution.predicted_s
    name = convolution.node.operand_names[0]
    images = convolution.metas[name]
    _, channels, height, width = images.shape
    stride = (channels * height * width, 1, width * channels, channels)
    convolution.metas[name] = images.model_copy(update={"stride": stride})
    assert convolution.predicted_s < 0.7 * contiguous_s
    convolution.metas[name] = images
