"""Kernels in C++, several to a file.

Inductor has a file for each of its kernels on the CPU, and calls the compiler for each: most of
what that takes is for the headers. It makes few and long kernels, of all that is between two calls
of libraries. Under a plan each is a call of its own (`versions.kernel_by_kernel`), so there are
more and shorter ones; here those of a graph share files. (Kernels of a GPT-2: 0.8 s of a core for
each by itself, 0.15 s in files of 16; g++ 12, 2026.)

Files are the same in each process that loads the same generated code, so that they are found in
Inductor's cache.
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

_MOST = 16
"""Kernels in a file: beyond, little is saved, and files compile beside each other."""

_LEAST = 4

_START = re.compile(r'\s*(#include\s*[<"][^\n]+[>"])\s*extern\s+"C"\s+void\s+kernel\(')
"""How a kernel begins that needs nothing but the one header."""

_CALLS = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdlib>
#include <stdexcept>
#include <type_traits>

static void* (*data_of)(PyObject*);

template <typename T> static T argument(PyObject* args, Py_ssize_t place) {
    PyObject* given = PyTuple_GET_ITEM(args, place);
    if constexpr (std::is_pointer_v<T>) {
        return static_cast<T>(data_of(given));
    } else {
        static_assert(std::is_same_v<std::remove_cv_t<T>, int64_t>);
        int64_t value = PyLong_AsLongLong(given);
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

_MODULE = """
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods};

PyMODINIT_FUNC PyInit_kernel(void) {
    const char* address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    if (address == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "torch did not say how to read tensors");
        return nullptr;
    }
    data_of = reinterpret_cast<decltype(data_of)>(std::strtoull(address, nullptr, 10));
    return PyModule_Create(&module);
}
"""


@dataclass(eq=False)
class _Kernel(CodeCacheFuture):
    """One that waits for the others of its graph. `alone` compiles it by itself."""

    types: Sequence[str]
    source: str
    alone: Callable[[], Any]

    def result(self, timeout: float | None = None) -> Any:
        """The function: for code that does not wait for all."""
        made = self.alone()
        return made.result() if isinstance(made, CodeCacheFuture) else made


@contextmanager
def several_to_a_file() -> Iterator[None]:
    """Kernels that are compiled or loaded meanwhile share files."""
    compiler: Any = AsyncCompile
    bind, wait = compiler.cpp_pybinding, compiler.wait

    def later(self: Any, argtypes: Sequence[str], source_code: str) -> Any:
        if _START.match(source_code) is None or source_code.count("#include") > 1:
            return bind(self, argtypes, source_code)
        return _Kernel(argtypes, source_code, lambda: bind(self, argtypes, source_code))

    def wait_for_all(self: Any, scope: dict[str, Any]) -> None:
        waiting = {name: made for name, made in scope.items() if isinstance(made, _Kernel)}
        scope.update(zip(waiting, _compiled(list(waiting.values())), strict=True))
        wait(self, scope)

    compiler.cpp_pybinding, compiler.wait = later, wait_for_all
    try:
        yield
    finally:
        compiler.cpp_pybinding, compiler.wait = bind, wait


def _compiled(kernels: Sequence[_Kernel]) -> list[Any]:
    """Their functions."""
    threads = config.compile_threads or config.decide_compile_threads()
    in_each = min(_MOST, max(_LEAST, -(-len(kernels) // threads)))
    files = -(-len(kernels) // in_each)
    parts = [kernels[number::files] for number in range(files)]
    # All begin before one is waited for, unless each would begin and end at once: torch submits
    # what it holds the lock of, which compiling waits for.
    begin = AsyncCompile.submit if threads > 1 else None
    loads: list[Any] = [
        CppPythonBindingsCodeCache.load_async(file_of(part), submit_fn=begin) for part in parts
    ]
    made: dict[_Kernel, Any] = {}
    for part, load in zip(parts, loads, strict=True):
        try:
            module = load()
        except Exception as error:
            logger.info("%d kernels are compiled one by one: %s", len(part), error)
            made.update((kernel, kernel.result()) for kernel in part)
        else:
            made.update((kernel, getattr(module, _name(n))) for n, kernel in enumerate(part))
    return [made[kernel] for kernel in kernels]


def file_of(kernels: Sequence[_Kernel]) -> str:
    """Their code, with a function for Python to call each."""
    includes: dict[str, None] = {}
    bodies: list[str] = []
    calls: list[str] = []
    for number, kernel in enumerate(kernels):
        name = _name(number)
        start = _START.match(kernel.source)
        assert start is not None
        includes[start[1]] = None
        bodies.append(f"static void {name}({kernel.source[start.end() :]}")
        given = ", ".join(f"argument<{each}>(args, {n})" for n, each in enumerate(kernel.types))
        calls.append(
            f"static PyObject* call_{name}(PyObject*, PyObject* args) {{\n"
            f"    return call(args, {len(kernel.types)}, [&] {{ {name}({given}); }});\n}}"
        )
    rows = [f'    {{"{n}", call_{n}, METH_VARARGS, ""}},' for n in map(_name, range(len(kernels)))]
    methods = ["static PyMethodDef methods[] = {", *rows, "    {nullptr, nullptr, 0, nullptr}};"]
    return "\n".join([*includes, *bodies, _CALLS, *calls, *methods, _MODULE])


def _name(number: int) -> str:
    return f"kernel{number}"
