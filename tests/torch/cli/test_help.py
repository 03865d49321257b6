"""The help of every command at 80 columns, and the hints for wrong commands."""

from __future__ import annotations

import pytest
import typer
from tests.helpers.command_line import quick
from typer.main import get_command

from remat import cli
from remat_server.cli import register


def _paths(command: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of each command and group."""
    below = getattr(command, "commands", {})
    return [path, *(words for name in below for words in _paths(below[name], (*path, name)))]


def every_command() -> list[tuple[str, ...]]:
    services = typer.Typer()
    register(services)
    return [*_paths(get_command(cli.app)), *_paths(get_command(services))[1:]]


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_help_fits_80_columns(words: tuple[str, ...]) -> None:
    ended = quick(*words, "--help", env={"COLUMNS": "80"})
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert max(map(len, lines)) <= 80
    options = [line.split() for line in lines if line.startswith("  -")]
    assert options
    assert not [words for words in options if "<" in "".join(words[:3])]  # <bool>, <int range>
    if "Commands:" in lines:  # no sentence is cut off
        assert not [line for line in lines if line.endswith("...") and not line.startswith("Usage")]


@pytest.mark.parametrize("words", [(), ("keys",)])
def test_a_group_without_a_command_prints_its_help(words: tuple[str, ...]) -> None:
    ended = quick(*words)
    assert ended.code == 2
    assert ended.err == ""
    assert ended.out.startswith("Usage: remat")
    assert "\nCommands:\n" in ended.out


@pytest.mark.parametrize(
    ("wrong", "right"), [("solv", "solve"), ("swep", "sweep"), ("estimat", "estimate")]
)
@pytest.mark.parametrize("load_error", ["", "the commands of server cannot be loaded: ..."])
def test_a_wrong_command_names_the_similar_one(wrong: str, right: str, load_error: str) -> None:
    assert f"'{right}'" in quick(wrong).error
    line = f"No such command '{wrong}'. See `remat --help`."  # typer's, without a suggestion
    line = cli._error_line_with_hint(line, load_error)
    assert f"; did you mean '{right}'? See" in line
    assert "cannot be loaded" not in line


def test_an_unknown_command_says_which_commands_are_missing() -> None:
    reason = "the commands of server cannot be loaded: this needs the package 'fastapi'"
    line = cli._error_line_with_hint("No such command 'serve'. See `remat --help`.", reason)
    assert line.endswith(f"({reason})")


@pytest.mark.slow
def test_doctor_wraps_its_lines() -> None:
    ended = quick("doctor", env={"COLUMNS": "80"})
    long = [line for line in ended.out.splitlines() if len(line) > 80]
    assert not [line for line in long if len(line.split()) > 4]  # but for paths
