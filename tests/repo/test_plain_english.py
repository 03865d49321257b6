"""The check finds the words that `docs/glossary.md` bans, and the repository has none of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import plain_english
from scripts.plain_english import GLOSSARY, ROOT, offences, read_rules

RULES = read_rules(GLOSSARY.read_text())

PLANTED = {
    "opening with Whether": ('def f():\n    """Whether it fits."""\n', "Whether"),
    "opening with What": ('"""What a step takes."""\n', "What"),
    "opening with Of": ('class A:\n    """Of all blocks."""\n', "Of"),
    "phrase in a comment": ("x = 1  # this is run again later\n", "run again"),
    "phrase in a message": ('raise ValueError("the plan is made again")\n', "made again"),
    "phrase in an f-string": ('x = f"{1} bytes beside the graph"\n', "beside"),
    "phrase in a docstring": ('"""A value.\n\nIt is planned anew.\n"""\n', "anew"),
    "variable": ("found = 1\n", "found"),
    "part of a function's name": ("def made_anew():\n    pass\n", "_anew"),
    "field": ("class A:\n    kept: int = 0\n", "kept"),
    "parameter": ("def f(given, /):\n    pass\n", "given"),
}

INNOCENT = '''"""Return the peak in bytes of a step.

True if everything fits: what is retained is listed under `results`.
"""
import math  # the user may try again


def peak_bytes(graph):
    """Peak of `graph` in bytes. What happens outside is not counted."""
    return graph.found + graph.kept["given"] + math.inf  # attributes of others are not ours
'''


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_offence_is_found(name: str) -> None:
    source, word = PLANTED[name]
    (offence, *_) = offences("module.py", source, RULES)
    assert word.lower() in offence.text.lower()
    assert str(offence).startswith("module.py:")


def test_a_page_is_checked_line_by_line() -> None:
    page = "# Title\n\nA kernel.\nIt is run again.\n"
    (offence,) = offences("page.md", page, RULES)
    assert (offence.line, offence.text) == (4, "run again")


def test_plain_code_has_no_offence() -> None:
    assert list(offences("module.py", INNOCENT, RULES)) == []


def test_a_reason_exempts_a_line() -> None:
    source = "found = 1  # plain: the name is torch's\n"
    assert list(offences("module.py", source, RULES)) == []
    assert list(offences("module.py", source.replace(": the name is torch's", ""), RULES))


def test_a_row_that_is_no_rule_is_an_error() -> None:
    page = f"{plain_english.HEADING}\n\n| pattern | write | where |\n| --- | --- | --- |\n"
    with pytest.raises(ValueError, match="no rules"):
        read_rules(page)
    with pytest.raises(ValueError, match="not a rule"):
        read_rules(page + "| `found` | a noun | everywhere |\n")


@pytest.mark.slow
def test_the_repository_has_no_offence(capsys: pytest.CaptureFixture[str]) -> None:
    code = plain_english.main([])
    assert code == 0, capsys.readouterr().out


def test_every_owner_in_the_glossary_exists() -> None:
    """The last column names modules or packages of `remat`."""
    page = GLOSSARY.read_text().partition(plain_english.HEADING)[0]
    owners = re.findall(r"\| `((?:remat|frontend)\.[\w.]+)` \|$", page, re.MULTILINE)
    assert len(owners) > 50
    for owner in owners:
        dotted = owner if owner.startswith("remat.") else f"remat.{owner}"
        path = ROOT.joinpath("solver", *dotted.split("."))
        assert path.with_suffix(".py").is_file() or Path(path, "__init__.py").is_file(), owner
