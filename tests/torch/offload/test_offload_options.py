"""The options of offloading: in `optimize`, `enable`, the command line, the service and the checks
of programs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.helpers.command_line import quick
from tests.helpers.training.models import Case
from tests.helpers.training.offloaded_steps import FAST, lowered, measured, net_case
from tests.helpers.training.steps import step_of
from tests.torch.offload.test_offload_choice import choose, offloaded_tensors

import remat
from remat.documents.program import Program, Statement
from remat.documents.targets import (
    ADD_INTO_TARGET,
    ADD_TARGET,
    ARRIVE_TARGET,
    COPY_TARGET,
    OFFLOAD_TARGET,
    RELEASE_TARGET,
)
from remat.frontend.planning.host_limits import host_limits, measured_link, prepare_host_for_trace
from remat.frontend.runtime.host_file import DIRECTORY_VARIABLE
from remat.passes.offload.copies import offloaded_values
from remat.plan_options import OffloadOptions
from remat.service import wire

COSTS = remat.Roofline("cpu")


pytestmark = pytest.mark.usefixtures("offload_file_in_tmp_path")


def large_case() -> Case:
    """Return a case whose tensors have a mebibyte and more."""
    return net_case(layers=2, rows=16384)


def test_an_enabled_model_trains_accumulates_and_evaluates() -> None:
    case = large_case()
    reference = copy.deepcopy(case.model)
    model = remat.enable(
        case.model, "70%", case.args, costs=COSTS, link=FAST, offload="auto", split="off"
    )
    assert "host_bytes" in remat.plans(model)[-1].stats
    for x in (case.args[0], case.args[0][:9000], case.args[0]):
        torch.manual_seed(5)
        reference(x).backward()
        torch.manual_seed(5)
        model(x).backward()
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)
    with torch.no_grad():
        torch.manual_seed(5)
        expected = reference(case.args[0])
        torch.manual_seed(5)
        assert torch.equal(expected, model(case.args[0]))


def test_a_host_budget_above_what_is_free_is_an_error_before_the_first_step() -> None:
    case = large_case()
    with pytest.raises(
        remat.BudgetError, match=r"the host budget is .* in .* are free: pass a smaller host_budget"
    ):
        remat.optimize(
            case.model, "70%", case.args, costs=COSTS, offload="auto", host_budget="900TiB"
        )


def test_a_plan_that_the_host_has_no_room_for_is_an_error_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = choose(measured(net_case()), "70%", FAST).trace
    prepare_host_for_trace(trace)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(remat.BudgetError, match=r"the plan offloads .* pass a smaller host_budget"):
        prepare_host_for_trace(trace)


def test_a_directory_that_does_not_exist_is_an_error_of_planning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = net_case()
    monkeypatch.setenv(DIRECTORY_VARIABLE, "/nowhere")
    with pytest.raises(remat.RematError, match=rf"/nowhere: No such file .*{DIRECTORY_VARIABLE}"):
        remat.optimize(case.model, "70%", case.args, costs=COSTS, offload="auto")


def test_a_full_disk_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = measured(net_case())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.warns(UserWarning, match="nothing is offloaded: 1000 B in .* are free"):
        limits = host_limits(OffloadOptions(link=FAST), trace, COSTS, None)
    assert limits is not None
    assert limits.host_bytes == 500


@pytest.mark.parametrize("offload", ["off", "auto"])
def test_a_step_is_solved_with_the_trace_that_its_plan_is_for(offload: str) -> None:
    case = large_case()
    trace = measured(case)
    link = FAST if offload == "auto" else None
    step = remat.solve_step(trace, "70%", split=2, offload=offload, link=link)
    assert bool(step.plan.graph.renewal) == (offload == "auto")
    assert bool(step.trace.splits) == (offload == "off")
    assert step.plan.graph == step.trace.graph()
    module = lowered(step.trace, case.model, step.plan.schedule)
    torch.testing.assert_close(step_of(case, module).loss, step_of(case).loss)
    with pytest.raises(TypeError, match=r"a Graph: pass .*remat.solve takes a Graph"):
        remat.solve_step(trace.graph(), "70%")  # type: ignore[arg-type]


def test_a_link_has_numbers() -> None:
    with pytest.raises(TypeError, match="Link needs numbers of bytes per second; got a str"):
        remat.Link("12GB/s", 1e9)  # type: ignore[arg-type]


def test_what_is_offloaded_is_explained() -> None:
    chosen = choose(measured(net_case()), "70%", FAST)
    plan = chosen.plan
    offloaded = offloaded_values(plan.graph)[0]
    operations = plan.graph.operations
    producer = operations[plan.graph.producer[offloaded.value]]
    explained = plan.explain(producer.name)
    assert f"{plan.graph.values[offloaded.value].name} (" in explained
    assert "is offloaded: it leaves the device by run" in explained
    assert "copied back by run" in explained
    row = next(x for x in plan.explain(producer.module).splitlines() if producer.name in x)
    assert "offloaded" in row
    for op in offloaded.operations:
        assert operations[op].module == producer.module
        assert "copy between device and host" in plan.explain(operations[op].name)
    count = len(measured(net_case()).graph())
    assert f"of {count} operations" in plan.describe()


def test_the_link_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "costs.sqlite"
    first = measured_link(torch.device("cpu"), cache)
    monkeypatch.delattr("remat.frontend.planning.host_limits._file_copy_seconds")
    assert measured_link(torch.device("cpu"), cache) == first


def test_the_link_is_that_of_the_costs() -> None:
    trace = measured(net_case())
    options = OffloadOptions(host_bytes=1 << 20)
    limits = host_limits(options, trace, remat.Roofline("gh200"), None, runs_locally=False)
    assert limits is not None
    assert limits.link == remat.Roofline("gh200").link
    assert limits.host_bytes == 1 << 20
    assert host_limits(None, trace, COSTS, None) is None


def test_a_strategy_that_does_not_know_copies_plans_without_them() -> None:
    case = large_case()
    module = remat.optimize(
        case.model, "90%", case.args, costs=COSTS, link=FAST, offload="auto", split="off",
        strategy=remat.Selective(),
    )  # fmt: skip
    step_of(case, module)


@pytest.mark.slow
def test_the_command_line_offloads(tmp_path: Path) -> None:
    case = large_case()
    trace = remat.measure(remat.trace(case.model, case.args), remat.Roofline("gh200"))
    path, program = tmp_path / "trace.json", tmp_path / "program.json"
    trace.save(path)
    arguments = ("solve", path, "--budget", "70%", "--program", program)
    ended = quick(*arguments, "--offload", "auto", "--host-budget", "1GiB")
    assert ended.code == 0, ended.err
    assert "are offloaded to the host" in ended.out
    assert any(s.target == OFFLOAD_TARGET for s in remat.Program.load(program).forward)
    sweep = ("sweep", path, "--budget", "70%", "--budget", "100%", "--offload", "auto")
    ended = quick(*sweep, "--output", tmp_path / "frontier.svg")
    assert ended.code == 0, ended.err
    assert len(ended.out.splitlines()) == 5
    assert "on the host" in ended.out
    assert "without offloading" in (tmp_path / "frontier.svg").read_text()
    ended = quick(*sweep, "--json")
    summary = json.loads(ended.out)
    plans, without = summary["plans"], summary["plans_without_offloading"]
    assert max(plan["host_bytes"] for plan in plans) > 0
    assert [plan["host_bytes"] for plan in without] == [0] * len(plans)
    assert all(p["overhead"] <= w["overhead"] for p, w in zip(plans, without, strict=True))
    assert [plan["overhead"] for plan in plans] == sorted(
        (p["overhead"] for p in plans), reverse=True
    )


def test_a_request_to_offload_needs_the_bandwidth() -> None:
    trace = measured(net_case())
    with pytest.raises(ValueError, match=r"add a link, or options\.costs"):
        wire.SolveRequest(trace=trace, budget="70%", offload="auto")
    request = wire.SolveRequest(
        trace=trace,
        budget="70%",
        offload="auto",
        link=wire.LinkRecord(to_host_bytes_per_s=1e9, to_device_bytes_per_s=2e9),
    )
    assert request.link is not None
    assert request.link.to_link() == remat.Link(1e9, 2e9)
    with pytest.raises(ValueError, match="offload"):
        wire.SolveRequest(trace=trace, budget="70%", offload="yes")


# -- programs whose copies have not ended ----------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> Program:
    chosen = choose(measured(net_case()), "70%", FAST)
    assert offloaded_tensors(chosen.trace)
    return remat.rewrite(chosen.trace, chosen.plan.schedule)


def of_target(program: Program, target: str) -> Statement:
    return next(s for s in (*program.forward, *program.backward) if s.target == target)


def without(program: Program, target: str) -> Program:
    left_out = of_target(program, target)
    forward = tuple(s for s in program.forward if s is not left_out)
    backward = tuple(s for s in program.backward if s is not left_out)
    return changed(program, forward, backward)


def changed(
    program: Program, forward: tuple[Statement, ...], backward: tuple[Statement, ...]
) -> Program:
    fields = {name: getattr(program, name) for name in Program.model_fields}
    return Program(**(fields | {"forward": forward, "backward": backward}))


def reading_a_buffer(program: Program) -> Program:
    """Let a statement read a buffer before its copy has ended."""
    arrive = of_target(program, ARRIVE_TARGET)
    early = Statement(target="aten.relu.default", args=arrive.args)
    at = program.backward.index(arrive)
    return changed(
        program, program.forward, (*program.backward[:at], early, *program.backward[at:])
    )


def releasing_another_tensor(program: Program) -> Program:
    first, second = [s for s in program.forward if s.target == RELEASE_TARGET][:2]
    other = first.model_copy(update={"args": (first.args[0], second.args[1])})
    return changed(
        program, tuple(other if s is first else s for s in program.forward), program.backward
    )


def writing_over_a_tensor_that_is_copied(program: Program, target: str) -> Program:
    """Write over a tensor between the start of its copy to the host and the copy's end."""
    offload = of_target(program, OFFLOAD_TARGET)
    at = program.forward.index(offload) + 1
    write = Statement(target=target, args=(*offload.args, *offload.args))
    return changed(program, (*program.forward[:at], write, *program.forward[at:]), program.backward)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda p: without(p, RELEASE_TARGET), "offloaded and never released|not defined"),
        (lambda p: without(p, ARRIVE_TARGET), "never arrives|not defined"),
        (lambda p: without(p, OFFLOAD_TARGET), "not defined"),
        (reading_a_buffer, "reads a buffer before its copy has ended"),
        (releasing_another_tensor, "needs a handle and the tensor that was offloaded"),
        *(
            (partial(writing_over_a_tensor_that_is_copied, target=target), "which is copied to")
            for target in (COPY_TARGET, ADD_TARGET, ADD_INTO_TARGET)
        ),
    ],
    ids=[
        "no release",
        "no arrival",
        "no offload",
        "early read",
        "another tensor",
        "copy",
        "add",
        "add into",
    ],
)
def test_programs_that_touch_a_tensor_before_its_copy_has_ended_are_refused(
    program: Program, fault: Callable[[Program], Program], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        fault(program)
