"""`lower_program`: turns a Program into a forward and a backward graph that run.

Nothing in a document is trusted. Operations are looked up by `operators.resolve_operator`, names
were checked when the Program was read, and no text of the document is executed except as those
names.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import _BoxedCodeGen

from remat.documents.arguments import referenced_names
from remat.documents.program import Program, Statement
from remat.documents.records import Placeholder, TensorMeta
from remat.documents.targets import ACCUMULATE_TARGET, WRITE_TARGET
from remat.documents.writes import OUT_VARIANTS
from remat.errors import DocumentError, GuardError
from remat.frontend.common.aliases import is_getitem, is_view
from remat.frontend.common.graph_writer import GraphWriter
from remat.frontend.common.operators import (
    NAMESPACES,
    literal_to_torch,
    resolve_operator,
    resolve_out_variant,
)
from remat.frontend.common.pytree import unflattener
from remat.frontend.common.torch_modes import NEEDS_GRAD_MODE, run_with_grad_mode
from remat.frontend.common.writes import resolve_writer, write
from remat.frontend.runtime.absent_tangents import graph_without_tangents
from remat.frontend.runtime.launcher import Launcher, generate_launcher
from remat.frontend.runtime.offload import arrive  # noqa: F401  # registers operations
from remat.frontend.runtime.operations import (
    accumulate_grad,
    add,  # noqa: F401  # registers remat's operations
    generator_state,
    run_with_generator_state,
)
from remat.passes.device_placement import device_type, program_on_device

log = logging.getLogger("remat")


@dataclass(frozen=True)
class LoweredProgram:
    """A program as functions that run, for any model that it fits.

    `launch_forward` takes the tensors of `input_names`, then the constants, in a list that it
    empties. It returns the outputs, then the saved tensors that are no inputs, then the RNG states
    (`program.rng_states`). `launch_backward` takes the saved tensors, inputs first, then the RNG
    states, the tangents, the constants, and the parameters whose gradients it accumulates. It
    returns the gradients in the order of `program.gradients`.

    `saved_inputs` and `accumulated_inputs` are indices of inputs. `gradient_of_input` has for each
    input the index of its gradient, or None. The fx graphs are only for reading.
    """

    program: Program
    constants: tuple[torch.Tensor, ...]
    launch_forward: Launcher
    launch_backward: Launcher
    unflatten_outputs: Callable[[Sequence[object]], Any]
    input_names: tuple[str, ...]
    saved_inputs: tuple[int, ...]
    accumulated_inputs: tuple[int, ...]
    gradient_of_input: tuple[int | None, ...]
    tangent_metas: Mapping[str, TensorMeta]
    namespaces: frozenset[str]
    _variants: dict[frozenset[str], Launcher | None] = field(default_factory=dict, repr=False)
    """Backward functions by the set of absent tangents; None if zeros must replace them."""

    def backward_without(self, absent: frozenset[str], inputs: Sequence[object]) -> Launcher | None:
        """Return a function that runs the backward without reading the `absent` tangents. It takes
        the inputs of `launch_backward`. None if such a graph cannot be built: then pass zeros to
        `launch_backward`. `inputs` are the inputs of this call."""
        if absent not in self._variants:
            try:
                graph = graph_without_tangents(
                    _backward_graph(self.program, self.namespaces),
                    self.tangent_metas,
                    absent,
                    self.has_gradient_without(absent),
                    inputs,
                )
            except NotImplementedError as error:
                log.debug("the backward gets zeros for the absent %s: %s", sorted(absent), error)
                self._variants[absent] = None
            else:
                self._variants[absent] = generate_launcher(graph)
        return self._variants[absent]

    def has_gradient_without(self, absent: frozenset[str]) -> list[bool]:
        """Return, for each gradient of the program, True if it depends on a present tangent."""
        outputs = self.program.outputs
        return [
            not gradient.sources or any(outputs[n].tangent not in absent for n in gradient.sources)
            for gradient in self.program.gradients
        ]

    @cached_property
    def forward_graph(self) -> fx.GraphModule:
        """The forward graph, printable."""
        return fx.GraphModule(nn.Module(), _forward_graph(self.program, self.namespaces))

    @cached_property
    def backward_graph(self) -> fx.GraphModule:
        """The backward graph, printable."""
        return fx.GraphModule(nn.Module(), _backward_graph(self.program, self.namespaces))

    def __reduce__(self) -> tuple[Any, ...]:
        return lower_program, (self.program, self.namespaces)


def lower_program(program: Program, namespaces: Collection[str] = NAMESPACES) -> LoweredProgram:
    """Generate the functions that run the program's forward and backward.

    Raises `DocumentError` for an operation or an output type that is not allowed or not there.
    """
    placeholders = {p.name: p for p in program.placeholders}
    inputs = _program_input_names(program)
    gradient_index = {g.placeholder: index for index, g in enumerate(program.gradients)}
    return LoweredProgram(
        program=program,
        launch_forward=generate_launcher(_forward_graph(program, namespaces)),
        launch_backward=generate_launcher(_backward_graph(program, namespaces)),
        constants=tuple(_decode_constant(p) for p in program.placeholders if p.kind == "constant"),
        unflatten_outputs=unflattener(program.result),
        input_names=tuple(inputs),
        saved_inputs=tuple(inputs.index(name) for name in program.saved if name in placeholders),
        accumulated_inputs=tuple(
            inputs.index(name) for name in _accumulated_parameter_names(program)
        ),
        gradient_of_input=tuple(gradient_index.get(name) for name in inputs),
        tangent_metas={
            o.tangent: placeholders[o.tangent].tensor for o in program.outputs if o.tangent
        },
        namespaces=frozenset(namespaces),
    )


def program_on_model_device(program: Program, model: nn.Module) -> Program:
    """Return the program for the GPU that `model` is on, whichever GPU it was planned for: "cuda:0"
    in a program is the device of the step, not the first of a machine. Unchanged for a model
    without parameters and buffers.

    Raises `GuardError` where the model is on another type of device, or on several GPUs.
    """
    planned_type = device_type(program.device)
    model_devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    candidates = sorted(d for d in model_devices if device_type(d) == planned_type)
    if model_devices and not candidates:
        names = ", ".join(sorted(model_devices))
        raise GuardError(
            f"the program was made for {program.device}, with the operations that torch runs "
            f"there, and this {type(model).__name__} is on {names}: move it with "
            f"model.to({planned_type!r}), or trace it for {names}"
        )
    if len(candidates) > 1:
        raise GuardError(
            f"the program is for one device, and this {type(model).__name__} is on "
            f"{', '.join(candidates)}: put it on one"
        )
    return program_on_device(program, candidates[0]) if candidates else program


def _program_input_names(program: Program) -> list[str]:
    """Return the names of a program's parameters, buffers and inputs."""
    return [p.name for p in program.placeholders if p.kind not in ("tangent", "constant")]


