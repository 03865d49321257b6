"""The law of the log levels: a warning asks the user for something; what asks for nothing, as the
plan and the gradients are right without it, is information."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from tests.helpers.paths import ROOT

_REQUESTS = re.compile(
    r"\b(pass|set|pad|trace|report|optimise|compile|turn it|leave|free some|see|put|remove|call)\b",
    re.IGNORECASE,
)
"""The imperatives of remat's warnings."""

_MADE_ELSEWHERE = {"remat.solve", "remat.costs.trace_costs", "remat.frontend.capture.model.hooks"}
"""Modules whose warnings are texts of a variable: the tests of each check them."""


def warnings_in_sources() -> Iterator[tuple[str, str]]:
    """Yield the module and the constant parts of the text of each warning."""
    folder = ROOT / "solver"
    for path in sorted((folder / "remat").rglob("*.py")):
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            name = (getattr(owner, "id", ""), node.func.attr)
            if name not in {("log", "warning"), ("logger", "warning"), ("warnings", "warn")}:
                continue
            parts = [n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)]
            yield module, "".join(map(str, parts))


TEXTS = [case for case in warnings_in_sources() if case[0] not in _MADE_ELSEWHERE]


@pytest.mark.parametrize(("module", "text"), TEXTS, ids=[f"{m}: {t[:40]}" for m, t in TEXTS])
def test_a_warning_asks_for_something(module: str, text: str) -> None:
    assert _REQUESTS.search(text), f"{module}: information, or say what to do: {text}"


def test_there_are_warnings() -> None:
    assert len(TEXTS) > 10
    assert {module for module, _ in warnings_in_sources()} >= _MADE_ELSEWHERE
