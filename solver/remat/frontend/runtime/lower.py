"""`lower`: a Program becomes two runnable fx graphs, and with a model a `RematModule`.

Nothing in a document is trusted: operations resolve through `operators.resolve`, names were checked
when the Program was read, and no text of the document is executed other than as those names.
"""

from __future__ import annotations

import base64
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

from remat.documents.arguments import Argument, refs
from remat.documents.program import Program, Statement
from remat.documents.records import Placeholder, TensorMeta
from remat.documents.trace import ACCUMULATE
from remat.errors import DocumentError
from remat.frontend.common.grad_mode import NEEDS_GRAD_MODE, with_grad_mode
from remat.frontend.common.operators import NAMESPACES, decode_argument, decode_literal, resolve
from remat.frontend.common.pytree import builder
from remat.frontend.runtime.accumulate import accumulate
from remat.frontend.runtime.launch import Launcher, launcher
from remat.frontend.runtime.rng_state import generator_state, replay


@dataclass(frozen=True)
class Compiled:
    """A program ready to run on any model that it fits.

    `forward` takes the tensors of `inputs`, which are placeholders, and the constants (in a list,
    which it empties); it returns the outputs, then `program.saved` without placeholders, then
    `program.states`. `backward` takes the saved tensors, the states, the tangents, the constants,
    and the parameters to accumulate into; it returns the gradients in the order of
    `program.gradients`. `saved` and `accumulated` are numbers of inputs, `gradients` has the number
    of each input's gradient. What runs are launchers; the graphs are there to be read.
    """

    program: Program
    constants: tuple[torch.Tensor, ...]
    launch_forward: Launcher
    launch_backward: Launcher
    rebuild: Callable[[Sequence[object]], Any]
    inputs: tuple[str, ...]
    saved: tuple[int, ...]
    accumulated: tuple[int, ...]
    gradients: tuple[int | None, ...]
    tangents: Mapping[str, TensorMeta]
    namespaces: frozenset[str]

    @cached_property
    def forward(self) -> fx.GraphModule:
        """The forward, printable."""
        return fx.GraphModule(torch.nn.Module(), _forward(self.program, self.namespaces))

    @cached_property
    def backward(self) -> fx.GraphModule:
        """The backward, printable."""
        return fx.GraphModule(torch.nn.Module(), _backward(self.program, self.namespaces))

    def __reduce__(self) -> tuple[Any, ...]:
        return compile_program, (self.program, self.namespaces)


def compile_program(program: Program, namespaces: Collection[str] = NAMESPACES) -> Compiled:
    """Write the launchers of the forward and the backward.

    Raises `DocumentError` for an operation or an output type that is not allowed or not there.
    """
    outside = {p.name: p for p in program.placeholders}
    inputs = _inputs(program)
    number_of = {g.placeholder: number for number, g in enumerate(program.gradients)}
    return Compiled(
        program=program,
        launch_forward=launcher(_forward(program, namespaces)),
        launch_backward=launcher(_backward(program, namespaces)),
        constants=tuple(_constant(p) for p in program.placeholders if p.kind == "constant"),
        rebuild=builder(program.result),
        inputs=tuple(inputs),
        saved=tuple(inputs.index(name) for name in program.saved if name in outside),
        accumulated=tuple(inputs.index(name) for name in _accumulated(program)),
        gradients=tuple(number_of.get(name) for name in inputs),
        tangents={o.tangent: outside[o.tangent].tensor for o in program.outputs if o.tangent},
        namespaces=frozenset(namespaces),
    )


def _inputs(program: Program) -> list[str]:
    return [p.name for p in program.placeholders if p.kind not in ("tangent", "constant")]


def _constants(program: Program) -> list[str]:
    return [p.name for p in program.placeholders if p.kind == "constant"]


def _accumulated(program: Program) -> list[str]:
    return [n for s in program.backward if s.target == ACCUMULATE for n in refs(s.args[0])]


def _forward(program: Program, namespaces: Collection[str]) -> fx.Graph:
    outside = {p.name for p in program.placeholders}
    saved = [name for name in program.saved if name not in outside]
    return _graph(
        program.forward,
        inputs=[*_inputs(program), *_constants(program)],
        outputs=[*(o.name for o in program.outputs), *saved, *program.states],
        namespaces=namespaces,
    )


def _backward(program: Program, namespaces: Collection[str]) -> fx.Graph:
    outside = {p.name for p in program.placeholders}
    return _graph(
        program.backward,
        inputs=[
            *sorted(program.saved, key=lambda name: name not in outside),  # placeholders first
            *program.states,
            *(o.tangent for o in program.outputs if o.tangent),
            *_constants(program),
            *(f"into_{name}" for name in _accumulated(program)),
        ],
        outputs=[g.name for g in program.gradients],
        namespaces=namespaces,
    )


def _graph(
    statements: Sequence[Statement],
    inputs: Sequence[str],
    outputs: Sequence[str],
    namespaces: Collection[str],
) -> fx.Graph:
    graph = fx.Graph()
    # The boxed calling convention empties its argument list, so that each value dies after its
    # last use; the ordinary one would keep every saved tensor alive through the backward.
    graph.set_codegen(_BoxedCodeGen())
    nodes: dict[str, Any] = {name: graph.placeholder(name) for name in inputs}
    for statement in statements:
        _add(graph, statement, nodes, namespaces)
    graph.output([nodes[name] for name in outputs])
    return graph


def _add(
    graph: fx.Graph, statement: Statement, nodes: dict[str, Any], namespaces: Collection[str]
) -> None:
    def decode(argument: Argument) -> Any:
        return decode_argument(argument, nodes)

    args = statement.args
    if statement.target == ACCUMULATE:
        parameter = nodes[f"into_{next(refs(args[0]))}"]
        call = graph.call_function(accumulate, (parameter, decode(args[1])))
    else:
        operation: Any = resolve(statement.target, namespaces)
        decoded = tuple(decode(item) for item in args)
        kwargs = {key: decode(item) for key, item in statement.kwargs.items()}
        called = operation, decoded, kwargs
        if statement.random == "save":
            made = graph.call_function(generator_state, (statement.device,))
            nodes[statement.state] = _named(made, statement.state)
        if statement.random == "replay":
            state: Any = nodes[statement.state]
            call = graph.call_function(replay, (state, statement.device, *called))
        elif statement.target in NEEDS_GRAD_MODE:
            call = graph.call_function(with_grad_mode, called)
        else:
            call = graph.call_function(*called)
    call.meta["remat"] = {"module": statement.module, "rerun": statement.rerun}
    for bound in statement.results:
        item = call
        if bound.position >= 0:
            # Tuple elements are taken at once, or the tuple would keep all of its parts alive.
            item = graph.call_function(operator.getitem, (call, bound.position))
        nodes[bound.name] = _named(item, bound.name)


def _named(node: fx.Node, name: str) -> fx.Node:
    node._rename(name)
    return node


def _constant(placeholder: Placeholder) -> torch.Tensor:
    meta = placeholder.tensor
    dtype = decode_literal("dtype", meta.dtype)
    assert isinstance(dtype, torch.dtype)
    try:
        data = bytearray(base64.b64decode(placeholder.data, validate=True))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(meta.shape).to(meta.device)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise DocumentError(f"the constant {placeholder.name} is damaged: {error}") from None
