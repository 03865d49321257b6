"""`CapturedJointGraph`: a joint graph with its model, which becomes a `Trace`.

The reader separates forward from backward, names tensors and numbers storages, which identifies the
views. Then `mutations` writes new values into buffers, and `gradients` gives each gradient its own
storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from remat.documents.records import Environment
from remat.documents.structure import Structure
from remat.documents.trace import Trace
from remat.frontend.capture.eager_kernels.fake_results import correct_fake_dtypes
from remat.frontend.capture.model.attribute_guards import AttributeGuards
from remat.frontend.capture.model.flat_model import FlatModel
from remat.frontend.capture.reading.constant_folding import ConstantQuery
from remat.frontend.capture.reading.reader import JointGraph, JointGraphReader
from remat.frontend.capture.symbol_values import SymbolValues
from remat.frontend.common.garbage_collection import cycles_not_collected
from remat.frontend.common.target_gpu import CUDA_DEVICE, TargetGpu, local_gpu_name
from remat.frontend.memory.device_memory import library_bytes
from remat.passes.device_placement import results_on_cpu, trace_on_device

_EFFICIENT_ATTENTION = "aten._scaled_dot_product_efficient_attention.default"


class CapturedJointGraph:
    """A recorded joint graph with what a trace needs of its model.

    Its step runs on the devices of the captured tensors, or on the GPU `target`. `queries` are the
    constants that the capture read from tensors which depend on symbolic sizes.
    """

    def __init__(
        self,
        joint: JointGraph,
        flat_model: FlatModel,
        inputs: Structure,
        environment: Environment,
        target: TargetGpu | None = None,
        queries: Sequence[ConstantQuery] = (),
    ) -> None:
        correct_fake_dtypes(joint.graph, target)
        self._joint = joint
        self._flat_model = flat_model
        self._inputs = inputs
        self._environment = environment
        self._target = target
        self._queries = queries

    @cached_property
    def guards(self) -> AttributeGuards:
        """The guards for the Python values that the model's code read."""
        return AttributeGuards.of(self._flat_model.model, self._flat_model.access.reads)

    def is_valid_at(self, values: SymbolValues) -> bool:
        """True if every constant that the capture read from a tensor of symbolic sizes is the same
        for these symbol values."""
        return all(query.has_same_answer(values) for query in self._queries)

    def trace(self, values: SymbolValues | None = None) -> Trace:
        """Return the step as a trace, with these values for the symbols of the graph."""
        with cycles_not_collected():
            return self._trace(values or SymbolValues())

    def _trace(self, values: SymbolValues) -> Trace:
        reader = JointGraphReader(self._joint, self._flat_model, values)
        reader.read()
        builder, target = reader.builder, self._target
        model, info = self._flat_model.model, self._flat_model.output_info
        assert info.structure is not None
        device = builder.main_device()
        trace = Trace(
            model=f"{type(model).__module__}.{type(model).__qualname__}",
            device=device if target is None else "cpu",
            gpu=local_gpu_name(device) if target is None else target.name,
            placeholders=tuple(builder.placeholders),
            nodes=tuple(builder.nodes),
            outputs=tuple(builder.outputs),
            gradients=tuple(builder.gradients),
            storage_bytes=tuple(builder.storage_bytes),
            inputs=self._inputs,
            result=info.structure,
            stores=info.stores,
            environment=self._environment,
            reuses_memory=True,
            library_bytes=library_bytes(
                device,
                (node.target for node in builder.nodes),
                None if target is None else target.capability,
            ),
        )
        return _with_attention_seeds_on_cpu(
            trace if target is None else trace_on_device(trace, CUDA_DEVICE)
        )


def _with_attention_seeds_on_cpu(trace: Trace) -> Trace:
    """Move the RNG seed and offset of memory-efficient attention with dropout to the CPU. Its
    kernel returns them as CPU scalars, which the backward reads; their fake tensors are on the
    GPU."""
    return results_on_cpu(
        trace,
        {
            result.storage
            for node in trace.nodes
            if node.target == _EFFICIENT_ATTENTION and node.random
            for result in node.results
            if result.position in (2, 3)
        },
    )
