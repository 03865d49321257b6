"""`remat.watch` on the CPU: what it records, and that it changes nothing."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
from remat.errors import RematError
from remat.frontend.memory.meter import LiveStorageMeter
from remat.snapshots.findings import Kind
from remat.snapshots.read import read_snapshot


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def model_of(depth: int = 3, width: int = 64) -> nn.Sequential:
    blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
    return nn.Sequential(*blocks)


def train(model: nn.Module, steps: int, stored: list[torch.Tensor] | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        output = model(torch.randn(256, 64))
        output.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if stored is not None:
            stored.append(output)


class TrainAndFail:
    """Trains, and then raises an error."""

    def __init__(self, model: nn.Module, error: Exception) -> None:
        self.model, self.error = model, error

    def __call__(self) -> None:
        train(self.model, 2)
        raise self.error


def test_stored_outputs_are_named_with_module_and_line() -> None:
    model, stored = model_of(), []
    with remat.watch(model) as watch:
        train(model, 6, stored)
        cause = watch.explain().cause
    assert cause is not None
    assert cause.kind == Kind.KEPT_TENSORS
    assert cause.bytes_per_step == 256 * 64 * 4
    assert cause.place.module == "2.1"
    assert cause.place.script is not None
    assert cause.place.script.function == "train"
    assert Path(cause.place.script.file).name == Path(__file__).name


def test_a_healthy_loop_has_no_leak() -> None:
    model = model_of()
    with remat.watch(model) as watch:
        train(model, 8)
        explanation = watch.explain()
    assert not any(finding.kind.is_leak for finding in explanation.findings)
    assert explanation.steps == 8


def test_the_peak_is_that_of_the_meter() -> None:
    model = model_of()
    train(model, 1)
    with LiveStorageMeter() as meter:
        train(model, 3)
    with remat.watch(model) as watch:
        train(model, 3)
    assert watch.explain().live_bytes == meter.peak_bytes


def test_numbers_and_hooks_are_as_without_it() -> None:
    torch.manual_seed(0)
    model = model_of()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)
    train(model, 2)
    expected = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(state)
    torch.manual_seed(1)
    with remat.watch(model):
        train(model, 2)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_error_is_raised_unchanged_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = model_of(), tmp_path / "snapshot.pickle"
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    train_and_fail = TrainAndFail(model, error)
    with pytest.raises(torch.OutOfMemoryError) as caught, remat.watch(model, file=file) as watch:
        train_and_fail()
    assert caught.value is error
    assert watch.explanation is not None
    assert watch.explanation.describe() in capsys.readouterr().err
    assert read_snapshot(file).devices[0].event_count > 0
    assert pickle.loads(file.read_bytes())["device_traces"][0]


def test_other_errors_pass_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="mine"), remat.watch():
        raise ValueError("mine")
    assert capsys.readouterr().err == ""


def test_a_forward_that_raises_leaves_no_module_behind() -> None:
    model = model_of()
    with remat.watch(model) as watch:
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        stored = torch.randn(1000, 100) * 2
        explanation = watch.explain()
    assert all(line.place.module == "" for line in explanation.lines if line.size_bytes > 10_000)
    assert stored.numel()


@pytest.mark.parametrize("max_entries", [0, -1, 1.5, True, "100"])
def test_wrong_numbers_of_events_are_refused(max_entries: object) -> None:
    with pytest.raises(RematError, match="max_entries"), remat.watch(max_entries=max_entries):  # type: ignore[arg-type]
        pass


def test_the_newest_events_are_recorded() -> None:
    model = model_of()
    with remat.watch(model, max_entries=50) as watch:
        train(model, 4)
        explanation = watch.explain()
    assert any("cut" in note for note in explanation.notes)


def test_wrong_objects_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"), remat.watch("model"):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match="snapshot or an error"):
        remat.why(5)  # type: ignore[arg-type]
    with pytest.raises(RematError, match="no file"):
        remat.why("nowhere.pickle")
