"""Run the notebooks from start to end, and write their outputs.

    python -m notebooks.refresh                     # all of them
    python -m notebooks.refresh 03 05               # those whose names begin with 03 or 05

The `.py` files are the source. Each becomes the `.ipynb` of the same name, with its outputs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
CELL_LIMIT_S = 120
_ROOT = FOLDER.parent
_REMOVED_METADATA = ("execution", "jupyter", "vscode")
"""Metadata of cells that is not stored: times of the run, and the editors' own."""


class _ThisPython(KernelSpecManager):
    """Selects the running Python as the kernel, whatever kernels the user has installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


def sources() -> list[Path]:
    """Return the notebooks' `.py` files, in order."""
    return sorted(FOLDER.glob("[0-9]*.py"))


def read_source(path: Path) -> NotebookNode:
    """Return a `.py` file as a notebook without outputs. Cell ids are stable: their numbers."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell.source = cell.source.strip("\n")
        cell["id"] = f"cell-{number:02}"
    return notebook


def execute(notebook: NotebookNode, **settings: str) -> NotebookNode:
    """Run every cell in a new kernel, in an empty folder with empty caches.

    The outputs are written into `notebook`. `settings` are added to the environment. Raises
    `CellExecutionError` at the first cell that fails.
    """
    with tempfile.TemporaryDirectory(prefix="remat-notebook-") as scratch:
        work = Path(scratch, "work")
        work.mkdir()
        paths = [str(_ROOT / "solver"), str(_ROOT / "server"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "IPYTHONDIR": str(Path(scratch, "ipython")),
            "REMAT_CACHE_DIR": str(Path(scratch, "cache")),
            "PYTHONWARNINGS": "ignore:IProgress not found",  # from transformers
            **settings,
        }
        kernel = AsyncKernelManager(
            kernel_spec_manager=_ThisPython(),
            connection_file=str(Path(scratch, "kernel.json")),
            shutdown_wait_time=30.0,  # processes started by a notebook end with its kernel
            transport="tcp" if sys.platform == "win32" else "ipc",  # not reachable by other users
        )
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=CELL_LIMIT_S,
            coalesce_streams=True,
            resources={"metadata": {"path": str(work)}},
        )
        client.execute(env=environment, cleanup_kc=True)
    _clean(notebook)
    return notebook


def _clean(notebook: NotebookNode) -> None:
    """Remove metadata that differs from run to run."""
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        for name in _REMOVED_METADATA:
            cell.metadata.pop(name, None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named notebooks, or all, and write their `.ipynb` files."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.refresh", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="beginnings of names; default: all")
    prefixes = tuple(parser.parse_args(argv).names) or ("",)
    for path in sources():
        if not path.name.startswith(prefixes):
            continue
        began = time.monotonic()
        notebook = execute(read_source(path))
        target = path.with_suffix(".ipynb")
        nbformat.write(notebook, target)
        size_kb = target.stat().st_size / 1e3
        print(f"{target.name}: {time.monotonic() - began:.0f} s, {size_kb:.0f} kB", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
