"""Where torch's versions differ: what its partitioner offers, called by what signatures say.

Held by tests on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
else:  # torch 2.11 takes any function, and keeps graphs on disk for one with this class
    SchedulerPass = getattr(
        custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass
    )


def min_cut(
    joint: fx.GraphModule,
    inputs: Sequence[object],
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What torch.compile does without remat. Changes the joint graph."""
    from torch._functorch import config

    with config.patch(activation_memory_budget=1.0):
        return partitioners.min_cut_rematerialization_partition(
            joint,
            inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )


def extract(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    saved_numbers: list[fx.Node],
    saved_objects: list[fx.Node],
    num_fwd_outputs: int,
    static: Sequence[fx.Node],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph, in its order, with what is saved in between."""
    split = partitioners._extract_fwd_bwd_modules
    more: dict[str, Any] = {}
    if "saved_opaque_nodes" in inspect.signature(split).parameters:
        more["saved_opaque_nodes"] = saved_objects
    forward, backward = split(
        joint,
        saved,
        saved_sym_nodes=saved_numbers,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=OrderedSet(static),
        **more,
    )
    # With `fallback_random` torch leaves draws of the forward there, too, where nobody reads them.
    backward.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    backward.recompile()
    return _finished(forward, is_backward=False), _finished(backward, is_backward=True)


def _finished(module: fx.GraphModule, *, is_backward: bool) -> fx.GraphModule:
    """As torch's partitioner leaves its own: results taken apart early, generators threaded."""
    if (raise_getitems := getattr(partitioners, "raise_getitems", None)) is not None:
        module = raise_getitems(module)
    thread = getattr(partitioners, "thread_graphsafe_rng_from_hops", None)
    return module if thread is None else thread(module, is_backward=is_backward)


def raised_inside(error: BaseException | None, kind: type[E]) -> E | None:
    """The error of this kind that another was raised for: Inductor wraps what is raised in it."""
    while error is not None and not isinstance(error, kind):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


@contextmanager
def backward_at_once() -> Iterator[None]:
    """The backward is compiled with the forward: what it takes is known before a step runs."""
    from torch._functorch import config

    with config.patch(force_non_lazy_backward_lowering=True):
        yield


@contextmanager
def kernel_by_kernel() -> Iterator[None]:
    """On the CPU, Inductor calls all kernels between two library calls at once: what the first
    reads is freed after the last, and what the last writes is there before the first. Here each
    is a call of its own, as on a GPU."""
    from torch._inductor.codegen import cpp

    scheduling: Any = cpp.CppScheduling
    most = scheduling.MAX_FUSED_KERNEL_ARGS_NUM
    scheduling.MAX_FUSED_KERNEL_ARGS_NUM = -1
    try:
        yield
    finally:
        scheduling.MAX_FUSED_KERNEL_ARGS_NUM = most


@contextmanager
def reused_at_once() -> Iterator[None]:
    """Inductor keeps a buffer that nobody reads for a later one of its size, while its own estimate
    of the peak allows. Here it gives it to the next kernel or frees it, as planned."""
    from torch._inductor.codegen.wrapper import AllocateLine

    def follows(line: Any, free: Any, size: int) -> bool:
        return free.scheduler_node_index + 1 == line.scheduler_node_index

    line: Any = AllocateLine
    own = line.should_reuse_buffer
    line.should_reuse_buffer = follows
    try:
        yield
    finally:
        line.should_reuse_buffer = own


def changed_afterwards(joint: fx.GraphModule) -> set[fx.Node]:
    """The placeholders that are given new values once the forward has returned: the backward finds
    those. (Of buffers, and of all that needs no gradient, that is part of the graph.)"""
    described = joint.graph.output_node().meta.get("desc", ())
    changed = [d.mutated_input for d in described if isinstance(d, InputMutationAOTOutput)]
    placeholders = joint.graph.find_nodes(op="placeholder")
    return {node for node in placeholders if node.meta.get("desc") in changed}


@lru_cache(maxsize=1)
def frees_tangents() -> bool:
    """Whether a compiled backward may free the gradients that come from outside once they are read:
    autograd of torch 2.13 hands them over in a list; before, it holds them to the end."""
    from torch._functorch._aot_autograd import runtime_wrappers

    return "boxed_grads_call" in inspect.getsource(runtime_wrappers)


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder is a gradient that comes from outside."""
    return partitioners._is_tangent(node)
