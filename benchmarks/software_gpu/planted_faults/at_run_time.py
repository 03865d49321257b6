"""Faults while a program runs: RNG states, lifetimes, gradients that arrive and that are added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from benchmarks.software_gpu.planted_faults.fault import Fault, patched
from benchmarks.software_gpu.planted_faults.session import STEP, Event
from remat.frontend.runtime import autograd_function, launcher, lower
from remat.frontend.runtime.operations import (
    RngState,
    accumulate_grad,
    generator_state,
    run_with_generator_state,
    set_generator_state,
)

OFFSET = 4
"""The random numbers by which a restored state is off: one call of philox."""


def faults() -> list[Fault]:
    """Return the faults of this module."""
    replay = lower, "run_with_generator_state"
    return [
        Fault(f"RNG offset off by {OFFSET} in replays", patched((*replay, _replay_off_by_4))),
        Fault("RNG state not restored after a replay", patched((*replay, _replay_and_stay))),
        Fault("dropout recomputed with other numbers", patched((*replay, _sample_afresh))),
        Fault("variables freed one use too soon", patched((launcher, "_last_uses", _early_ends))),
        Fault("variables not freed", patched((launcher, "_last_uses", lambda graph: {}))),
        Fault(
            "saved tensors not freed by the backward",
            patched((launcher._LauncherSource, "statements", _without_clear)),
            is_saving=True,
        ),
        Fault(
            "gradients accumulated twice",
            patched((lower, "accumulate_grad", _accumulate_twice)),
            (STEP, Event(accumulates=True)),
        ),
        Fault(
            "the loss's gradient taken for 1",
            patched((autograd_function, "_tangents_by_name", _ones)),
            (STEP, Event(loss_factor=3.0)),
        ),
    ]


def _advanced(state: RngState) -> RngState:
    if not isinstance(state, torch.Tensor):
        seed, offset = state
        return seed, offset + OFFSET
    generator = torch.Generator()
    generator.set_state(state)
    torch.rand(OFFSET, generator=generator)
    return generator.get_state()


def _replay_off_by_4(state: RngState, *call: Any) -> Any:
    return run_with_generator_state(_advanced(state), *call)


def _replay_and_stay(
    state: RngState,
    device: str,
    operation: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    set_generator_state(device, state)
    return operation(*args, **kwargs)


def _sample_afresh(state: RngState, device: str, *call: Any) -> Any:
    return run_with_generator_state(generator_state(device), device, *call)


def _early_ends(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Map each node to the inputs that only one later node reads."""
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            readers.setdefault(operand, []).append(node)
    ends: dict[fx.Node, list[fx.Node]] = {}
    for operand, nodes in readers.items():
        if len(nodes) > 1:
            ends.setdefault(nodes[-2], []).append(operand)
    return ends


_statements = launcher._LauncherSource.statements


def _without_clear(source: Any, graph: fx.Graph) -> list[str]:
    return [line for line in _statements(source, graph) if line != "boxed.clear()"]


def _accumulate_twice(parameter: torch.Tensor | None, gradient: torch.Tensor) -> Any:
    accumulate_grad(parameter, gradient)
    return accumulate_grad(parameter, gradient)


_tangents = autograd_function._tangents_by_name


def _ones(*args: Any) -> dict[str, torch.Tensor | None]:
    tangents = _tangents(*args)
    return {name: None if t is None else torch.ones_like(t) for name, t in tangents.items()}
