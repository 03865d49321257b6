"""Two operations have the same cost key if, and only if, they take equally long."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remat.documents.arguments import Literal, Ref
from remat.documents.records import Node, Result, TensorMeta
from remat.documents.targets import WRITE_TARGET
from remat.frontend.costs import cost_key as cost_key


def tensor(device: str = "cuda:0", offset: int = 0) -> TensorMeta:
    return TensorMeta(dtype="float32", shape=(2, 2), stride=(2, 1), device=device, offset=offset)


def key(
    home: str = "cuda", second: str = "y", place: str = "cuda:0", **argument: str | int
) -> object:
    """Return the key of a product of x and another tensor; `argument` is a property of x."""
    node = Node(
        name="product",
        target="aten.mm.default",
        args=(Ref("x"), Ref(second)),
        kwargs={"device": Literal("device", place)},
        results=(),
    )
    metas = {"x": tensor(**argument), "y": tensor()}  # type: ignore[arg-type]
    return cost_key.cost_key(node, metas, home)


def test_the_key_depends_on_the_kind_of_device() -> None:
    assert key(device="cuda:0") == key(device="cuda:1") == key(device="cuda")
    assert key(place="cuda:0") == key(place="cuda:1") != key(place="cpu")
    assert key(device="cuda:0") != key(device="cpu")
    assert cost_key.tensor_key(tensor("cpu"), "cpu")[-1] == "home"
    assert cost_key.tensor_key(tensor("cpu"), "cuda")[-1] == "cpu"
    assert cost_key.tensor_key(tensor("cuda:0"), "cpu")[-1] == "cuda"
    assert cost_key.tensor_key(tensor("cuda:0"), "cuda")[-1] == "home"


def test_the_key_depends_on_the_alignment() -> None:
    assert key(offset=6) == key(offset=6 + 64) == key(offset=6 + 2 * 64)
    assert key(offset=6) != key(offset=7)
    assert key(offset=0) != key(offset=63)


def test_one_tensor_read_twice_has_another_key_than_two_tensors() -> None:
    assert key(second="x") != key(second="y")


def write_key(
    target: str = "aten.add_.Tensor",
    shape: tuple[int, int] = (2, 2),
    stride: tuple[int, int] = (2, 1),
    offset: int = 0,
    operand: str = "x",
    rows: int = 4,
) -> object:
    """Return the key of a write into a part of a buffer."""
    buffer = TensorMeta(dtype="float32", shape=(rows, 2), stride=(2, 1), device="cuda:0", offset=0)
    node = Node(
        name="write",
        target=WRITE_TARGET,
        args=(Ref("buffer"), target, shape, stride, offset, Ref(operand)),
        results=(Result(name="written", tensor=buffer, storage=0),),
    )
    metas = {"buffer": buffer, "x": tensor(), "y": tensor(offset=1)}
    return cost_key.cost_key(node, metas, "cuda")


@pytest.mark.parametrize("target", ["aten.add_.Tensor", "aten.neg.out"])
def test_the_key_of_a_write_depends_on_the_operator_and_the_part(target: str) -> None:
    """But not on the whole buffer."""
    keys = [
        write_key(target),
        write_key("aten.mul_.Tensor"),
        write_key(target, shape=(1, 2)),
        write_key(target, stride=(1, 2)),
        write_key(target, offset=2),
        write_key(target, operand="y"),
    ]
    assert all(keys.count(one) == 1 for one in keys)
    assert write_key(target, rows=8) == keys[0]


def test_a_processor_is_identified_by_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    about = "processor\t: 0\nvendor_id\t: Maker\nmodel name\t: Some CPU: 2 GHz \nmodel\t\t: 85\n"
    monkeypatch.setattr(Path, "read_text", lambda path: about * 2)
    assert cost_key.processor_name.__wrapped__() == "Some CPU: 2 GHz"


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="has no /proc")
def test_this_machines_processor_is_identified_by_its_model() -> None:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    name = cost_key.device_name(torch.device("cpu"))
    assert f"model name\t: {name}\n" in cpuinfo or "model name" not in cpuinfo


@pytest.mark.parametrize("file", ["none", "without a model"])
def test_a_processor_without_a_model_is_identified_by_its_architecture(
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


def test_other_devices_are_identified_by_their_names() -> None:
    assert cost_key.device_name(torch.device("meta")) == "meta"
    assert cost_key.device_name(torch.device("mps:0")) == "mps:0"


ACCELERATOR: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "CUDA": lambda patch: patch.setattr(torch.version, "cuda", "99.1"),
    "ROCm": lambda patch: patch.setattr(torch.version, "hip", "99.2"),
    "autotuning": lambda patch: patch.setattr(torch.backends.cudnn, "benchmark", True),
    "TF32": lambda patch: patch.setattr(torch.backends.cudnn, "allow_tf32", False),
}


@pytest.mark.parametrize("change", ACCELERATOR)
def test_precision_switches_are_part_of_an_accelerators_key(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They mean nothing to a CPU; "meta" stands for an accelerator."""
    accelerator, cpu = torch.device("meta"), torch.device("cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    before = cost_key.environment_key(accelerator), cost_key.environment_key(cpu)
    ACCELERATOR[change](monkeypatch)
    assert cost_key.environment_key(accelerator) != before[0]
    assert cost_key.environment_key(cpu) == before[1]


def test_the_version_of_cudnn_is_part_of_the_key_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = torch.device("meta")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90100)
    for is_enabled, version in ((True, 90100), (False, None)):
        monkeypatch.setattr(torch.backends.cudnn, "enabled", is_enabled)
        assert cost_key.environment_key(accelerator)["cudnn"] == version


def test_each_kind_of_device_has_its_own_precision() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        precisions: list[Any] = [
            cost_key.environment_key(torch.device(kind))["fp32"] for kind in ("cpu", "meta")
        ]
    finally:
        torch.set_float32_matmul_precision(before)
    assert [products for products, *_ in precisions] == ["bf16", "tf32"]


@pytest.mark.parametrize("operation", ["matmul", "conv", "rnn"])
def test_an_older_switch_that_torch_refuses_to_read_is_recorded_as_none(operation: str) -> None:
    """torch refuses once a newer switch was used, which has the same information."""
    switch, cpu = getattr(torch.backends.mkldnn, operation), torch.device("cpu")
    before, key_before = switch.fp32_precision, cost_key.environment_key(cpu)
    try:
        switch.fp32_precision = "bf16"
        changed = cost_key.environment_key(cpu)
    finally:
        switch.fp32_precision = before
    if operation == "matmul":
        assert (key_before["matmul"], changed["matmul"]) == ("highest", None)
    assert changed["fp32"] != key_before["fp32"]
    assert cost_key.environment_key(cpu) == key_before


def test_the_number_of_threads_is_part_of_a_cpus_key_only() -> None:
    assert cost_key.environment_key(torch.device("cpu"))["threads"] == torch.get_num_threads()
    assert "threads" not in cost_key.environment_key(torch.device("meta"))
