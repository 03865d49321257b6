"""Operations whose CUDA kernel is not called: outputs are allocated for the CPU's results.

Their workspaces on CUDA are missing from the memory statistics. There are three reasons:

- The sizes of the outputs are known only from the results, which CUDA kernels read back.
- NVIDIA's library for the operation (cuSOLVER, cuFFT, batched cuBLAS) needs a device.
- The kernel passes a number on the device to another operation, which torch's binding to Python
  cannot represent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from scripts.software_gpu.numbers.operators import Operator, words
from torch import Tensor

Allocation = Callable[[Operator, Mapping[str, Any], Any], Any]


def _allocated(operator: Operator, arguments: Mapping[str, Any], results: Any) -> Any:
    """Return the outputs, on the device and with the sizes and strides of the results."""
    written = [arguments[name] for name in operator.outputs]
    if written:
        results = results if isinstance(results, tuple) else (results,)
        outputs = [o.resize_(r.size()) for o, r in zip(written, results, strict=True)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
    device = next(v.device for v in arguments.values() if isinstance(v, Tensor) and v.is_cuda)
    if isinstance(results, Tensor):
        return _like(results, device)
    return tuple(_like(r, device) if isinstance(r, Tensor) else r for r in results)


def _like(result: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)


def _nonzero(operator: Operator, arguments: Mapping[str, Any], results: Tensor) -> Tensor:
    """Return the output of `nonzero`, whose dimensions are outermost in memory on CUDA."""
    if operator.outputs:
        return _allocated(operator, arguments, results)
    sizes = results.size()[::-1]
    return torch.empty(sizes, dtype=results.dtype, device=arguments["self"].device).t()


_SIZES_ARE_RESULTS = words("_unique _unique2 unique_dim unique_consecutive unique_dim_consecutive")
_LIBRARY_NEEDS_A_DEVICE = words(
    """
    _fft_c2c _fft_c2r _fft_r2c
    cholesky cholesky_inverse _cholesky_solve_helper geqrf ormqr triangular_solve
    linalg_cholesky_ex linalg_eig linalg_eigvals _linalg_eigvals _linalg_eigh _linalg_svd linalg_qr
    linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_inv_ex _linalg_solve_ex _linalg_det
    _linalg_slogdet linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq
    linalg_householder_product linalg_solve_triangular
    """
)
_NUMBER_ON_THE_DEVICE = words("pow.Scalar pow.Scalar_out")

ALLOCATIONS: dict[str, Allocation] = {
    "nonzero": _nonzero,
    **dict.fromkeys(_SIZES_ARE_RESULTS, _allocated),
    **dict.fromkeys(_LIBRARY_NEEDS_A_DEVICE, _allocated),
    **dict.fromkeys(_NUMBER_ON_THE_DEVICE, _allocated),
}
"""Functions that allocate the outputs, by the name of the operation, with the overload where only
that one is meant."""


def allocation_of(name: str) -> Allocation | None:
    """Return the function that allocates the outputs of `aten::...`, if it is one of these."""
    name = name.removeprefix("aten::")
    return ALLOCATIONS.get(name) or ALLOCATIONS.get(name.partition(".")[0])
