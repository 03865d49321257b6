"""The public interface: names, commands with their options, routes, and documents of every kind,
as they were when these lists were written. Removing one breaks users and needs a decision; new
ones are added to the list. The current code reads documents of the earlier code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.helpers.paths import DATA
from typer.main import get_command

import remat
from remat import cli
from remat.documents.plan import SweepDocument
from remat.plan import Status
from remat_server.cli import register
from remat_server.http.app import create_app
from remat_server.settings import Settings

FOLDER = DATA / "public"
LISTS: dict[str, Any] = json.loads((FOLDER / "lists.json").read_text())


def test_exported_names_are_those_listed() -> None:
    assert sorted(remat.__all__) == LISTS["names"]


def test_importing_remat_loads_no_torch_and_few_modules() -> None:
    code = "import remat, sys; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    modules = process.stdout.decode().split()
    assert "torch" not in modules
    assert len([name for name in modules if name.startswith("remat.")]) <= 120


def test_every_exported_name_exists() -> None:
    pytest.importorskip("torch")
    for name in LISTS["names"]:
        assert getattr(remat, name) is not None
    assert callable(remat.trace)


def commands(command: Any, path: str = "remat") -> dict[str, list[str]]:
    """Return each command with its arguments and options."""
    if (below := getattr(command, "commands", None)) is None:
        return {path: sorted(max(p.opts, key=len) for p in command.params)}
    collected: dict[str, list[str]] = {}
    for name, subcommand in below.items():
        collected |= commands(subcommand, f"{path} {name}")
    return collected


def every_command() -> dict[str, list[str]]:
    """Return the commands of the library, and those that the service adds."""
    services = typer.Typer()
    register(services)
    return commands(get_command(cli.app)) | commands(get_command(services))


def test_commands_and_options_are_those_listed() -> None:
    assert every_command() == LISTS["commands"]


def test_routes_are_those_listed(tmp_path: Path) -> None:
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/jobs.sqlite", worker=False))
    paths = app.openapi()["paths"]
    routes = sorted(f"{verb.upper()} {path}" for path, verbs in paths.items() for verb in verbs)
    assert routes == LISTS["routes"]


def assert_contains(earlier: Any, now: Any) -> None:
    """Check that nothing is lost or has another meaning; there may be new fields."""
    if isinstance(earlier, dict):
        assert earlier.keys() <= now.keys()
        for key in earlier:
            assert_contains(earlier[key], now[key])
    elif isinstance(earlier, list):
        assert len(earlier) == len(now)
        for one, other in zip(earlier, now, strict=True):
            assert_contains(one, other)
    else:
        assert now == earlier


@pytest.mark.parametrize("name", ["trace", "trace_for_h100", "plan", "program"])
def test_documents_of_earlier_versions_are_read(name: str) -> None:
    kind: Any = {"plan": remat.Plan, "program": remat.Program}.get(name, remat.Trace)
    text = (FOLDER / f"{name}.json").read_text()
    document = kind.from_json(text)
    assert kind.from_json(document.to_json()) == document
    assert_contains(json.loads(text), json.loads(document.to_json()))


def test_a_sweep_of_an_earlier_version_is_read() -> None:
    text = (FOLDER / "sweep.json").read_text()
    plans = SweepDocument.from_json(text).to_plans(remat.Plan)
    assert_contains(json.loads(text), json.loads(SweepDocument.of(plans).to_json()))
    assert [plan.status for plan in plans] == [Status.OPTIMAL] * 2


def test_an_earlier_trace_and_schedule_give_the_earlier_program() -> None:
    """The stored trace also still solves."""
    trace = remat.Trace.load(FOLDER / "trace.json")
    plan = remat.Plan.load(FOLDER / "plan.json")
    assert trace.graph() == plan.graph
    assert remat.rewrite(trace, plan.schedule) == remat.Program.load(FOLDER / "program.json")
    second = remat.solve(trace, "90%", remat.Auto(time_limit=5.0, threads=1))
    assert second.time_s == pytest.approx(plan.time_s, rel=0.01)
