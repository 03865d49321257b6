"""Offloading tensors to the host: the same numbers, the predicted memory, and copies in order."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from tests.helpers.training.models import FAMILIES
from tests.helpers.training.offloaded_steps import (
    FAST,
    SLOW,
    SMALL_BYTES,
    assert_eager_numbers,
    host_stays,
    lowered,
    measured,
    net_case,
    offloaded,
)
from tests.helpers.training.steps import assert_same, step_of

import remat
from remat.choice.offloadable_step import PlannedStays, TraceStep
from remat.costs.devices import Link
from remat.documents.targets import (
    ARRIVE_TARGET,
    OFFLOAD_TARGET,
    RELEASE_TARGET,
    RELOAD_TARGET,
)
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.frontend.memory.meter import measure_step
from remat.frontend.runtime import host_file as files
from remat.frontend.runtime.host_file import HostFile, host_file
from remat.graph import Graph
from remat.passes.offload.candidates import idle_spans, offloadable_values
from remat.passes.offload.copies import (
    CopyTimes,
    copy_times,
    count_without_offload_copies,
    offloaded_values,
    without_offload_copies,
)
from remat.passes.offload.copies_in_graph import CopyOperation, HostStay, offload_values
from remat.passes.offload.copies_in_trace import offload_tensors

pytestmark = pytest.mark.usefixtures("offload_file_in_tmp_path")

QUICK = {"unet"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FAMILIES]
)
@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
def test_offloaded_steps_have_the_numbers_of_those_that_are_not(name: str, link: Link) -> None:
    torch.manual_seed(0)
    case = FAMILIES[name]()
    plain = measured(case)
    trace = offloaded(plain, link, of_backward=True)
    sides = {node.backward for node in trace.nodes if node.target == OFFLOAD_TARGET}
    assert sides == {False, True}
    reference, module = lowered(plain, case.model), lowered(trace, case.model)
    for _ in range(2):
        state = {n: t.clone() for n, t in case.model.state_dict().items()}
        expected = step_of(case, reference)
        case.model.load_state_dict(state)
        assert_same(step_of(case, module), expected)


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_the_measured_peak_is_the_predicted_one(budget: str) -> None:
    case = net_case()
    trace = offloaded(measured(case), FAST, of_backward=True)
    plan = remat.solve(trace, budget, remat.Auto(time_limit=3))
    program = remat.rewrite(trace, plan.schedule)
    module = remat.lower(program, case.model)
    step_of(case, module)
    case.model.zero_grad(set_to_none=True)
    constants = [*case.model.parameters(), *case.args]
    usage = measure_step(lambda: module(*case.args).backward(), constants)
    assert usage.peak_bytes == program.predicted_peak_bytes == plan.peak_bytes


def test_offloading_lowers_the_peak_without_recomputation() -> None:
    trace = measured(net_case())
    peaks = [
        remat.simulate(t.graph(), remat.Schedule.keep_all(t.graph())).peak_bytes
        for t in (trace, offloaded(trace, FAST))
    ]
    assert peaks[1] < 0.7 * peaks[0]


@pytest.mark.parametrize("link", [FAST, Link(2e9, 1e12)], ids=["fast", "late"])
def test_a_second_backward_reads_the_same_copies(link: Link) -> None:
    """With the slower link, the backward waits for some copies to the host."""
    case = net_case()
    trace = offloaded(measured(case), link)
    late = [node for node in trace.nodes if node.target == RELEASE_TARGET and node.backward]
    assert bool(late) == (link is not FAST)
    module = lowered(trace, case.model)
    loss = module(*case.args)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in case.model.parameters()]
    case.model.zero_grad(set_to_none=True)
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(case.model.parameters(), first, strict=True))
    del loss
    gc.collect()
    assert host_file().used_bytes == 0


@pytest.mark.parametrize(
    "ends", [*(pytest.param(e, marks=pytest.mark.slow) for e in ("backward", "dropped")), "error"]
)
def test_slots_are_free_when_the_step_has_ended(ends: str) -> None:
    case = net_case()
    trace = offloaded(measured(case), FAST)
    module = lowered(trace, case.model)
    for _ in range(3):
        loss = module(*case.args)
        assert host_file().used_bytes > 0
        if ends == "backward":
            loss.backward()
        elif ends == "error":
            loss.register_hook(_raise)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
        del loss
        gc.collect()
        assert host_file().used_bytes == 0


def _raise(gradient: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


# -- times ----------------------------------------------------------------------------------------


def keep_all_times(trace: Trace, link: Link) -> CopyTimes:
    return copy_times(trace.graph(), range(len(trace.graph())), link)


@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
def test_the_copies_of_an_engine_follow_each_other(link: Link) -> None:
    trace = offloaded(measured(net_case()), link)
    times = keep_all_times(trace, link)
    for direction, rate in (
        ("to_host", link.to_host_bytes_per_s),
        ("to_device", link.to_device_bytes_per_s),
    ):
        copies = [c for c in times.copies if c.direction == direction]
        assert len(copies) == sum(node.target == OFFLOAD_TARGET for node in trace.nodes)
        for c in copies:
            assert c.end_s - c.start_s == pytest.approx(c.size_bytes / rate)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(copies))
    costs_s = trace.graph().total_cost_s
    assert times.step_s == pytest.approx(costs_s + times.waiting_s)
    assert times.waiting_s <= times.copying_s
    assert times.largest_host_bytes == sum(c.size_bytes for c in times.copies) // 2 > 0


def test_a_fast_link_hides_all_copies_but_the_last() -> None:
    trace = offloaded(measured(net_case()), FAST)
    assert keep_all_times(trace, FAST).waiting_s < 0.01 * trace.graph().total_cost_s
    assert keep_all_times(trace, Link(1e6, 1e6)).waiting_s > trace.graph().total_cost_s


def test_the_runtime_starts_copies_in_the_simulated_order(monkeypatch: pytest.MonkeyPatch) -> None:
    case = net_case()
    trace = offloaded(measured(case), SLOW)
    schedule = remat.Schedule.keep_all(trace.graph())
    module = lowered(trace, case.model, schedule)
    started: list[tuple[str, int]] = []
    write, read = HostFile.write, HostFile.read
    monkeypatch.setattr(
        HostFile, "write", lambda f, t: (started.append(("to_host", t.nbytes)), write(f, t))[1]
    )
    monkeypatch.setattr(
        HostFile, "read", lambda f, slot: (started.append(("to_device", slot)), read(f, slot))[1]
    )
    step_of(case, module)
    simulated = copy_times(trace.graph(), schedule.runs, SLOW).copies
    sent = [c.tensor for c in simulated if c.direction == "to_host"]
    expected: list[tuple[str, int]] = []
    for c in simulated:
        is_sent = c.direction == "to_host"
        expected.append((c.direction, c.size_bytes if is_sent else sent.index(c.tensor)))
    assert started == expected


@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
def test_without_copies_the_graph_is_the_one_before(link: Link) -> None:
    plain = measured(net_case())
    before, graph = plain.graph(), offloaded(plain, link, of_backward=True).graph()
    assert len(graph) > len(before) == count_without_offload_copies(graph)
    assert replace(without_offload_copies(graph), unsplit=None) == before


def test_tensors_are_reloaded_in_the_order_in_which_they_are_needed() -> None:
    trace = offloaded(measured(net_case()), FAST)
    needed = [n.results[0].name for n in trace.nodes if n.target == ARRIVE_TARGET]
    copies = keep_all_times(trace, FAST).copies
    assert [c.tensor for c in copies if c.direction == "to_device"] == needed


# -- what can be offloaded, and errors ------------------------------------------------------------


def test_tensors_of_the_caller_stay_on_the_device() -> None:
    trace = measured(net_case())
    graph = trace.graph()
    names = {graph.values[v].name for v in offloadable_values(trace)}
    assert names
    assert names.isdisjoint({p.name for p in trace.placeholders})
    assert names.isdisjoint({item.name for item in (*trace.outputs, *trace.gradients)})
    result = min(graph.results)
    with pytest.raises(RematError, match=f"{graph.values[result].name} cannot be offloaded"):
        offload_tensors(trace, [HostStay(result)], FAST)


def test_what_only_recomputations_read_is_offloaded_for_them() -> None:
    """`only` is not read by the backward, but its successor `read` is recomputed from it."""
    case = net_case()
    plain = measured(case)
    graph = plain.graph()
    spans = idle_spans(graph, offloadable_values(plain))
    only, reader, needed_before = next(
        (v, graph.operations[op].name, spans[output].next_reader)
        for v, span in spans.items()
        if span.next_reader is None and graph.values[v].size_bytes >= SMALL_BYTES
        for op in graph.consumers[v]
        for output in graph.operations[op].outputs
        if output in spans and spans[output].next_reader is not None
    )
    with pytest.raises(RematError, match="no operation of the backward reads it"):
        offload_tensors(plain, [HostStay(only)], FAST)
    assert needed_before is not None
    needed_by = graph.operations[needed_before].name
    trace = offload_tensors(plain, [HostStay(only, needed_before=needed_before)], FAST)
    graph = trace.graph()
    index = {o.name: i for i, o in enumerate(graph.operations)}
    runs = list(range(len(graph)))
    runs.insert(runs.index(index[needed_by]), index[reader])
    schedule = remat.Schedule.of(runs)
    baseline = remat.simulate(plain.graph(), remat.Schedule.keep_all(plain.graph()))
    assert remat.simulate(graph, schedule).after_bytes[graph.boundary or 0] < max(
        baseline.after_bytes
    )
    assert_eager_numbers(trace, case, schedule)


def test_a_tensor_is_offloaded_once() -> None:
    trace = measured(net_case())
    once = offloaded(trace, FAST)
    further = {once.graph().values[v].name for v in offloadable_values(once)}
    sent = {c.tensor for c in keep_all_times(once, FAST).copies if c.direction == "to_host"}
    assert sent
    assert further.isdisjoint(sent)


def test_what_the_backward_needs_too_soon_stays_on_the_device() -> None:
    trace = offloaded(measured(net_case()), Link(1e3, 1e3))
    assert not any(node.target in (OFFLOAD_TARGET, RELOAD_TARGET) for node in trace.nodes)


def test_a_copied_handle_is_an_error_that_says_so() -> None:
    case = net_case()
    trace = offloaded(measured(case), FAST)
    module = lowered(trace, case.model)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda tensor: tensor):
        loss = module(*case.args)
    gc.collect()
    with pytest.raises(RematError, match="no longer in the file: its handle was copied"):
        loss.backward()


def test_a_full_disk_is_an_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    case = net_case()
    trace = offloaded(measured(case), FAST)
    module = lowered(trace, case.model)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pwrite", full)
        with pytest.raises(RematError, match=r"cannot move .* bytes .*: No space left on device"):
            module(*case.args)
    deadline_s = time.monotonic() + 10
    while host_file().used_bytes and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.01)  # the thread that writes may still end, with the error's traceback
    assert host_file().used_bytes == 0
    step_of(case, module)  # the next step works


def test_links_need_bandwidth() -> None:
    with pytest.raises(ValueError, match="above zero"):
        Link(1.0, 0.0)


# -- copies in graphs ------------------------------------------------------------------------------

LATE = Link(2e8, 2e8)


def described(graph: Graph) -> list[dict[str, Any]]:
    """Return the operations of a graph, with values by their names instead of their indices."""
    fields = ("inputs", "outputs", "overwrites", "renews")
    return [
        asdict(o) | {f: sorted(graph.values[v].name for v in getattr(o, f)) for f in fields}
        for o in graph.operations
    ]


@pytest.mark.parametrize("link", [FAST, Link(5e9, 1e9), LATE], ids=["fast", "slow", "late"])
def test_the_graph_that_judges_a_step_is_that_of_its_trace(link: Link) -> None:
    step = TraceStep(measured(net_case()))
    planned = PlannedStays(tuple(host_stays(step.trace, of_backward=True)), {})
    judged, expected = step.graph_with_stays(planned, link), step.with_stays(planned, link).graph()
    assert described(judged) == described(expected)
    assert judged.unsplit == expected.unsplit
    runs = range(len(expected))
    assert copy_times(judged, runs, link) == copy_times(expected, runs, link)
    arriving = {judged.values[v].name for v in judged.renewal}
    is_written_over = any(arriving & {*o["overwrites"]} for o in described(judged))
    assert is_written_over == (link is not LATE), "what has arrived may be written over"


def test_sources_name_the_operations_of_the_graph_without_copies() -> None:
    graph = measured(net_case()).graph()
    value = max(
        (v for v in range(len(graph.values)) if not graph.operations[graph.producer[v]].backward),
        key=lambda v: (graph.values[v].size_bytes, v),
    )
    offloaded = offload_values(graph, [HostStay(value, needed_before=len(graph) - 1)], FAST)
    names = [
        graph.operations[source].name
        for source in offloaded.sources
        if not isinstance(source, CopyOperation)
    ]
    assert names == [operation.name for operation in graph.operations]
    (copies,) = offloaded_values(offloaded.graph)
    kinds = [offloaded.sources[op] for op in copies.operations]
    assert kinds == [CopyOperation(k, value) for k in ("offload", "release", "reload", "arrive")]
    assert replace(without_offload_copies(offloaded.graph), unsplit=None) == graph
