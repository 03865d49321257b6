"""C++ kernels that are compiled in one file behave like separately compiled ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.cpp_compiler import needs_compiler
from torch._inductor import codecache, config
from torch._inductor.async_compile import AsyncCompile

from remat.frontend.compile.inductor.cpp_batching import batched_cpp_files

pytestmark = needs_compiler

SCALE = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* x, float* y, const int64_t n)
{
    if (n < 0) throw std::runtime_error("there are fewer than none");
    for (int64_t i = 0; i < n; ++i) y[i] = FACTOR * x[i];
}
"""
DOUBLE, TRIPLE = (SCALE.replace("FACTOR", factor) for factor in "23")
POINTERS = ["const float*", "float*", "const int64_t"]
FILL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* y, float value)
{
    y[0] = value;
}
"""
HELPED = DOUBLE.replace('extern "C"', 'static float two = 2;\nextern "C"').replace("2 *", "two *")


def compiled(*kernels: tuple[list[str], str]) -> list[Any]:
    """Compile kernels as Inductor's generated code requests it."""
    with batched_cpp_files():
        compiler = AsyncCompile()
        scope = {str(n): compiler.cpp_pybinding(*kernel) for n, kernel in enumerate(kernels)}
        compiler.wait(scope)
    return list(scope.values())


def scaled(kernel: Any) -> list[float]:
    x, y = torch.tensor([1.0, 2.0]), torch.zeros(2)
    kernel(x, y, 2)
    return y.tolist()


def file_of(kernel: Any) -> str:
    return kernel.__self__.__file__


def test_several_kernels_are_compiled_into_one_file() -> None:
    """A second request finds them in that file."""
    kernels = (POINTERS, DOUBLE), (POINTERS, TRIPLE), (POINTERS, DOUBLE)
    double, triple, second_double = compiled(*kernels)
    assert scaled(double) == scaled(second_double) == [2, 4]
    assert scaled(triple) == [3, 6]
    assert file_of(double) == file_of(triple)
    assert [*map(file_of, compiled(*kernels))] == [file_of(double)] * 3
    with pytest.raises(RuntimeError, match="fewer than none"):
        double(torch.zeros(1), torch.zeros(1), -1)
    with pytest.raises(RuntimeError, match="takes 3 arguments"):
        double(torch.zeros(1))
    with pytest.raises(RuntimeError, match="no integer"):
        double(torch.zeros(1), torch.zeros(1), "1")


@pytest.mark.slow
def test_kernels_that_cannot_be_batched_are_compiled_separately() -> None:
    """A kernel with more than one function is not batched; where the compiler refuses a file, its
    kernels are compiled one by one. (Symbols that are not sizes are left to Inductor.)"""
    double, helped = compiled((POINTERS, DOUBLE), (POINTERS, HELPED))
    assert scaled(double) == scaled(helped) == [2, 4]
    assert file_of(double) != file_of(helped)
    triple, fill = compiled((POINTERS, TRIPLE), (["float*", "float"], FILL))
    fill(y := torch.zeros(1), 1.5)
    assert scaled(triple) == [3, 6]
    assert y.item() == 1.5
    assert file_of(triple) != file_of(fill)


@pytest.mark.slow
def test_one_compile_thread_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with one core, where nothing is compiled concurrently."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(codecache, "LOCK_TIMEOUT", 120)  # as a kernel would wait for its own thread
    with config.patch(compile_threads=1):
        seven, nine = (SCALE.replace("FACTOR", factor) for factor in "79")
        by_seven, by_nine = compiled((POINTERS, seven), (POINTERS, nine))
    assert scaled(by_seven) == [7, 14]
    assert scaled(by_nine) == [9, 18]
    assert file_of(by_seven) == file_of(by_nine)
