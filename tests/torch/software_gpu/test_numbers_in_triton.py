"""Triton's interpreter with libdevice on the host: it needs Triton, and no CUDA build of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.helpers.paths import ROOT
from torch import Tensor

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "acos": torch.acos,
    "asinh": torch.asinh,
    "ceil": torch.ceil,
    "cosh": torch.cosh,
    "cyl_bessel_i0": torch.special.i0,
    "erf": torch.erf,
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "lgamma": torch.lgamma,
    "llrint": torch.round,
    "log1p": torch.log1p,
    "nearbyint": torch.round,
    "rsqrt": torch.rsqrt,
    "signbit": torch.signbit,
    "sin": torch.sin,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
}
KERNELS = """
import json, sys, torch, triton
import triton.language as tl
from scripts.software_gpu.numbers import interpreter

interpreter.patch()
from torch._inductor.runtime.triton_helpers import libdevice

"""
KERNEL = """
@triton.jit
def {name}_kernel(x_ptr, y_ptr, n: tl.constexpr):
    i = tl.arange(0, n)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, libdevice.{name}(x).to(tl.float32))

"""
MAIN = """
@triton.jit
def pow_kernel(x_ptr, y_ptr, n: tl.constexpr):
    i = tl.arange(0, n)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, libdevice.pow(tl.abs(x), 2.5) + libdevice.fmod(x, 0.25))

@triton.jit
def atomic_kernel(x_ptr, y_ptr, n: tl.constexpr):
    row = tl.full([1, 1], 0, tl.int32)
    column = tl.arange(0, n)[None, :]
    value = tl.full([1, 1], 2.0, tl.float32)
    tl.atomic_add(y_ptr + row + column, tl.broadcast_to(value, [1, n]), row == 0)

x = torch.tensor(json.loads(sys.argv[1]))
results = {}
for name in json.loads(sys.argv[2]):
    y = torch.zeros_like(x)
    globals()[f"{name}_kernel"][(1,)](x, y, len(x))
    results[name] = y.tolist()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    torch.manual_seed(0)
    return (torch.rand(64) * 1.9 - 0.95).abs() + 0.01


@pytest.fixture(scope="module")
def results(inputs: Tensor, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Results of each kernel, in a process of its own: TRITON_INTERPRET is read once."""
    path = Path(tmp_path_factory.mktemp("triton"), "kernels.py")
    path.write_text(KERNELS + "".join(KERNEL.format(name=name) for name in FUNCTIONS) + MAIN)
    names = json.dumps([*FUNCTIONS, "pow", "atomic"])
    completed = subprocess.run(
        [sys.executable, "-W", "ignore", str(path), json.dumps(inputs.tolist()), names],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_libdevice_in_a_kernel(
    name: str, inputs: Tensor, results: dict[str, list[float]]
) -> None:
    torch.testing.assert_close(torch.tensor(results[name]), FUNCTIONS[name](inputs).float())


def test_functions_of_two_arguments_take_numbers(
    inputs: Tensor, results: dict[str, list[float]]
) -> None:
    expected = inputs.pow(2.5) + inputs.fmod(0.25)
    torch.testing.assert_close(torch.tensor(results["pow"]), expected)


def test_atomic_additions_of_a_broadcast_block_add_every_element(
    results: dict[str, list[float]],
) -> None:
    assert results["atomic"] == [2.0] * 64
