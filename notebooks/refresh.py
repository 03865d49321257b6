"""Run the notebooks from start to end, and write what they show.

    python -m notebooks.refresh                     # all of them
    python -m notebooks.refresh 03 05               # those whose names begin so

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
_LEFT_OUT = ("execution", "jupyter", "vscode")
"""Of a cell's metadata: times of the run and what editors leave."""


class _ThisPython(KernelSpecManager):
    """Whatever kernels are installed for the user: notebooks run with the Python that asks."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


def sources() -> list[Path]:
    """The notebooks as Python files, in order."""
    return sorted(FOLDER.glob("[0-9]*.py"))


def read_source(path: Path) -> NotebookNode:
    """A `.py` file as a notebook without outputs. Cell ids are numbers, so that they stay."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell.source = cell.source.strip("\n")
        cell["id"] = f"cell-{number:02}"
    return notebook


def execute(notebook: NotebookNode, **settings: str) -> NotebookNode:
    """Run every cell in a new kernel, in an empty folder, with caches of its own; the outputs are
    written into `notebook`. `settings` are added to the environment.

    Raises `CellExecutionError` at the first cell that fails.
    """
    with tempfile.TemporaryDirectory(prefix="remat-notebook-") as scratch:
        work = Path(scratch, "work")
        work.mkdir()
        paths = [str(_ROOT / "solver"), str(_ROOT / "server"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "IPYTHONDIR": str(Path(scratch, "ipython")),
            "REMAT_CACHE_DIR": str(Path(scratch, "cache")),
            "PYTHONWARNINGS": "ignore:IProgress not found",  # transformers' bars; none are shown
            **settings,
        }
        kernel = AsyncKernelManager(
            kernel_spec_manager=_ThisPython(),
            connection_file=str(Path(scratch, "kernel.json")),
            shutdown_wait_time=30.0,  # what a notebook has started ends with its kernel
            transport="tcp" if sys.platform == "win32" else "ipc",  # nobody else can listen
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
    """Leave out what differs from run to run and tells nothing."""
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        for name in _LEFT_OUT:
            cell.metadata.pop(name, None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the notebooks that are named, or all, and write their `.ipynb`."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.refresh", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="what the names begin with; all by default")
    wanted = tuple(parser.parse_args(argv).names) or ("",)
    for path in sources():
        if not path.name.startswith(wanted):
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