def _program_constant_names(program: Program) -> list[str]:
    """Return the names of the constants whose data a program contains."""
    return [p.name for p in program.placeholders if p.kind == "constant"]


def _accumulated_parameter_names(program: Program) -> list[str]:
    """Return the names of the parameters into whose `.grad` the backward accumulates."""
    return [
        n
        for s in program.backward
        if s.target == ACCUMULATE_TARGET
        for n in referenced_names(s.args[0])
    ]


def _forward_graph(program: Program, namespaces: Collection[str]) -> fx.Graph:
    """Return the forward of a program as an fx graph, with the inputs and outputs of
    `LoweredProgram.launch_forward`."""
    placeholders = {p.name for p in program.placeholders}
    saved = [name for name in program.saved if name not in placeholders]
    return _build_program_graph(
        program.forward,
        inputs=[*_program_input_names(program), *_program_constant_names(program)],
        outputs=[*(o.name for o in program.outputs), *saved, *program.rng_states],
        namespaces=namespaces,
    )


def _backward_graph(program: Program, namespaces: Collection[str]) -> fx.Graph:
    """Return the backward of a program as an fx graph, with the inputs and outputs of
    `LoweredProgram.launch_backward`."""
    placeholders = {p.name for p in program.placeholders}
    return _build_program_graph(
        program.backward,
        inputs=[
            *sorted(program.saved, key=lambda name: name not in placeholders),  # inputs first
            *program.rng_states,
            *(o.tangent for o in program.outputs if o.tangent),
            *_program_constant_names(program),
            *(f"into_{name}" for name in _accumulated_parameter_names(program)),
        ],
        outputs=[g.name for g in program.gradients],
        namespaces=namespaces,
    )


