"""Differences between the versions of torch that remat supports, detected from signatures.

Everything here wraps AOTAutograd's partitioner or Inductor's pass hooks. Tests run it on torch
2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from torch import fx
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._inductor import custom_graph_pass
from torch.utils._ordered_set import OrderedSet

E = TypeVar("E", bound=BaseException)

if TYPE_CHECKING:
    SchedulerPass = custom_graph_pass.CustomSchedulerPass
else:  # torch 2.11 takes any function; its cache on disk needs an instance of this class
    SchedulerPass = getattr(
        custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass
    )


def min_cut_partition(
    joint: fx.GraphModule,
    inputs: Sequence[object],
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and backward graphs of plain torch.compile for a joint graph, which is
    modified."""
    from torch._functorch import config

    with config.patch(activation_memory_budget=1.0):
        graph_modules = partitioners.min_cut_rematerialization_partition(
            joint,
            inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )
    _remove_misplaced_samples(*graph_modules)
    return graph_modules


def _remove_misplaced_samples(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Remove unused random operations from the graph, forward or backward, that is not theirs.

    With `fallback_random`, torch leaves them in both graphs if their inputs are available there. So
    they would sample a second time, and later operations would get other random numbers.
    """
    from torch._inductor import config

    def in_forward(node: fx.Node) -> bool:
        is_forward = node.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")
        return node.is_impure(impure_random=config.fallback_random and is_forward)

    def in_backward(node: fx.Node) -> bool:
        return node.is_impure(impure_random=config.fallback_random and node.name not in names)

    forward.graph.eliminate_dead_code(in_forward)
    names = {node.name for node in forward.graph.nodes}
    backward.graph.eliminate_dead_code(in_backward)
    forward.recompile()
    backward.recompile()


def extract_forward_backward(
    joint: fx.GraphModule,
    saved_tensors: list[fx.Node],
    saved_scalars: list[fx.Node],
    saved_objects: list[fx.Node],
    num_fwd_outputs: int,
    static_inputs: Sequence[fx.Node],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and backward graphs of a joint graph, in its order, so that the forward
    saves these tensors, scalars and other objects. `static_inputs` have fixed addresses."""
    extract = partitioners._extract_fwd_bwd_modules
    version_arguments: dict[str, Any] = {}
    if "saved_opaque_nodes" in inspect.signature(extract).parameters:  # torch 2.15
        version_arguments["saved_opaque_nodes"] = saved_objects
    forward, backward = extract(
        joint,
        saved_tensors,
        saved_sym_nodes=saved_scalars,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=OrderedSet(static_inputs),
        **version_arguments,
    )
    _remove_misplaced_samples(forward, backward)
    forward = _postprocess_graph(forward, is_backward=False)
    return forward, _postprocess_graph(backward, is_backward=True)


def _postprocess_graph(module: fx.GraphModule, *, is_backward: bool) -> fx.GraphModule:
    """Apply the passes of torch's partitioner to a forward or backward graph, and return it: move
    `getitem` nodes to their producers, and pass RNG states to higher-order operators."""
    if (raise_getitems := getattr(partitioners, "raise_getitems", None)) is not None:
        module = raise_getitems(module)
    thread_rng = getattr(partitioners, "thread_graphsafe_rng_from_hops", None)
    return module if thread_rng is None else thread_rng(module, is_backward=is_backward)


def cause_of_type(error: BaseException | None, error_type: type[E]) -> E | None:
    """Return the first error of a type in a chain of causes, or None. Inductor and Dynamo wrap
    the exceptions that are raised inside of them."""
    while error is not None and not isinstance(error, error_type):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


def without_frames(error: E) -> E:
    """Remove traceback and causes from an error that was handled, and return it.

    Their frames reference those of all callers, down to the training loop. In a variable of one of
    them, the error would be in a reference cycle, which keeps their tensors allocated until the
    garbage collector runs: the outputs of the first compiled call, and its inputs.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def inputs_mutated_after_forward(joint: fx.GraphModule) -> set[fx.Node]:
    """Return the placeholders whose mutation AOTAutograd applies after the forward has returned.

    The backward reads the mutated values. Mutations of buffers, and of other inputs that need no
    gradient, are part of the graph and not returned here.
    """
    descriptors = joint.graph.output_node().meta.get("desc", ())
    mutated = [d.mutated_input for d in descriptors if isinstance(d, InputMutationAOTOutput)]
    placeholders = joint.graph.find_nodes(op="placeholder")
    return {node for node in placeholders if node.meta.get("desc") in mutated}


@lru_cache(maxsize=1)
def backward_frees_tangents() -> bool:
    """True if a compiled backward may free its tangents once they are read.

    Since torch 2.13, autograd passes them in a list that the backward may clear; earlier versions
    hold them until the backward ends.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    return "boxed_grads_call" in inspect.getsource(runtime_wrappers)


def is_tangent(node: fx.Node) -> bool:
    """True if a placeholder is a tangent: the gradient of one of the forward's outputs."""
    return partitioners._is_tangent(node)
