"""Read a joint graph (fx, with AOTAutograd's descriptors) into a `Trace`.

Forward and backward are told apart, tensors named, storages numbered (so that views are told from
operations); then `mutations` writes buffers back and `gradients` gives every gradient a storage of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from remat.documents.records import Environment
from remat.documents.structure import Structure
from remat.documents.trace import Trace
from remat.frontend.capture.eager_kernels.fake_dtypes import correct_fakes
from remat.frontend.capture.model.flat_model import Flat
from remat.frontend.capture.reading.constants import Question
from remat.frontend.capture.reading.reader import Reader
from remat.frontend.capture.symbolic_sizes import Sizes
from remat.frontend.common.target import PLACE, Target, gpu_at
from remat.frontend.memory.device_memory import library_bytes
from remat.passes.relocate import relocated, results_on_host

EFFICIENT_ATTENTION = "aten._scaled_dot_product_efficient_attention.default"


class Joint:
    """A joint graph that `aot_export_joint_with_descriptors` made of `flat`, for a step where its
    tensors are, or on `target`."""

    def __init__(
        self,
        module: fx.GraphModule,
        flat: Flat,
        inputs: Structure,
        environment: Environment,
        target: Target | None = None,
        questions: Sequence[Question] = (),
    ) -> None:
        module.graph.eliminate_dead_code()
        correct_fakes(module.graph, target)
        self._module = module
        self._flat = flat
        self._inputs = inputs
        self._environment = environment
        self._target = target
        self._questions = questions

    def is_the_same_at(self, sizes: Sizes) -> bool:
        """Whether what decided on constants would decide so for these sizes, too."""
        return all(question.has_same_answer(sizes) for question in self._questions)

    def trace(self, sizes: Sizes | None = None) -> Trace:
        """The step where symbols are these sizes."""
        reader = Reader(self._module, self._flat, sizes or Sizes())
        reader.read()
        draft, target = reader.draft, self._target
        model, result = self._flat.model, self._flat.info.structure
        assert result is not None
        capability = None if target is None else target.capability
        gpu = gpu_at(draft.device()) if target is None else target.name
        trace = Trace(
            model=f"{type(model).__module__}.{type(model).__qualname__}",
            device="cpu" if target is not None else draft.device(),
            gpu=gpu,
            placeholders=tuple(draft.placeholders),
            nodes=tuple(draft.nodes),
            outputs=tuple(draft.outputs),
            gradients=tuple(draft.gradients),
            storages=tuple(draft.storages),
            inputs=self._inputs,
            result=result,
            environment=self._environment,
            library_bytes=library_bytes(
                draft.device(), (node.target for node in draft.nodes), capability
            ),
        )
        return with_host_seeds(trace if target is None else relocated(trace, PLACE))


def with_host_seeds(trace: Trace) -> Trace:
    """The trace with the seed and the offset of memory-efficient attention where they are. Where it
    draws, its kernel returns them as scalars of the CPU, from which the backward reads them; a fake
    tensor says that they are on the GPU."""
    return results_on_host(
        trace,
        {
            result.storage
            for node in trace.nodes
            if node.target == EFFICIENT_ATTENTION and node.seeded
            for result in node.results
            if result.position in (2, 3)
        },
    )
