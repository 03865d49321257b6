"""The file of offloaded tensors, also where it bypasses the page cache."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
from remat.errors import RematError
from remat.frontend.planning.host_limits import measured_link
from remat.frontend.runtime import host_file as files
from remat.frontend.runtime.host_file import (
    _BUFFER_BYTES,
    BLOCK_BYTES,
    DIRECT_VARIABLE,
    DIRECTORY_VARIABLE,
    HostFile,
    host_file,
    new_host_file,
)

pytestmark = pytest.mark.usefixtures("offload_file_in_tmp_path")


def test_the_directory_may_be_below_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(DIRECTORY_VARIABLE, "~/offloaded")
    assert files.offload_directory() == str(tmp_path / "offloaded")


def test_the_file_has_no_name_while_it_is_open(tmp_path: Path) -> None:
    file = HostFile(str(tmp_path))
    tensor = torch.randn(50, 100).t()
    slot = file.write(tensor)
    file.wait(slot)
    assert list(tmp_path.iterdir()) == []
    result, copied = file.read(slot)
    copied.wait()
    assert torch.equal(tensor, result)
    assert tensor.stride() == result.stride()


def test_a_slot_is_not_reused_while_it_is_read(tmp_path: Path) -> None:
    file = HostFile(str(tmp_path))
    large, first = torch.randn(20_000_000), torch.full((1000,), 1.0)
    slots = [file.write(large), file.write(first)]
    for slot in slots:
        file.wait(slot)
    file.read(slots[0])  # the next read waits for this one
    result, copied = file.read(slots[1])
    file.drop_reference(slots[1])
    file.wait(file.write(torch.full((1000,), 2.0)))
    copied.wait()
    assert torch.equal(result, first)


def test_slots_of_similar_sizes_are_reused(tmp_path: Path) -> None:
    file = HostFile(str(tmp_path))
    for pages in range(1, 100):
        slot = file.write(torch.zeros(1024 * pages))
        file.wait(slot)
        file.drop_reference(slot)
    assert file._end_bytes < 20 * 100 * 4096


def test_a_forked_process_has_a_file_of_its_own() -> None:
    tensor = torch.randn(1000)
    host_file().wait(host_file().write(tensor))
    process = os.fork()
    if not process:
        number = host_file().write(tensor)
        host_file().wait(number)
        result, copied = host_file().read(number)
        copied.wait()
        os._exit(0 if torch.equal(result, tensor) else 1)
    assert os.waitpid(process, 0)[1] == 0


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(RematError, match=rf"nowhere: No such file .*Set {DIRECTORY_VARIABLE}"):
        HostFile(str(tmp_path / "nowhere"))


# -- direct I/O -----------------------------------------------------------------------------------


@pytest.fixture
def direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECT_VARIABLE, "1")


@pytest.fixture
def direct_file(direct_io: None, tmp_path: Path) -> Iterator[HostFile]:
    """A file with direct I/O; the test is skipped if the system refuses that for a plain file."""
    try:
        os.close(os.open(tmp_path / "plain", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no direct I/O in {tmp_path}: {error}")
    file = new_host_file()
    yield file
    file.close()


@pytest.mark.parametrize(
    "size_bytes",
    [1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, _BUFFER_BYTES, 2 * _BUFFER_BYTES + 12_345],
)
def test_tensors_of_any_size_come_back(direct_file: HostFile, size_bytes: int) -> None:
    assert fcntl.fcntl(direct_file._descriptor, fcntl.F_GETFL) & os.O_DIRECT
    tensors = [torch.randint(256, (size_bytes,), dtype=torch.uint8) for _ in range(3)]
    numbers = [direct_file.write(tensor) for tensor in tensors]
    for number in numbers:
        direct_file.wait(number)
    for tensor, number in zip(tensors, numbers, strict=True):
        result, copied = direct_file.read(number)
        copied.wait()
        assert torch.equal(result, tensor)
        direct_file.drop_reference(number)


@pytest.mark.slow
def test_a_step_with_direct_io_equals_one_without(
    direct_file: HostFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model, x = nn.Sequential(*blocks), torch.randn(8192, 64)
    gradients = []
    for value in ("0", "1"):
        monkeypatch.setenv(DIRECT_VARIABLE, value)
        files._host_file.cache_clear()
        fast = remat.optimize(
            model, "50%", (x,), outputs="dropped", offload="auto", link=remat.Link(1e12, 1e12)
        )
        assert fast.plan.host_bytes
        model.zero_grad(set_to_none=True)
        fast(x).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        is_direct = bool(fcntl.fcntl(host_file()._descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        assert is_direct == (value == "1")
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.slow
def test_the_bandwidth_of_direct_io_is_measured_separately(
    direct_file: HostFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "costs.sqlite"
    direct = measured_link(torch.device("cpu"), cache)
    assert measured_link(torch.device("cpu"), cache) == direct
    monkeypatch.setenv(DIRECT_VARIABLE, "0")
    assert measured_link(torch.device("cpu"), cache) != direct


def test_a_system_without_direct_io_is_an_error(
    direct_io: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")  # as on macOS
    with pytest.raises(
        RematError, match=rf"there is no direct I/O here .* Unset {DIRECT_VARIABLE}"
    ):
        new_host_file()


def test_other_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECT_VARIABLE, "yes")
    with pytest.raises(RematError, match=f"{DIRECT_VARIABLE} is 'yes': set it to 1 or 0"):
        new_host_file()
