"""The predicted memory of optimizers against the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import optim

from remat.costs.optimizer_memory import (
    OPTIMIZERS,
    OptimizerMemory,
    optimizer_memory,
    smaller_optimizers,
)
from remat.errors import RematError
from remat.frontend.common.operators import tensor_meta
from remat.frontend.memory.meter import LiveStorageMeter

SHAPES = ((1024, 256), (256,), (512, 512), (64, 32, 3, 3), (1,), (7, 5))
SCALARS_BYTES = 64
"""Step counts, one number for each parameter, are not predicted."""

Make = Callable[[Iterable[torch.Tensor]], optim.Optimizer]

ON_CUDA: dict[str, Make] = {
    "adamw": lambda p: optim.AdamW(p, foreach=True),
    "adamw-fused": lambda p: optim.AdamW(p, fused=True),
    "adam": lambda p: optim.Adam(p, foreach=True),
    "adam-fused": lambda p: optim.Adam(p, fused=True),
    "sgd": lambda p: optim.SGD(p, foreach=True),
    "sgd-momentum": lambda p: optim.SGD(p, momentum=0.9, foreach=True),
    "adafactor": optim.Adafactor,
}
"""The optimizers as torch runs them for parameters on CUDA."""

ON_CPU: dict[str, Make] = {"adamw": optim.AdamW, "adam": optim.Adam, "sgd": optim.SGD}


def _parameters(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in SHAPES]


def _predicted(name: str, dtype: torch.dtype, *, is_cuda: bool) -> OptimizerMemory:
    metas = list(map(tensor_meta, _parameters(dtype)))
    return optimizer_memory(name, metas, is_cuda=is_cuda)


def _check(name: str, make: Make, dtype: torch.dtype, *, is_cuda: bool) -> None:
    parameters = _parameters(dtype)
    optimizer = make(parameters)
    predicted = _predicted(name, dtype, is_cuda=is_cuda)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        meter = LiveStorageMeter()
        with meter:
            optimizer.step()
        state_bytes = 0 if step else predicted.state_bytes
        assert meter.live_bytes == pytest.approx(state_bytes, abs=SCALARS_BYTES)
        peak_bytes = state_bytes + predicted.temporary_bytes
        # Adafactor's tensors of the size of rows and columns are not predicted.
        relative = 0.1 if name == "adafactor" else 0.001
        assert meter.peak_bytes == pytest.approx(peak_bytes, rel=relative, abs=SCALARS_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ON_CUDA)
def test_the_memory_is_that_of_the_optimizer(name: str, dtype: torch.dtype) -> None:
    _check(name, ON_CUDA[name], dtype, is_cuda=True)


@pytest.mark.parametrize("name", ON_CPU)
def test_on_the_cpu_torch_updates_one_parameter_after_the_other(name: str) -> None:
    _check(name, ON_CPU[name], torch.float32, is_cuda=False)


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit"])
def test_the_state_in_8_bits_is_that_of_bitsandbytes(name: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    parameters = _parameters(torch.float32)
    optimizer = getattr(bitsandbytes.optim, name)(parameters)
    meter = LiveStorageMeter()
    with meter:
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter)
            optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)
            del parameter.grad
    predicted = _predicted(name.lower().replace("8bit", "-8bit"), torch.float32, is_cuda=True)
    tensors = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    sizes = {t.untyped_storage()._cdata: t.nbytes for t in tensors}
    assert sum(sizes.values()) == predicted.state_bytes


def test_smaller_optimizers_have_less_memory() -> None:
    for name in OPTIMIZERS:
        memory = _predicted(name, torch.float32, is_cuda=True)
        for smaller in smaller_optimizers(name):
            other = _predicted(smaller, torch.float32, is_cuda=True)
            assert (
                other.state_bytes + other.temporary_bytes
                < memory.state_bytes + memory.temporary_bytes
            )
    assert smaller_optimizers("adamw") == ("adamw-fused", "adamw-8bit")
    assert smaller_optimizers("sgd") == ()


def test_another_name_is_refused_with_the_names() -> None:
    with pytest.raises(RematError, match="'adamax' is not known; use one of adamw, adamw-fused"):
        optimizer_memory("adamax", [])
