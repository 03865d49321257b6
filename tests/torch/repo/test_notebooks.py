"""The notebooks run from start to end, and show their outputs."""

from __future__ import annotations

import getpass
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("jupytext")

import nbformat
from nbformat import NotebookNode
from notebooks.refresh import execute, read_source, sources

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_core"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq"),
]

LIMIT_S = 90.0
LIMIT_BYTES = 1_000_000
NAMES = [path.stem for path in sources()]
SLOW = ("01", "02", "03", "05")
"""Notebooks whose models, sweeps and services other tests and pages also run."""

_PLACES = re.compile(r"/home/|/root/|/Users/|/tmp/|/var/folders/|[A-Z]:\\\\|site-packages")


def source(name: str) -> Path:
    return next(path for path in sources() if path.stem == name)


def committed(name: str) -> NotebookNode:
    return nbformat.read(source(name).with_suffix(".ipynb"), as_version=4)


def test_there_are_five_notebooks() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_match_their_source(name: str) -> None:
    cells = [(cell.cell_type, cell.source) for cell in read_source(source(name)).cells]
    shown = committed(name)
    assert [(cell.cell_type, cell.source) for cell in shown.cells] == cells, (
        f"{name}.ipynb is not what {name}.py makes: run `python -m notebooks.refresh {name[:2]}`"
    )
    nbformat.validate(shown)


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebooks_have_outputs_and_no_machine_names(name: str) -> None:
    shown = committed(name)
    code = [cell for cell in shown.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    text = nbformat.writes(shown)
    assert len(text.encode()) < LIMIT_BYTES
    match = _PLACES.search(text)
    assert match is None, text[max(0, match.start() - 80) : match.end() + 80]
    user = getpass.getuser()
    assert user == "root" or not re.search(rf"\b{re.escape(user)}\b", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n.startswith(SLOW) else []) for n in NAMES],
)
def test_every_notebook_runs_from_start_to_end(name: str) -> None:
    began = time.monotonic()
    notebook = execute(read_source(source(name)))
    assert time.monotonic() - began < LIMIT_S
    assert not [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr"
    ]