def _build_program_graph(
    statements: Sequence[Statement],
    inputs: Sequence[str],
    outputs: Sequence[str],
    namespaces: Collection[str],
) -> fx.Graph:
    """Return the fx graph of statements, with these names of inputs and outputs. Only
    operators of these namespaces may be called."""
    graph = fx.Graph()
    # The boxed calling convention empties its argument list, so that each value is freed after its
    # last use; the ordinary one would keep every saved tensor alive through the backward.
    graph.set_codegen(_BoxedCodeGen())
    writer = _ProgramGraph(graph, namespaces)
    for name in inputs:
        writer.nodes[name] = graph.placeholder(name)
    for statement in statements:
        writer.append(statement)
    graph.output([writer.nodes[name] for name in outputs])
    return graph


class _ProgramGraph(GraphWriter):
    """The fx graph of a program's forward or backward."""

    def __init__(self, graph: fx.Graph, namespaces: Collection[str]) -> None:
        super().__init__(graph)
        self.namespaces = namespaces

    def append(self, statement: Statement) -> None:
        """Append the calls of a statement. Raises `DocumentError` for an operation that is not
        allowed or overwrites an input."""
        if statement.target == ACCUMULATE_TARGET:
            parameter, gradient = referenced_names(statement.args)
            addends = (self.nodes[f"into_{parameter}"], self.nodes[gradient])
            call = self.call(accumulate_grad, addends)
        else:
            operation: Any = resolve_operator(statement.target, self.namespaces)
            args, kwargs = self.arguments(statement)
            if statement.target == WRITE_TARGET:
                _check_write_operator(statement, self.namespaces)
            if statement.overwrites:
                _check_not_input_view(self.nodes[statement.overwrites])
            if statement.overwrites and statement.target == WRITE_TARGET:
                operation = write
            elif statement.overwrites:
                operation = resolve_out_variant(statement.target)
                kwargs[OUT_VARIANTS[statement.target].out_name] = self.nodes[statement.overwrites]
            if statement.rng_action == "save":
                state = self.call(generator_state, (statement.device,))
                self.nodes[statement.rng_state] = _renamed_node(state, statement.rng_state)
            if statement.rng_action == "replay":
                state = self.nodes[statement.rng_state]
                call = self.call(
                    run_with_generator_state, (state, statement.device, operation, args, kwargs)
                )
            elif statement.target in NEEDS_GRAD_MODE:
                call = self.call(run_with_grad_mode, (operation, args, kwargs))
            else:
                call = self.call(operation, args, kwargs)
        call.meta["remat"] = {
            "module": statement.module,
            "recomputation": statement.recomputation,
        }
        self.bind(call, statement.results)
        for binding in statement.results:
            _renamed_node(self.nodes[binding.name], binding.name)


def _check_write_operator(statement: Statement, namespaces: Collection[str]) -> None:
    """Raise `DocumentError` unless a statement of `WRITE_TARGET` names an operator that may write
    into one tensor."""
    target = statement.args[1] if len(statement.args) > 1 else None
    if not isinstance(target, str):
        raise DocumentError(f"{WRITE_TARGET} needs the name of an operator")
    resolve_writer(target, namespaces)


def _check_not_input_view(node: fx.Node) -> None:
    """Raise `DocumentError` if a node, which the program overwrites, is or views an input of the
    graph: a saved tensor, or one of the caller's."""
    base = node
    while base.op == "call_function" and (is_view(base) or is_getitem(base)):
        base = base.all_input_nodes[0]
    if base.op == "placeholder":
        raise DocumentError(f"the program writes over {node.name}, which is a view of {base.name}")


def _renamed_node(node: fx.Node, name: str) -> fx.Node:
    """Give a node this name, and return it."""
    node._rename(name)
    return node


def _decode_constant(placeholder: Placeholder) -> torch.Tensor:
    """Return the tensor of a placeholder whose data a program contains. Raises `DocumentError` for
    damaged data."""
    meta = placeholder.tensor
    dtype = literal_to_torch("dtype", meta.dtype)
    assert isinstance(dtype, torch.dtype)
    try:
        data = bytearray(base64.b64decode(placeholder.data, validate=True))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(meta.shape).to(meta.device)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise DocumentError(f"the constant {placeholder.name} is damaged: {error}") from None
