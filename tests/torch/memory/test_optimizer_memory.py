"""The predicted memory of optimizers against the optimizers."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.training.optimizers import BITSANDBYTES, Make, of_bitsandbytes, of_torch

from remat.costs.devices import find_device
from remat.costs.optimizer_memory import (
    OPTIMIZERS,
    OptimizerMemory,
    optimizer_memory,
    smaller_optimizers,
)
from remat.errors import RematError
from remat.frontend.common.operators import tensor_meta
from remat.frontend.common.target_gpu import local_gpu_name
from remat.frontend.memory.meter import LiveStorageMeter

SHAPES = ((1024, 256), (256,), (512, 512), (384, 700), (64, 32, 3, 3), (150_000,), (1,), (7, 5))
SCALARS_BYTES = 64
"""Step counts, one number for each parameter, are not predicted."""

EMBEDDING_SHAPES = ((1024, 256),)
ON_CUDA = of_torch(foreach=True, embedding_shapes=EMBEDDING_SHAPES)
ON_CPU = of_torch(foreach=False, embedding_shapes=EMBEDDING_SHAPES)


def _parameters(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in SHAPES]


def _predicted(name: str, dtype: torch.dtype, *, is_cuda: bool) -> OptimizerMemory:
    metas = list(map(tensor_meta, _parameters(dtype)))
    return optimizer_memory(name, metas, is_cuda=is_cuda, embedding_shapes=EMBEDDING_SHAPES)


def _check(
    name: str, make: Make, dtype: torch.dtype, *, is_cuda: bool, tables_bytes: int = 0
) -> None:
    parameters = _parameters(dtype)
    predicted = _predicted(name, dtype, is_cuda=is_cuda)
    created = LiveStorageMeter()
    with created:  # Adagrad creates its state here
        optimizers = make(parameters)
    created_bytes = created.live_bytes
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        meter = LiveStorageMeter()
        with meter:
            for optimizer in optimizers:
                optimizer.step()
        state_bytes = 0 if step else predicted.state_bytes - created_bytes
        assert meter.live_bytes == pytest.approx(state_bytes, abs=SCALARS_BYTES + tables_bytes)
        peak_bytes = predicted.temporary_bytes
        if step:  # Muon's temporary tensors precede the state of AdamW in the first step
            # Tensors of the size of some rows and columns are not predicted.
            relative = 0.005
            assert meter.peak_bytes == pytest.approx(peak_bytes, rel=relative, abs=SCALARS_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ON_CUDA)
def test_the_memory_is_that_of_the_optimizer(name: str, dtype: torch.dtype) -> None:
    _check(name, ON_CUDA[name], dtype, is_cuda=True)


@pytest.mark.parametrize("name", ON_CPU)
def test_on_the_cpu_torch_updates_one_parameter_after_the_other(name: str) -> None:
    _check(name, ON_CPU[name], torch.float32, is_cuda=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ON_CUDA)
def test_the_memory_on_a_gpu_is_what_the_allocator_counts(name: str, dtype: torch.dtype) -> None:
    parameters = [p.detach().cuda().requires_grad_() for p in _parameters(dtype)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    operands = [torch.ones(8, 8, device="cuda", dtype=torch.bfloat16)] * 2
    torch.addmm(torch.mm(*operands), *operands)  # for Muon: cuBLAS allocates its workspaces
    resident_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"]
    optimizers = ON_CUDA[name](parameters)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        for optimizer in optimizers:
            optimizer.step()
    stats = torch.cuda.memory_stats()
    state_bytes = stats["requested_bytes.all.current"] - resident_bytes
    predicted = optimizer_memory(
        name,
        list(map(tensor_meta, parameters)),
        gpu=find_device(local_gpu_name("cuda")),
        embedding_shapes=EMBEDDING_SHAPES,
    )
    assert state_bytes == pytest.approx(predicted.state_bytes, abs=SCALARS_BYTES)
    peak_bytes = stats["requested_bytes.all.peak"] - resident_bytes
    assert peak_bytes == pytest.approx(
        predicted.state_bytes + predicted.temporary_bytes, rel=0.005, abs=SCALARS_BYTES
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BITSANDBYTES)
def test_the_state_is_that_of_bitsandbytes(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only CUDA has unified memory: where bitsandbytes allocates some, there is a marker here, and
    the parameters are on the device "meta", which it takes for a GPU."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    unified: list[torch.Tensor] = []

    def allocate(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        unified.append(torch.empty(shape, dtype=dtype, device=device))
        return unified[-1]

    monkeypatch.setattr(bitsandbytes.functional, "get_paged", allocate)
    monkeypatch.setattr(bitsandbytes.functional, "fill", lambda *_: None)
    parameters = [parameter.detach().to("meta") for parameter in _parameters(dtype)]
    optimizer = getattr(bitsandbytes.optim, BITSANDBYTES[name])(parameters)
    for index, parameter in enumerate(parameters):
        optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)
    tensors = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    on_device = {id(t): t.nbytes for t in tensors if not any(t is other for other in unified)}
    assert sum(on_device.values()) == _predicted(name, dtype, is_cuda=True).state_bytes
    assert bool(unified) == ("paged" in name)


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", of_bitsandbytes())
def test_a_step_of_bitsandbytes_on_a_cpu(name: str) -> None:
    """Its kernels are no operators of torch, and its tables exist before the first step."""
    _check(name, of_bitsandbytes()[name], torch.float32, is_cuda=False, tables_bytes=2048)


def test_every_optimizer_is_compared() -> None:
    assert {*ON_CUDA, *BITSANDBYTES, "none"} == {*OPTIMIZERS}


def test_smaller_optimizers_have_less_memory() -> None:
    for name in OPTIMIZERS:
        memory = _predicted(name, torch.float32, is_cuda=True)
        for smaller in smaller_optimizers(name):
            other = _predicted(smaller, torch.float32, is_cuda=True)
            assert (
                other.state_bytes + other.temporary_bytes
                < memory.state_bytes + memory.temporary_bytes
            )
    assert smaller_optimizers("adamw") == ("adamw-fused", "adamw-8bit", "adamw-paged-8bit")
    assert smaller_optimizers("sgd") == ()


def test_another_name_is_refused_with_the_names() -> None:
    with pytest.raises(RematError, match="'adamax' is not known; use one of adamw, adamw-foreach"):
        optimizer_memory("adamax", [])
