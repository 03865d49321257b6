"""README.md and docs/ are true: the site builds, code runs, messages and figures are real."""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tests.helpers.doc_snippets import (
    ROOT,
    Block,
    Mismatch,
    Runner,
    blocks,
    check_syntax,
    compare_output,
    pages,
)
from tests.helpers.fork_server import CAPTURE, ForkServer
from tests.helpers.service import server as servers
from tests.helpers.service.server import Server

import remat
import remat.view

DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(ROOT)): blocks(page) for page in pages()}
BLOCKS = [block for page_blocks in PAGES.values() for block in page_blocks]
NOT_RUN = [block for block in BLOCKS if block.reason]
PORT = "8000"
"""The port of the service in the pages."""

LANGUAGES = {"python", "console", "text", "json", "yaml", "bash"}


# -- code ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `python` and `torchrun` are those of this source tree."""
    tools = tmp_path_factory.mktemp("bin")
    for name, module in {"python": [], "torchrun": ["-m", "torch.distributed.run"]}.items():
        write_tool(tools / name, [sys.executable, *module])
    path = os.pathsep.join((str(tools), os.environ["PATH"]))
    source = os.pathsep.join(map(str, (ROOT / "solver", ROOT / "server")))
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("REMAT_")},
        "PATH": path,
        "PYTHONPATH": source,
        "REMAT_CACHE_DIR": str(tmp_path_factory.mktemp("costs")),
        "REMAT_DATA_DIR": str(tmp_path_factory.mktemp("data")),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "120",
        "TERM": "dumb",
    }


def test_words_that_depend_on_measured_costs_may_differ() -> None:
    block = Block("page", 1, "text", "recompute 16 of 220 operations, once each\n")
    compare_output(block, "recompute 17 of 220 operations, 18 times in all")
    with pytest.raises(Mismatch, match="operations"):
        compare_output(block, "recompute nothing")


def write_tool(file: Path, words: list[str]) -> None:
    file.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    file.chmod(0o755)


@pytest.fixture(scope="module")
def remat_tool(environment: dict[str, str]) -> Iterator[None]:
    """The command `remat` of this source tree, without its start-up time."""
    forking = ForkServer(CAPTURE, environment)
    write_tool(Path(environment["PATH"].split(os.pathsep)[0], "remat"), forking.command)
    yield
    forking.close()


@pytest.fixture(scope="module")
def runner(environment: dict[str, str]) -> Iterator[Runner]:
    running = Runner(environment)
    yield running
    running.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.running(tmp_path_factory.mktemp("service")) as running:
        yield running


# Other tests run the same code: DDP, the command line, estimate, fit, service, emit, Transformers.
SLOW_PAGES = {
    "docs/tutorial.md",
    *(
        f"docs/how-to/{name}.md"
        for name in ("cli", "distributed", "estimate", "fit", "policies", "service")
    ),
    "docs/how-to/training-loops.md",
}


@pytest.mark.slow_cases(
    "docs/how-to/budget.md",
    "docs/how-to/tracing.md",
    "docs/index.md",
    "docs/how-to/split.md",
    "docs/how-to/look.md",
    "docs/how-to/randomness.md",
    "docs/how-to/infeasible.md",
    "docs/how-to/offload.md",
    "docs/how-to/compile.md",
)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page in SLOW_PAGES else [])
        for page, page_blocks in PAGES.items()
        if page_blocks
    ],
)
def test_code_of_every_page_runs(
    page: str, runner: Runner, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    page_blocks = PAGES[page]
    if any("remat" in block.commands for block in page_blocks if not block.reason):
        request.getfixturevalue("remat_tool")
    if any(PORT in block.text for block in page_blocks if not block.reason):
        port = request.getfixturevalue("server").url.rpartition(":")[2]
        page_blocks = [_elsewhere(block, port) for block in page_blocks]
    if any("curl" in block.commands for block in page_blocks) and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    error = runner.run(page_blocks, tmp_path)
    assert not error, error


def _elsewhere(block: Block, port: str) -> Block:
    text = re.sub(rf"(localhost|127\.0\.0\.1):{PORT}\b", rf"\1:{port}", block.text)
    return Block(block.page, block.line, block.language, text, block.reason, block.file)


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: f"{block.name} {block.reason}")
def test_code_that_is_not_run_is_well_formed(block: Block) -> None:
    check_syntax(block)
    assert len(block.reason) > 8, "a reason is a few words"


def test_every_block_has_a_language() -> None:
    """It is a language that is run, or one that is not code."""
    wrong = [
        block.name
        for block in BLOCKS
        if block.language not in LANGUAGES and not block.language.startswith("{")
    ]
    assert wrong == []
    scripts = [b.name for b in BLOCKS if b.language == "bash" and not b.reason]
    assert scripts == [], "```console is run, ```bash is not: say why"


