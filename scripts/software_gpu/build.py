"""Build of the software GPU's library with the system's C compiler.

The library replaces `libcuda.so.1` and, preloaded, the CUDA runtime and cuBLAS of a CUDA build of
torch. The headers are those of that build (`nvidia/cu13/include`), so that each declaration is
checked by the compiler. For functions of the three libraries that are not implemented, stubs are
generated that fail with their name.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

RUNTIME = Path(__file__).with_name("runtime")
DRIVER_LIBRARY, NVML_LIBRARY = "libcuda.so.1", "libnvidia-ml.so.1"
REPLACED = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13")
COMPILER = (
    "cc", "-std=gnu11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror",
    "-Wno-unused-parameter",
)  # fmt: skip

_DECLARATION = re.compile(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(")


class BuildError(Exception):
    """The library cannot be built; the message says what is missing."""


def build_library(site_packages: Path | None = None, cache: Path | None = None) -> Path:
    """Return the folder with the two libraries, built if no earlier build has the same sources.

    `site_packages` is the folder of installed packages with the CUDA headers, by default that of
    this Python; `cache` is the folder of earlier builds. Raises BuildError if the headers or the
    compiler are missing.
    """
    cuda = (site_packages or Path(sysconfig.get_path("purelib"))) / "nvidia" / "cu13"
    include = cuda / "include"
    if not (include / "cuda_runtime_api.h").exists():
        raise BuildError(
            f"no CUDA 13 headers in {include}: install a CUDA build of torch, or the package "
            "nvidia-cuda-runtime"
        )
    sources = sorted(RUNTIME.glob("*.c"))
    digest = hashlib.sha256(f"{COMPILER} {cuda}".encode())
    for path in [*sources, *sorted(RUNTIME.rglob("*.h")), Path(__file__)]:
        digest.update(path.read_bytes())
    folder = (cache or _default_cache()) / digest.hexdigest()[:16]
    if (folder / DRIVER_LIBRARY).exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        _build(Path(temporary), sources, cuda)
        folder.mkdir(exist_ok=True)
        for name in (NVML_LIBRARY, DRIVER_LIBRARY):  # the last one marks the build as complete
            Path(temporary, name).replace(folder / name)
    return folder


def site_packages_of(python: str) -> Path:
    """Return the folder of the packages that are installed for this Python."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([python, "-c", code], text=True).strip())


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "remat" / "software-gpu"


def _build(folder: Path, sources: Iterable[Path], cuda: Path) -> None:
    (nvml,) = (path for path in sources if path.name == "nvml.c")
    _compile([nvml], folder / NVML_LIBRARY)
    options = ["-fvisibility=hidden", f"-I{RUNTIME}", f"-isystem{cuda / 'include'}"]
    implemented = [path for path in sources if path != nvml]
    library = folder / DRIVER_LIBRARY
    _compile(implemented, library, *options)
    stubs = folder / "stubs.c"
    stubs.write_text(stub_source(missing_entry_points(library, cuda)))
    _compile([*implemented, stubs], library, *options)


def _compile(sources: Iterable[Path], output: Path, *options: str) -> None:
    command = [*COMPILER, *options, "-o", str(output), *map(str, sources), "-ldl", "-lpthread"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BuildError("no C compiler: install gcc (its command `cc`)") from None
    if completed.returncode:
        raise BuildError(f"the compiler failed:\n{completed.stderr[-4000:]}")


def missing_entry_points(library: Path, cuda: Path) -> list[str]:
    """Return the functions of the replaced libraries and of the driver that `library` lacks."""
    declared = set(_DECLARATION.findall((cuda / "include" / "cuda.h").read_text()))
    for name in REPLACED:
        path = cuda / "lib" / name
        if path.exists():
            declared |= exported_functions(path)
    implemented = exported_functions(library)
    versions = ("", "_v2", "_v3")
    return sorted(n for n in declared if not any(n + v in implemented for v in versions))


def exported_functions(library: Path) -> set[str]:
    """Return the names of the functions that a shared library exports, without versions."""
    command = ["nm", "-D", "--defined-only", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in listing.splitlines())
    return {row[-1].partition("@")[0] for row in rows if len(row) == 3 and row[1] in "TWi"}


def stub_source(names: Iterable[str]) -> str:
    """Return C source in which each of these functions reports its name and returns an error."""
    lines = [
        "int unimplemented(const char *entry_point);",
        "#define STUB(name) \\",
        '  __attribute__((visibility("default"))) int name(void) { return unimplemented(#name); }',
    ]
    return "\n".join([*lines, *(f"STUB({name})" for name in names), ""])
