"""Check names and prose against the words that `docs/glossary.md` bans.

    python -m scripts.plain_english            # all tracked files; exit code 1 if anything is wrong
    python -m scripts.plain_english PATH ...   # some files or folders
    python -m scripts.plain_english --count    # how often each rule is broken

Rules are the rows of the glossary's last table. A line that needs a banned word says so at its end,
with the reason: `# plain: the name is torch's`. Markdown does it with `<!-- plain: why -->`.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
HEADING = "## Words that we do not use"
EXCLUDED = (
    "docs/glossary.md",
    "CHANGELOG.md",  # tells of what was there before
    "benchmarks/results/2",
    "tests/data/",
    "tests/repo/test_plain_english.py",
)
SUFFIXES = (".py", ".md", ".c", ".html", ".js", ".sh", ".toml", ".yaml", "Makefile")
ALLOWED = re.compile(r"(#|<!--|//) plain: \w")
WHERE = ("names", "prose", "openings")
FSTRING_TEXT = getattr(tokenize, "FSTRING_MIDDLE", None)
"""The text of an f-string, which Python 3.12 and newer split into tokens."""


@dataclass(frozen=True)
class Rule:
    """A banned pattern, the words to use instead, and where it is looked for."""

    pattern: re.Pattern[str]
    instead: str
    where: str


@dataclass(frozen=True)
class Offence:
    """One match of a rule."""

    path: str
    line: int
    text: str
    rule: Rule

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: {self.text!r} in {self.rule.where}; write "
            f"{self.rule.instead}"
        )


@dataclass(frozen=True)
class Fragment:
    """A piece of a file that a rule may apply to: `where` is one of `WHERE`."""

    line: int
    where: str
    text: str


def read_rules(page: str) -> list[Rule]:
    """Return the rules of the glossary page. Raises ValueError for a row that is not a rule."""
    _, _, table = page.partition(HEADING)
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    rules: list[Rule] = []
    for row in rows:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        if len(cells) != 3 or cells[2] not in WHERE:
            raise ValueError(f"not a rule of the form | pattern | write | where |: {row}")
        text = cells[0].strip("`").replace("\\|", "|").replace(" ", r"[\s#]+")  # over line ends
        pattern = re.compile(text, re.IGNORECASE)
        rules.append(Rule(pattern, cells[1], cells[2]))
    if not rules:
        raise ValueError(f"no rules after {HEADING!r}")
    return rules


def python_fragments(source: str) -> Iterator[Fragment]:
    """Yield the names, comments, strings and docstring openings of Python source.

    Attribute accesses are left out of the names: they may belong to another library.
    """
    at_start, before = True, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and before != ".":
            yield Fragment(token.start[0], "names", token.string)
        elif token.type in (tokenize.COMMENT, FSTRING_TEXT):
            yield Fragment(token.start[0], "prose", token.string)
        elif token.type == tokenize.STRING:
            text = re.sub(r"^\w*(\"\"\"|'''|\"|')|(\"\"\"|'''|\"|')$", "", token.string)
            if at_start and '"""' in token.string:
                yield Fragment(token.start[0], "openings", text)
            yield Fragment(token.start[0], "prose", text)
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            at_start = True
        elif token.type not in (tokenize.NL, tokenize.COMMENT):
            at_start = False
        before = token.string


def offences(path: str, source: str, rules: Sequence[Rule]) -> Iterator[Offence]:
    """Yield every place of a file that breaks a rule. Files that are not Python are prose."""
    allowed = {n for n, line in enumerate(source.splitlines(), 1) if ALLOWED.search(line)}
    is_python = path.endswith(".py")
    fragments = python_fragments(source) if is_python else [Fragment(1, "prose", source)]
    for fragment in fragments:
        for rule in rules:
            if rule.where != fragment.where:
                continue
            for hit in rule.pattern.finditer(fragment.text):
                if rule.where == "openings" and hit.start() > 0:
                    break
                line = fragment.line + fragment.text.count("\n", 0, hit.start())
                if line not in allowed:
                    yield Offence(path, line, hit[0] or fragment.text, rule)


def tracked_files(paths: Sequence[str]) -> list[str]:
    """Return the tracked code and pages below `paths`, relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    files = sorted(set(listed.splitlines()))
    return [
        f
        for f in files
        if f.endswith(SUFFIXES) and not f.startswith(EXCLUDED) and (ROOT / f).is_file()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the offences and return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Check names and prose against the glossary.")
    parser.add_argument("paths", nargs="*", help="files or folders; default: all tracked files")
    parser.add_argument("--count", action="store_true", help="count the offences of each rule")
    options = parser.parse_args(argv)
    rules = read_rules(GLOSSARY.read_text())
    broken = [
        offence
        for file in tracked_files(options.paths)
        for offence in offences(file, (ROOT / file).read_text(), rules)
    ]
    if options.count:
        counts = Counter(offence.rule for offence in broken)
        for rule in rules:
            print(f"{counts[rule]:6}  {rule.where:8}  {rule.pattern.pattern}")
        print(f"{len(broken):6}  in all")
        return 0
    for offence in broken:
        print(offence)
    if broken:
        print(f"{len(broken)} places use words that docs/glossary.md bans", file=sys.stderr)
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
