"""The code blocks of README.md and docs/: parse them and run them.

Blocks of one page run in order, in one namespace and one new directory: ```python is executed,
of ```console the lines that begin with `$ ` are run by bash, and a `{code-block}` with a caption
is written to a file of that name. A block that cannot run has the reason in a comment before it:

    <!-- not run: installs packages -->

A ```text block below one that was run shows its output, as the lines without `$ ` do: every word
of it must be in the real output. Numbers may differ, and so may what depends on measured costs, as
in "once each" of a plan; `...` stands for any text.

`python -m tests.helpers.doc_snippets` is the process that runs pages. It imports torch once and
forks for each page.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.helpers.fork_server import CAPTURE
from tests.helpers.paths import ROOT

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})(.*)$")
_REASON = re.compile(r"<!-- not run: (.+) -->")
_WORD = re.compile(r"[a-z][a-z_]{3,}", re.IGNORECASE)
_MEASURED = re.compile(
    r", once each$|, [\d,]+ times in all$|optimal: proved within the requested gap|"
    r"feasible: fits the budget"
)
"""Words of a plan that depend on measured costs: on a busy machine, another schedule is better, or
the proof does not end in time."""

_SHOWN = "text"


@dataclass(frozen=True)
class Block:
    """A fenced block: `line` is the line number of its first line of code, `reason` why it is
    not run, `file` the path to write it to."""

    page: str
    line: int
    language: str
    text: str
    reason: str = ""
    file: str = ""

    @property
    def name(self) -> str:
        """The name of the block in messages."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> str:
        """The commands of a console block."""
        typed = [line[2:] for line in self.text.splitlines() if line.startswith(("$ ", "> "))]
        return "\n".join(typed)

    @property
    def shown(self) -> str:
        """The output that a console or text block shows."""
        if self.language == _SHOWN:
            return self.text
        return "\n".join(x for x in self.text.splitlines() if not x.startswith(("$ ", "> ")))


def pages() -> list[Path]:
    """Return README.md and the pages of the documentation, without the decisions, which are
    history."""
    page_files = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(page for page in page_files if page.parent.name != "decisions")]


def blocks(page: Path) -> list[Block]:
    """Return every fenced block of a page, in order."""
    collected: list[Block] = []
    lines = page.read_text().splitlines()
    name = str(page.relative_to(ROOT))
    reason = ""
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        match = _FENCE.match(line)
        if match is None:
            if not_run_comment := _REASON.search(line):
                reason = not_run_comment[1]
            elif line.strip():
                reason = ""
            continue
        indent, fence, words = match[1], match[2], match[3].strip()
        start = number
        while number < len(lines) and lines[number].strip() != fence:
            number += 1
        body = [text.removeprefix(indent) for text in lines[start:number]]
        number += 1
        collected.append(_block(name, start + 1, words, body, reason))
        reason = ""
    return collected


def _block(page: str, line: int, words: str, body: list[str], reason: str) -> Block:
    language, file = words, ""
    if words.startswith("{code-block}"):
        language = words.removeprefix("{code-block}").strip()
        while body and (body[0].startswith(":") or not body[0].strip()):
            option = body.pop(0)
            line += 1
            if option.startswith(":caption:"):
                file = option.removeprefix(":caption:").strip().strip("`")
    return Block(page, line, language, "\n".join(body) + "\n", reason, file)


# -- running ----------------------------------------------------------------------------------


class Mismatch(Exception):
    """A page shows output that was not printed."""


def run_page(page_blocks: list[Block], directory: Path) -> None:
    """Run the blocks of one page, and raise the first error."""
    os.chdir(directory)
    space: dict[str, object] = {"__name__": "__main__"}
    printed: str | None = None
    for block in page_blocks:
        if block.reason:
            printed = None
        elif block.file:
            check_syntax(block)
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            before = printed or ""
            printed = before + _capture(directory, block, space)
        elif block.language == "console":
            printed = _console(block)
            compare_output(block, printed)
        elif block.language == _SHOWN and printed is not None:
            compare_output(block, printed)
            printed = None


def _capture(directory: Path, block: Block, space: dict[str, object]) -> str:
    """Return what a Python block prints, by any means."""
    output = directory / ".printed"
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        code = "\n" * (block.line - 1) + block.text
        exec(compile(code, block.page, "exec", dont_inherit=True), space)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, was in zip((1, 2), saved, strict=True):
            os.dup2(was, number)
            os.close(was)
        text = output.read_text()
        print(f"--- {block.name}\n{text}", flush=True)
    return text


def _console(block: Block) -> str:
    completed = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", block.commands],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    print(f"--- {block.name}\n{completed.stdout}", flush=True)
    if completed.returncode != 0:
        raise Mismatch(
            f"{block.name}: exit code {completed.returncode}\n{completed.stdout[-3000:]}"
        )
    return completed.stdout


def compare_output(block: Block, printed: str) -> None:
    """Raise `Mismatch` if the output that a block shows has a word that was not printed."""
    printed_words = set(_WORD.findall(printed))
    for line in block.shown.splitlines():
        words = _WORD.findall(_MEASURED.sub("", line.rstrip()))
        missing = [word for word in words if word not in printed_words]
        if missing and line.strip() != "...":
            raise Mismatch(
                f"{block.name} shows {line!r}, but {missing[0]!r} was not printed:\n"
                f"{textwrap.indent(printed[-3000:], '  ')}"
            )


def check_syntax(block: Block) -> None:
    """Check the syntax of a block that cannot run."""
    if block.language == "python":
        ast.parse(block.text)
    elif block.language in ("console", "bash"):
        script = block.commands if block.language == "console" else block.text
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    elif block.language == "json":
        json.loads(block.text)


# -- the process that runs pages --------------------------------------------------------------


class Runner:
    """A process with everything imported, which runs pages."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.doc_snippets"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, page_blocks: list[Block], directory: Path) -> str:
        """Run a page; return its error, which is empty if there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"blocks": [asdict(block) for block in page_blocks], "directory": str(directory)}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return str(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        with self._process:  # closing its pipes ends it
            pass


def _serve() -> None:
    for name in CAPTURE:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for job in map(json.loads, _lines()):
        directory = Path(job["directory"])
        log = directory / ".log"
        if os.fork() == 0:
            _child([Block(**block) for block in job["blocks"]], directory, log)
        failed = os.wait()[1] != 0
        print(json.dumps(log.read_text() if failed else ""), file=answers, flush=True)


def _lines() -> Iterator[str]:
    while line := sys.stdin.readline():
        yield line


def _child(page_blocks: list[Block], directory: Path, log: Path) -> None:
    code = 1
    try:
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        run_page(page_blocks, directory)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
