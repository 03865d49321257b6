"""Offloading values of a graph gives the graph of the trace with their tensors offloaded."""

from __future__ import annotations

import dataclasses

import pytest
from tests.torch.offload.test_offload_tensors import FAST, measured, net_case

import remat
from remat.choice.offloadable_step import TraceStep
from remat.choice.stays import PlannedStays
from remat.costs.devices import Link
from remat.graph import Graph
from remat.passes.offload.candidates import idle_spans, offloadable_values
from remat.passes.offload.copies import copy_times, offloaded_values, without_copies
from remat.passes.offload.copies_in_graph import CopyOperation, HostStay, offload_values
from remat.passes.offload.copies_in_trace import offload_tensors

SLOW, LATE = Link(5e9, 1e9), Link(2e8, 2e8)


def described(graph: Graph) -> list[object]:
    """Return what copies decide of a plan, with values by their names. What else is overwritten
    differs: operations of a trace may write over what comes back from the host."""
    names = [value.name for value in graph.values]
    return [
        (
            operation.name,
            sorted(names[v] for v in operation.inputs),
            sorted(names[v] for v in operation.outputs),
            [names[v] for v in operation.renews],
            [names[v] for v in operation.overwrites if operation.renews],
            graph.operations[operation.same_copy_as].name if operation.same_copy_as >= 0 else "",
            (operation.cost_s, operation.backward, operation.recomputable, operation.module),
        )
        for operation in graph.operations
    ]


def without_overwrites(graph: Graph) -> Graph:
    operations = (
        operation if operation.renews else dataclasses.replace(operation, overwrites=())
        for operation in graph.operations
    )
    return dataclasses.replace(graph, operations=tuple(operations))


@pytest.mark.parametrize("link", [FAST, SLOW, LATE], ids=["fast", "slow", "late"])
def test_the_graph_with_copies_is_that_of_the_trace(link: Link) -> None:
    trace = measured(net_case())
    graph = trace.graph()
    values = offloadable_values(trace)
    stays = [
        HostStay(values[v])
        for v, span in idle_spans(graph, values).items()
        if span.next_reader is not None and not graph.operations[graph.producer[v]].backward
    ]
    offloaded = offload_values(graph, values, stays, link)
    expected = offload_tensors(trace, stays, link).graph()
    assert described(offloaded.graph) == described(expected)
    assert offloaded.graph.unsplit == expected.unsplit
    releases = [o for o in expected.operations if o.same_copy_as >= 0]
    assert any(operation.backward for operation in releases) == (link is LATE)
    runs = range(len(expected))
    assert copy_times(offloaded.graph, runs, link) == copy_times(expected, runs, link)
    schedule = remat.Schedule.keep_all(expected)
    peaks = [
        remat.simulate(without_overwrites(g), schedule).peak_bytes
        for g in (offloaded.graph, expected)
    ]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("link", [FAST, LATE], ids=["fast", "late"])
def test_the_graph_that_judges_a_step_is_that_of_its_trace(link: Link) -> None:
    step = TraceStep(measured(net_case()))
    spans = idle_spans(step.graph(), step.offloadable_values(256))
    names = step.offloadable_values(256)
    stays = [HostStay(names[v]) for v, span in spans.items() if span.next_reader is not None]
    planned = PlannedStays(tuple(stays), {})
    judged, expected = step.graph_with_stays(planned, link), step.with_stays(planned, link).graph()
    assert described(judged) == described(expected)
    overwritten = [
        [sorted(graph.values[v].name for v in o.overwrites) for o in graph.operations]
        for graph in (judged, expected)
    ]
    assert overwritten[0] == overwritten[1]
    arriving = {expected.values[v].name for v in expected.renewal}
    is_written_over = any(arriving & {*names} for names in overwritten[0])
    assert is_written_over == (link is FAST), "what has arrived may be written over"


def test_sources_name_the_operations_of_the_graph_without_copies() -> None:
    graph = measured(net_case()).graph()
    value = max(
        (v for v in range(len(graph.values)) if not graph.operations[graph.producer[v]].backward),
        key=lambda v: (graph.values[v].size_bytes, v),
    )
    stay = HostStay(graph.values[value].name, needed_by=graph.operations[-1].name)
    offloaded = offload_values(graph, [value], [stay], FAST)
    names = [
        graph.operations[source].name
        for source in offloaded.sources
        if not isinstance(source, CopyOperation)
    ]
    assert names == [operation.name for operation in graph.operations]
    (copies,) = offloaded_values(offloaded.graph)
    kinds = [offloaded.sources[op] for op in copies.operations]
    assert kinds == [CopyOperation(k, value) for k in ("offload", "release", "reload", "arrive")]
    restored = without_copies(offloaded.graph)
    assert described(restored) == described(graph)
    assert dataclasses.replace(restored, unsplit=None) == graph
