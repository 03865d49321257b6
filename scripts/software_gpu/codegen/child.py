"""Code generation in a process of its own, where the stubs reach nothing else.

    python -m scripts.software_gpu.codegen.child FOLDER   # reads and writes files in FOLDER

The process imports torch and Triton once; a fork of it handles each GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from scripts.software_gpu.codegen.gpus import GPUS, Gpu
from scripts.software_gpu.codegen.results import CodegenRequest, CodegenResult

ROOT = Path(__file__).parents[3]
REQUEST, RESULT = "request.json", "result-{gpu}.json"


class CodegenError(Exception):
    """The child process failed. A kernel that does not compile is a result, not an error."""


def is_available() -> bool:
    """True if Triton is installed, with its compiler for NVIDIA's GPUs. Imports nothing."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas").exists()


def generate_code(
    request: CodegenRequest, *, python: str = sys.executable, timeout_s: float = 600
) -> list[CodegenResult]:
    """Plan and compile what a request names, for each of its GPUs.

    `python` is an interpreter with torch, Triton and remat; a CPU build of torch is enough. Raises
    `CodegenError` if a model cannot be planned, or the process fails.
    """
    with tempfile.TemporaryDirectory(prefix="remat-codegen-") as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(asdict(request)))
        command = [python, "-m", "scripts.software_gpu.codegen.child", name]
        try:
            completed = subprocess.run(
                command, cwd=ROOT, env=_environment(folder), timeout=timeout_s, check=False,
                capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise CodegenError(f"no result after {timeout_s:g} s") from error
        files = [folder / RESULT.format(gpu=gpu) for gpu in request.gpus]
        if completed.returncode or not all(file.exists() for file in files):
            raise CodegenError(
                f"the process ended with {completed.returncode}:\n{completed.stderr[-4000:]}"
            )
        return [CodegenResult.from_json(json.loads(file.read_text())) for file in files]


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of the child: empty caches, and the modules of this repository."""
    search_path = [str(ROOT), str(ROOT / "solver"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        "REMAT_CACHE_DIR": str(folder / "remat"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def main(folder: Path) -> int:
    """Handle the request in a folder."""
    request = CodegenRequest.from_json(json.loads((folder / REQUEST).read_text()))
    gpus = [GPUS[key] for key in request.gpus]
    # Imported before the fork.
    from scripts.software_gpu.codegen import compiling, cuda_stubs, planning  # noqa: F401

    context = multiprocessing.get_context("fork")
    for gpu in gpus:
        process = context.Process(target=_handle, args=(request, gpu, folder))
        process.start()
        process.join()
        if process.exitcode != 0:
            return 1
    return 0


def _handle(request: CodegenRequest, gpu: Gpu, folder: Path) -> None:
    """Plan and compile for one GPU, and write the result."""
    from scripts.software_gpu.codegen.compiling import compile_kernels
    from scripts.software_gpu.codegen.cuda_stubs import install_device_guard, install_triton_driver
    from scripts.software_gpu.codegen.planning import PlannedModel, plan_model

    install_device_guard()
    install_triton_driver(gpu)
    began_s = time.perf_counter()
    planned = PlannedModel() if request.model is None else plan_model(request.model, gpu)
    sources = (*planned.sources, *request.sources)
    planned_s = time.perf_counter()
    binaries, failures = compile_kernels(sources, gpu)
    result = CodegenResult(
        gpu=gpu.name,
        architecture=gpu.architecture,
        graphs=tuple(planned.graphs),
        infeasible=tuple(planned.infeasible),
        sources=sources,
        binaries=binaries,
        failures=failures,
        planning_s=planned_s - began_s,
        compiling_s=time.perf_counter() - planned_s,
    )
    (folder / RESULT.format(gpu=gpu.key)).write_text(json.dumps(result.to_json()))


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
