"""Two operations have the same key when, and only when, one takes as long as the other."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remat.documents.arguments import Literal, Ref
from remat.documents.records import Node, TensorMeta
from remat.frontend.costs import key as cost_key


def tensor(device: str = "cuda:0", offset: int = 0) -> TensorMeta:
    return TensorMeta(dtype="float32", shape=(2, 2), stride=(2, 1), device=device, offset=offset)


def key(home: str = "cuda", second: str = "y", place: str = "cuda:0", **given: str | int) -> object:
    """Of a product of x and another tensor; `given` is of x."""
    node = Node(
        name="product",
        target="aten.mm.default",
        args=(Ref("x"), Ref(second)),
        kwargs={"device": Literal("device", place)},
        results=(),
    )
    metas = {"x": tensor(**given), "y": tensor()}  # type: ignore[arg-type]
    return cost_key.cost_key(node, metas, home)


def test_a_key_is_of_a_kind_of_device() -> None:
    assert key(device="cuda:0") == key(device="cuda:1") == key(device="cuda")
    assert key(place="cuda:0") == key(place="cuda:1") != key(place="cpu")
    assert key(device="cuda:0") != key(device="cpu")
    assert cost_key.describe_tensor(tensor("cpu"), "cpu")[-1] == "home"
    assert cost_key.describe_tensor(tensor("cpu"), "cuda")[-1] == "cpu"
    assert cost_key.describe_tensor(tensor("cuda:0"), "cpu")[-1] == "cuda"
    assert cost_key.describe_tensor(tensor("cuda:0"), "cuda")[-1] == "home"


def test_a_key_is_of_an_alignment() -> None:
    assert key(offset=6) == key(offset=6 + 64) == key(offset=6 + 2 * 64)
    assert key(offset=6) != key(offset=7)
    assert key(offset=0) != key(offset=63)


def test_the_same_tensor_twice_is_not_two_like_it() -> None:
    assert key(second="x") != key(second="y")


def test_a_processor_is_told_by_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    about = "processor\t: 0\nvendor_id\t: Maker\nmodel name\t: Some CPU: 2 GHz \nmodel\t\t: 85\n"
    monkeypatch.setattr(Path, "read_text", lambda path: about * 2)
    assert cost_key.processor_name.__wrapped__() == "Some CPU: 2 GHz"


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="has no /proc")
def test_the_processor_here_is_told_by_its_model() -> None:
    told = Path("/proc/cpuinfo").read_text()
    name = cost_key.device_name(torch.device("cpu"))
    assert f"model name\t: {name}\n" in told or "model name" not in told


@pytest.mark.parametrize("file", ["none", "without a model"])
def test_a_processor_without_a_model_is_told_by_its_kind(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: Path) -> str:
        if file == "none":
            raise FileNotFoundError
        return "processor\t: 0\nBogoMIPS\t: 50.00\n"

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(platform, "processor", str)
    assert cost_key.processor_name.__wrapped__() == platform.machine()
    monkeypatch.setattr(platform, "machine", str)
    assert cost_key.processor_name.__wrapped__() == "cpu"


def test_other_devices_are_told_by_their_names() -> None:
    assert cost_key.device_name(torch.device("meta")) == "meta"
    assert cost_key.device_name(torch.device("mps:0")) == "mps:0"


ACCELERATOR: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "CUDA": lambda patch: patch.setattr(torch.version, "cuda", "99.1"),
    "ROCm": lambda patch: patch.setattr(torch.version, "hip", "99.2"),
    "autotuning": lambda patch: patch.setattr(torch.backends.cudnn, "benchmark", True),
    "TF32": lambda patch: patch.setattr(torch.backends.cudnn, "allow_tf32", False),
}


@pytest.mark.parametrize("change", ACCELERATOR)
def test_what_decides_an_accelerators_costs(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches of torch's that mean nothing to a CPU; "meta" is an accelerator that is at hand."""
    accelerator, cpu = torch.device("meta"), torch.device("cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    before = cost_key.conditions(accelerator), cost_key.conditions(cpu)
    ACCELERATOR[change](monkeypatch)
    assert cost_key.conditions(accelerator) != before[0]
    assert cost_key.conditions(cpu) == before[1]


def test_each_kind_of_device_has_its_own_precision() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        told: list[Any] = [
            cost_key.conditions(torch.device(kind))["fp32"] for kind in ("cpu", "meta")
        ]
    finally:
        torch.set_float32_matmul_precision(before)
    assert [products for products, *_ in told] == ["bf16", "tf32"]


def test_an_older_switch_that_torch_refuses_to_tell_of_is_told_as_none() -> None:
    """It does so once a newer one was used, which has the same to say."""
    products, cpu = torch.backends.mkldnn.matmul, torch.device("cpu")
    before, kept = products.fp32_precision, cost_key.conditions(cpu)
    try:
        products.fp32_precision = "bf16"
        changed = cost_key.conditions(cpu)
    finally:
        products.fp32_precision = before
    assert (kept["matmul"], changed["matmul"]) == ("highest", None)
    assert changed["fp32"] != kept["fp32"]
    assert cost_key.conditions(cpu) == kept


def test_threads_decide_a_processors_costs_only() -> None:
    assert cost_key.conditions(torch.device("cpu"))["threads"] == torch.get_num_threads()
    assert "threads" not in cost_key.conditions(torch.device("meta"))
