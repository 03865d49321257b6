"""Compilation of several generated C++ kernels in one file.

On the CPU, Inductor writes one file for each kernel and calls the compiler for each; most of that
time goes into headers. It has few and long kernels, as one call contains all work between two
extern kernels. Under a plan each kernel is a call of its own (`separate_cpu_kernel_calls`),
so there are more and shorter ones; here those of a graph share files. (Kernels of a GPT-2: 0.8 s of
a core for each in its own file, 0.15 s in files of 16; g++ 12, 2026.)

The files are the same in each process that loads the same generated code, so that Inductor's cache
contains them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CodeCacheFuture, CppPythonBindingsCodeCache

logger = logging.getLogger("remat")

_MAX_KERNELS_PER_FILE = 16
"""Larger files save little, and several files compile in parallel."""

_MIN_KERNELS_PER_FILE = 4

_KERNEL_START = re.compile(r'\s*(#include\s*[<"][^\n]+[>"])\s*extern\s+"C"\s+void\s+kernel\(')
"""The start of a kernel's source that consists of one header and one function."""

_PYTHON_CALL_HELPERS = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdlib>
#include <stdexcept>
#include <type_traits>

static void* (*data_of)(PyObject*);

template <typename T> static T argument(PyObject* args, Py_ssize_t index) {
    PyObject* object = PyTuple_GET_ITEM(args, index);
    if constexpr (std::is_pointer_v<T>) {
        return static_cast<T>(data_of(object));
    } else {
        static_assert(std::is_same_v<std::remove_cv_t<T>, int64_t>);
        int64_t value = PyLong_AsLongLong(object);
        if (value == -1 && PyErr_Occurred()) throw std::runtime_error("an argument is no integer");
        return value;
    }
}

template <typename Run> static PyObject* call(PyObject* args, Py_ssize_t count, Run run) {
    if (!PyTuple_CheckExact(args) || PyTuple_GET_SIZE(args) != count) {
        PyErr_Format(PyExc_RuntimeError, "the kernel takes %zd arguments", count);
        return nullptr;
    }
    try {
        run();
        Py_RETURN_NONE;
    } catch (std::exception const& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
    }
    return nullptr;
}
"""

_MODULE_SUFFIX = """
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods};

PyMODINIT_FUNC PyInit_kernel(void) {
    const char* address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    if (address == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR is not set");
        return nullptr;
    }
    data_of = reinterpret_cast<decltype(data_of)>(std::strtoull(address, nullptr, 10));
    return PyModule_Create(&module);
}
"""


@dataclass(eq=False)
class _PendingKernel(CodeCacheFuture):
    """A C++ kernel whose compilation waits for the other kernels of its graph.

    `compile_alone` compiles it in a file of its own.
    """

    argument_types: Sequence[str]
    source: str
    compile_alone: Callable[[], Any]

    def result(self, timeout: float | None = None) -> Any:
        """Compile the kernel in a file of its own and return the function, for code that does not
        wait for the whole graph."""
        function = self.compile_alone()
        return function.result() if isinstance(function, CodeCacheFuture) else function


@contextmanager
def batched_cpp_files() -> Iterator[None]:
    """Let C++ kernels that are compiled or loaded inside of this context share files."""
    compiler: Any = AsyncCompile
    original_bind, original_wait = compiler.cpp_pybinding, compiler.wait

    def bind_later(self: Any, argtypes: Sequence[str], source_code: str) -> Any:
        if _KERNEL_START.match(source_code) is None or source_code.count("#include") > 1:
            return original_bind(self, argtypes, source_code)
        return _PendingKernel(
            argtypes, source_code, lambda: original_bind(self, argtypes, source_code)
        )

    def wait_for_all(self: Any, scope: dict[str, Any]) -> None:
        pending = {name: item for name, item in scope.items() if isinstance(item, _PendingKernel)}
        scope.update(zip(pending, _compile_cpp_kernels(list(pending.values())), strict=True))
        original_wait(self, scope)

    compiler.cpp_pybinding, compiler.wait = bind_later, wait_for_all
    try:
        yield
    finally:
        compiler.cpp_pybinding, compiler.wait = original_bind, original_wait


def _compile_cpp_kernels(kernels: Sequence[_PendingKernel]) -> list[Any]:
    """Compile C++ kernels, up to 16 in a file, and return their functions in the same order. If a
    file fails, its kernels are compiled separately."""
    threads = config.compile_threads or config.decide_compile_threads()
    per_file = min(_MAX_KERNELS_PER_FILE, max(_MIN_KERNELS_PER_FILE, -(-len(kernels) // threads)))
    num_files = -(-len(kernels) // per_file)
    files = [kernels[index::num_files] for index in range(num_files)]
    # Start all files before waiting for one. Not with one thread: there `submit` compiles at once,
    # while torch holds the lock that the compilation needs.
    submit = AsyncCompile.submit if threads > 1 else None
    loaders: list[Any] = [
        CppPythonBindingsCodeCache.load_async(batched_cpp_source(file), submit_fn=submit)
        for file in files
    ]
    functions: dict[_PendingKernel, Any] = {}
    for file, load in zip(files, loaders, strict=True):
        try:
            module = load()
        except Exception as error:
            logger.info(
                "compiling %d kernels separately, as their file failed: %s", len(file), str(error)
            )
            functions.update((kernel, kernel.result()) for kernel in file)
        else:
            functions.update(
                (kernel, getattr(module, _cpp_function_name(n))) for n, kernel in enumerate(file)
            )
    return [functions[kernel] for kernel in kernels]


def batched_cpp_source(kernels: Sequence[_PendingKernel]) -> str:
    """Return the C++ source of a Python extension module with one function for each kernel."""
    includes: dict[str, None] = {}
    bodies: list[str] = []
    wrappers: list[str] = []
    for index, kernel in enumerate(kernels):
        name = _cpp_function_name(index)
        start = _KERNEL_START.match(kernel.source)
        assert start is not None
        includes[start[1]] = None
        bodies.append(f"static void {name}({kernel.source[start.end() :]}")
        types = kernel.argument_types
        arguments = ", ".join(f"argument<{type_}>(args, {n})" for n, type_ in enumerate(types))
        wrappers.append(
            f"static PyObject* call_{name}(PyObject*, PyObject* args) {{\n"
            f"    return call(args, {len(types)}, [&] {{ {name}({arguments}); }});\n}}"
        )
    names = map(_cpp_function_name, range(len(kernels)))
    rows = [f'    {{"{name}", call_{name}, METH_VARARGS, ""}},' for name in names]
    methods = ["static PyMethodDef methods[] = {", *rows, "    {nullptr, nullptr, 0, nullptr}};"]
    return "\n".join(
        [*includes, *bodies, _PYTHON_CALL_HELPERS, *wrappers, *methods, _MODULE_SUFFIX]
    )


def _cpp_function_name(index: int) -> str:
    return f"kernel{index}"
