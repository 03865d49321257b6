"""Recording of a training step on fake tensors, as the joint graph of its forward and backward.

Torch's functionalization (the one in C++, of `torch.func.functionalize`) turns operations that
write in place into ones that return new tensors. Exceptions are the writes that `writes` records.
Below it, a dispatch mode records each operator that autograd and the model's code call.
`aot_export_joint_with_descriptors` of torch records the same operators in the same order, in two to
three times the time (docs/decisions/0005); the tests compare the two, for models without such
writes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode

from remat.errors import TraceError
from remat.frontend.capture.model.flat_model import FlatModel
from remat.frontend.capture.model.forward_checks import (
    GeneratorWatch,
    generator_changes_forbidden,
)
from remat.frontend.capture.model.python_state import PythonState
from remat.frontend.capture.model.stores import check_unchanged_by_backward
from remat.frontend.capture.operator_recorder import OperatorRecorder
from remat.frontend.capture.reading.reader import GraphInput, JointGraph
from remat.frontend.capture.reading.trace_builder import check_dense_tensor
from remat.frontend.capture.writes import writes_recorded
from remat.frontend.common.quantized import (
    ATTRIBUTES,
    is_quantized_subclass,
    parameter_attributes,
    plain_tensor,
    quantization_tensors,
    replace_quantization_tensors,
)
from remat.frontend.common.torch_modes import autocast_disabled, capture_paused

Tensor = torch.Tensor


def record_joint_graph(flat_model: FlatModel, leaves: Sequence[Tensor]) -> JointGraph:
    """Run forward and backward of the model on fake tensors, and record them. `leaves` are the real
    or fake tensors of its arguments.

    Raises `TraceError` for a step that cannot be expressed as functional operators.
    """
    tensors = _step_tensors(flat_model, leaves)
    fake_mode = detect_fake_mode(list(tensors.values())) or FakeTensorMode()
    assert isinstance(fake_mode, FakeTensorMode)
    with generator_changes_forbidden(flat_model.model) as generators:
        recording = _StepRecording(flat_model, fake_mode, tensors, generators)
        with writes_recorded(recording.recorder):
            return recording.run(len(leaves))


def _step_tensors(flat_model: FlatModel, leaves: Sequence[Tensor]) -> dict[GraphInput, Tensor]:
    """Return the tensors that a step reads: parameters, by all of their names, buffers, and the
    leaves of its arguments."""
    parameters = flat_model.model.named_parameters(remove_duplicate=False)
    buffers = dict(flat_model.model.named_buffers()) | quantization_tensors(flat_model.model)
    return {
        **{GraphInput("parameter", n): p for n, p in parameters if not is_quantized_subclass(p)},
        **{GraphInput("buffer", name): buffer for name, buffer in buffers.items()},
        **{GraphInput("input", str(index)): leaf for index, leaf in enumerate(leaves)},
    }


class _StepRecording:
    """The recording of one step. Its tensors are wrapped for functionalization: a wrapper
    refers to the fake tensor of its current value."""

    def __init__(
        self,
        flat_model: FlatModel,
        fake_mode: FakeTensorMode,
        tensors: dict[GraphInput, Tensor],
        generators: GeneratorWatch,
    ) -> None:
        self._flat_model = flat_model
        self._fake_mode = fake_mode
        self.recorder = OperatorRecorder(flat_model.module_paths, generators)
        self._wrappers: dict[GraphInput, Tensor] = {}
        self._storages: dict[GraphInput, int] = {}
        for number, (key, tensor) in enumerate(tensors.items(), start=1):
            # Each name of a tied parameter has a fake tensor, and so a gradient, of its own.
            fake = _fake_step_tensor(fake_mode, tensor).detach()
            self.recorder.add_input(f"primals_{number}", key, fake)
            self._storages[key] = fake.untyped_storage()._cdata
            wrapper = torch._to_functional_tensor(fake)
            # Attributes that the model's code, or a library, has set.
            if not isinstance(tensor, FakeTensor) or ATTRIBUTES in vars(tensor):
                wrapper.__dict__ = parameter_attributes(tensor)  # type: ignore[assignment]
            self._wrappers[key] = wrapper.requires_grad_(tensor.requires_grad)

    def run(self, leaf_count: int) -> JointGraph:
        """Record the step; the last `leaf_count` of its tensors are the arguments of the model."""
        wrappers = self._wrappers
        arguments = list(wrappers.values())[len(wrappers) - leaf_count :]
        differentiable = {key: w for key, w in wrappers.items() if w.requires_grad}
        # In the backward too: a checkpoint of the model's own calls a module there.
        with (
            _tensors_replaced_by_wrappers(self._flat_model.model, wrappers),
            self._flat_model.access.recorded(),
        ):
            with self._recorded():
                outputs = self._flat_model(*arguments)
            writes = self._writes()
            last_of_forward = self.recorder.last_operation
            self._check_no_gradients(
                "the forward of the model calls backward(), and a plan does not accumulate these "
                "gradients; use torch.autograd.grad in the forward, or call backward() after it"
            )
            with capture_paused():
                state = PythonState(self._flat_model.model)
            sources = self._sources(outputs, list(differentiable.values()))
            gradients = self._backward(outputs, list(differentiable.values()))
            for key, gradient in zip(differentiable, gradients, strict=True):
                if gradient is not None and gradient.layout is not torch.strided:
                    raise TraceError(sparse_gradient_error(key.target))
            with capture_paused():
                check_unchanged_by_backward(self._flat_model.model, state.changes())
            self._check_no_gradients(
                "an autograd function of the model calls backward() in its backward, and a plan "
                "does not accumulate these gradients. Remedy: use torch.autograd.grad there, with "
                "the parameters as inputs of the function, and return their gradients; or plan the "
                'blocks around it: remat.enable(model, budget, scope="blocks")'
            )
        if written := [node for node, _ in set(self._writes()) - set(writes)]:
            key = {node: key for key, node in self.recorder.inputs.items()}[written[0]]
            raise TraceError(
                f"the backward of the model writes in place into {key.kind} {key.target}, as a "
                "checkpoint of the model's own around batch norm does; use torch.utils.checkpoint, "
                "which remat disables, or write in the forward"
            )
        self.recorder.end()
        inputs = self.recorder.inputs
        joint = JointGraph(
            graph=self.recorder.graph,
            constants=self.recorder.constants,
            inputs={node: key for key, node in inputs.items()},
            writes=writes,
            outputs=tuple(map(self._node_of, outputs)),
            gradients=tuple(
                (inputs[key], self._node_of(gradient))
                for key, gradient in zip(differentiable, gradients, strict=True)
                if gradient is not None
            ),
            sources=tuple(
                outputs
                for outputs, gradient in zip(sources, gradients, strict=True)
                if gradient is not None
            ),
        )
        freed = self.recorder.freed
        if last_of_forward is not None:  # the caller has the outputs, and may release them now
            freed += [(last_of_forward, output) for output in joint.outputs]
        pairs = (*joint.writes, *joint.gradients)
        joint.graph.output((*joint.outputs, *(value for _, value in pairs)))
        order = {node: index for index, node in enumerate(joint.graph.nodes)}
        joint.graph.eliminate_dead_code()
        return replace(joint, frees=_freed_by_nodes(joint.graph, freed, order))

    def _sources(
        self, outputs: Sequence[Tensor], differentiable: Sequence[Tensor]
    ) -> list[frozenset[int]]:
        """Return, for each of the `differentiable` inputs, the indices of the differentiated
        outputs that depend on it for autograd."""
        is_differentiated = self._flat_model.output_info.differentiated
        with torch.enable_grad():
            leaves = [torch.autograd.graph.get_gradient_edge(t).node for t in differentiable]
        reached: list[set[Any]] = [
            _autograd_nodes_below(output) if is_selected else set()
            for output, is_selected in zip(outputs, is_differentiated, strict=True)
        ]
        return [
            frozenset(index for index, nodes in enumerate(reached) if leaf in nodes)
            for leaf in leaves
        ]

    def _backward(
        self, outputs: Sequence[Tensor], differentiable: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        is_differentiated = self._flat_model.output_info.differentiated
        indices = [index for index, selected in enumerate(is_differentiated) if selected]
        tangents = [
            self._tangent(number, index, outputs[index])
            for number, index in enumerate(indices, start=1)
        ]
        differentiated = [outputs[index] for index in indices]
        self._flat_model.module_paths.follow_backward(differentiated)
        self.recorder.is_backward = True
        with self._recorded(), autocast_disabled():
            return torch.autograd.grad(differentiated, differentiable, tangents, allow_unused=True)

    def _tangent(self, number: int, index: int, output: Tensor) -> Tensor:
        """Return the gradient of output number `index`, an input of the backward: tangent number
        `number`. It has the output's layout; a dense one if elements of the output share memory."""
        fake = self._fake_of(output)
        is_overlapping = torch._debug_has_internal_overlap(fake) == 1
        with self._fake_mode, torch.no_grad():
            if is_overlapping:
                tangent = torch.empty_like(fake, memory_format=torch.contiguous_format)
            else:
                tangent = torch.empty_strided(
                    fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device
                )
        self.recorder.add_input(f"tangents_{number}", GraphInput("tangent", str(index)), tangent)
        return torch._to_functional_tensor(tangent)

    def _writes(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """Return the graph inputs that the step has overwritten so far, each with its new value."""
        writes: list[tuple[fx.Node, fx.Node]] = []
        for key, wrapper in self._wrappers.items():
            node, value = self.recorder.inputs[key], self._node_of(wrapper)
            if value is not node:
                self._check_write(key, wrapper)
                writes.append((node, value))
        return tuple(writes)

    def _check_no_gradients(self, message: str) -> None:
        """Raise `TraceError` with this message if the model's code has accumulated gradients."""
        if any(wrapper.grad is not None for wrapper in self._wrappers.values()):
            raise TraceError(message)

    def _check_write(self, key: GraphInput, wrapper: Tensor) -> None:
        """Raise `TraceError` if a write into this graph input changes more than its own values."""
        if torch._functionalize_has_metadata_mutation(wrapper):
            raise TraceError(
                f"the model changes shape or strides of {key.kind} {key.target} in place; do so "
                "outside of the model, or to a view of it"
            )
        if wrapper.requires_grad and key.kind != "input":
            raise TraceError(
                f"the model writes in place into {key.kind} {key.target}, which requires a "
                "gradient; write into a clone"
            )
        storage = self._storages[key]
        for other, other_storage in self._storages.items():
            if other != key and other_storage == storage:
                raise TraceError(
                    f"the model writes in place into {key.kind} {key.target}, which shares memory "
                    f"with {other.kind} {other.target}; clone one of them"
                )

    def _node_of(self, wrapper: Tensor) -> fx.Node:
        return self.recorder.node_of(self._fake_of(wrapper))

    def _fake_of(self, wrapper: Tensor) -> Tensor:
        """Return the fake tensor of the wrapper's present value. That may record operations, which
        write into it what the step wrote into views of it."""
        with self._recorded():
            torch._sync(wrapper)
        return torch._from_functional_tensor(wrapper)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Within the context, functionalize and record operations. Torch's cache of autocast would
        take the wrapper of any input for a parameter; `AutocastCache` is in its place."""
        is_cache_enabled = torch.is_autocast_cache_enabled()
        with self._fake_mode, self.recorder, enable_python_dispatcher():
            torch._enable_functionalization(reapply_views=True)
            torch.set_autocast_cache_enabled(False)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(is_cache_enabled)
                torch._disable_functionalization()


def _freed_by_nodes(
    graph: fx.Graph, freed: Sequence[tuple[fx.Node, fx.Node]], order: Mapping[fx.Node, int]
) -> dict[fx.Node, list[fx.Node]]:
    """Return the tensors that are freed after each node of a graph, from the pairs of an operation
    and a tensor that is freed after it. Nodes of the graph stand for the unread ones after them,
    which were removed; `order` is the order of all nodes."""
    remaining = list(graph.nodes)
    positions = [order[node] for node in remaining]
    by_node: dict[fx.Node, list[fx.Node]] = {}
    for operation, tensor in freed:
        node = remaining[bisect_right(positions, order[operation]) - 1]
        by_node.setdefault(node, []).append(tensor)
    return by_node


def sparse_gradient_error(name: str) -> str:
    """Return the error message for a parameter or module with this name whose gradient is
    sparse."""
    return (
        f"the gradient of {name} is sparse (sparse=True), and a plan has dense tensors only. "
        "Remedy: make the gradient dense (module.sparse = False), or plan the modules around the "
        'embedding: remat.enable(model, budget, scope="blocks")'
    )


def _autograd_nodes_below(output: Tensor) -> set[Any]:
    """Return the nodes of autograd that the backward of an output reaches."""
    nodes: set[Any] = set()
    pending: list[Any] = [torch.autograd.graph.get_gradient_edge(output).node]
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending += [following for following, _ in node.next_functions]
    return nodes


def _fake_step_tensor(fake_mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return the fake tensor of a tensor that the step reads; the tensor itself if it is one of
    `fake_mode`. Raises `TraceError` if it is sparse, quantized, of a subclass, or a buffer that an
    earlier call has registered."""
    if torch._is_functional_tensor(tensor):
        raise TraceError(
            "the forward of the model registers a buffer; register it in __init__, or compute it "
            "in each call"
        )
    if not (isinstance(tensor, FakeTensor) and tensor.fake_mode is fake_mode):
        tensor = fake_mode.from_tensor(plain_tensor(tensor), static_shapes=True)
    check_dense_tensor(tensor)
    return tensor


@contextmanager
def _tensors_replaced_by_wrappers(
    model: nn.Module, wrappers: Mapping[GraphInput, Tensor]
) -> Iterator[None]:
    """Within the context, put the wrappers in the places of the parameters and buffers."""
    tensors_by_name = {key.target: w for key, w in wrappers.items() if key.kind != "input"}
    quantized = replace_quantization_tensors(model, tensors_by_name)
    buffers = {id(buffer): name for name, buffer in model.named_buffers()}
    before: dict[tuple[int, str], tuple[dict[str, Any], Tensor]] = {}
    for path, module in list(
        model.named_modules(remove_duplicate=False)
    ):  # if it has two names, the last
        tables: dict[str, dict[str, Any]] = {
            "parameter": module._parameters, "buffer": module._buffers,
        }  # fmt: skip
        for kind, table in tables.items():
            for name, tensor in table.items():
                if tensor is not None and not is_quantized_subclass(tensor):
                    _, original = before.setdefault((id(table), name), (table, tensor))
                    full_name = f"{path}.{name}" if path else name
                    target = buffers[id(original)] if kind == "buffer" else full_name
                    table[name] = wrappers[GraphInput(kind, target)]
    try:
        yield
    finally:
        for (_, name), (table, original) in before.items():
            table[name] = original
        for attributes, tensors in quantized:
            attributes.update(tensors)