def test_code_is_no_wider_than_the_page() -> None:
    """For Python, `ruff format` with docs/ruff.toml takes care of it."""
    wide = [
        f"{block.name}: {line}"
        for block in BLOCKS
        if block.language in ("python", "console")
        for line in block.text.splitlines()
        if len(line) > 100
    ]
    assert wide == []


# -- the site -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The HTML pages, built with warnings as errors."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    completed = subprocess.run([*command, str(DOCS), str(out)], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-5000:]
    return out


@pytest.mark.slow
def test_the_site_builds_and_needs_no_network(site: Path) -> None:
    """Check pages, and links between them; nothing is loaded from other sites."""
    html = {page: page.read_text() for page in site.rglob("*.html")}
    assert len(html) > 30
    ids = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in html.items()}
    for page, text in html.items():
        for tag, target in re.findall(r'<(\w+)[^>]*?\b(?:href|src)="([^"]+)"', text):
            if target.startswith(("http:", "https:", "mailto:", "data:")):
                assert tag == "a", f"{page.name} loads {target}"
                continue
            path, _, anchor = target.partition("#")
            linked_file = (page.parent / path.partition("?")[0]).resolve() if path else page
            assert linked_file.exists(), f"{page.name} links to {target}"
            if anchor and linked_file in ids:
                assert anchor in ids[linked_file], f"{page.name} links to {target}"


@pytest.mark.slow
def test_everything_public_is_documented(site: Path) -> None:
    html = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    for module in (remat, remat.view):
        for name in module.__all__:
            assert f'id="{module.__name__}.{name}"' in html, name


@pytest.mark.slow
def test_every_decision_is_listed(site: Path) -> None:
    listed = (site / "decisions.html").read_text()
    for decision in (DOCS / "decisions").glob("*.md"):
        assert f"decisions/{decision.stem}.html" in listed


# -- statements of the pages --------------------------------------------------------------------


def test_quoted_messages_are_in_the_source() -> None:
    """Check headings and first columns of the troubleshooting page; `...` stands for what
    varies."""
    source = "\n".join(_texts())
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    quoted += re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    assert len(quoted) > 40
    for message in quoted:
        for part in message.split("..."):
            assert part.strip() in source, f"nothing says {part.strip()!r} (of {message!r})"


def _texts() -> Iterator[str]:
    """Return the string literals of the source, with gaps of f-strings as `...`."""
    for folder in ("solver", "server"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_relative_links_lead_to_files() -> None:
    """Check README.md and the decisions, which Sphinx does not check."""
    for page in (ROOT / "README.md", *(DOCS / "decisions").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)|src=\"([^\"]+)\"", page.read_text()):
            path = target[0] or target[1]
            if not path.startswith("http"):
                assert (page.parent / path).exists(), f"{page.name} links to {path}"


def test_the_readme_has_the_measured_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "extensions")
    results = importlib.import_module("results")
    readme = (ROOT / "README.md").read_text()
    for row in results.markdown(results.TABLES["overhead"]()):
        assert row in readme.splitlines()
    rows = importlib.import_module("atlas_tables").readme_rows()
    assert rows
    for row in rows:
        assert "| " + " | ".join(row) + " |" in readme.splitlines()


# -- the pictures -------------------------------------------------------------------------------


def test_pictures_of_the_docs_are_up_to_date(tmp_path: Path) -> None:
    """After a change of the library's style the script has to draw them once more."""
    script = runpy.run_path(str(DOCS / "images" / "draw.py"))
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    trace = remat.measure(remat.trace(model, (torch.randn(64, 8),)), remat.Roofline("h200"))
    plan = remat.solve(trace, "100%")
    script["draw_plan"](plan, tmp_path)
    script["draw_offloading"](plan, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in (DOCS / "images").glob("*.svg")}
    for new_picture in tmp_path.iterdir():
        committed_picture = DOCS / "images" / new_picture.name
        assert _style(committed_picture) == _style(new_picture), (
            f"{new_picture.name} is old: python docs/images/draw.py"
        )
        assert _title(committed_picture) == _title(new_picture)


@pytest.mark.slow
def test_the_timeline_of_the_docs_is_below_eager_mode() -> None:
    picture_root = ElementTree.parse(DOCS / "images" / "timeline.svg").getroot()
    classes = {element.get("class") for element in picture_root.iter()}
    assert {"remat-baseline", "remat-activations", "remat-recomputed", "remat-budget"} <= classes
    words = picture_root.findtext(f"{_SVG}desc", "")
    match = re.search(r"peak ([\d.]+) GiB instead of ([\d.]+) GiB", words)
    assert match is not None
    assert float(match[1]) <= 0.501 * float(match[2]), "it is drawn for half of the memory"


_SVG = "{http://www.w3.org/2000/svg}"


def _style(path: Path) -> str | None:
    return ElementTree.parse(path).getroot().findtext(f"{_SVG}style")


def _title(path: Path) -> str | None:
    return ElementTree.parse(path).getroot().findtext(f"{_SVG}title")
