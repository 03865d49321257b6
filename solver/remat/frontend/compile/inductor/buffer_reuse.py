"""Inductor's in-place reuse: which kernels write an output over an input that they read last.

A kernel that reads and writes two tensors of one size at the same indices needs memory for only one
of them. Inductor decides this during code generation, in the order of the kernels
(`SchedulerNode.decide_inplace_update`). These functions apply the same rules before code
generation. Where the rules depend on more than is known then, the output counts as a separate
buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch._inductor import config, ir
from torch._inductor.codegen.common import BackendFeature
from torch._inductor.codegen.wrapper import can_match_buffer_size
from torch._inductor.dependencies import MemoryDep
from torch._inductor.scheduler import NopKernelSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V

_UNALLOCATED_LAYOUTS = (ir.NoneLayout, ir.MultiOutputLayout, ir.MutationLayoutSHOULDREMOVE)
"""Layouts of buffers without memory of their own."""

Readers = Mapping[str, Sequence[Any]]
"""The scheduler nodes that read a buffer, by the buffer's name."""


def buffer_readers(kernels: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the scheduler nodes that read each buffer, by the buffer's name. A kernel that reads
    a buffer in several of its fused nodes is listed with each of them."""
    readers: dict[str, list[Any]] = {}
    for kernel in kernels:
        for part in kernel.get_nodes():
            for name in dict.fromkeys(read.name for read in part.read_writes.reads):
                readers.setdefault(name, []).append(part)
    return readers


def donated_inputs() -> set[str]:
    """Return the names of the backward's inputs that torch donates: it may overwrite them."""
    inputs = V.graph.graph_inputs_original.items()
    return {name for name, tensor in inputs if isinstance(tensor, ir.DonatedBuffer)}


def in_place_buffers(kernels: Sequence[Any], overwritable: Collection[str]) -> dict[str, str]:
    """Return the buffers that kernels write in place: output name -> name of the input buffer
    whose memory it takes. Graph inputs are overwritten only if they are `overwritable`."""
    readers = buffer_readers(kernels)
    graph_outputs = set(V.graph.get_output_names())
    finished: set[str] = set()
    in_place: dict[str, str] = {}
    overwritten: set[str] = set()
    for kernel in kernels:
        assigned: set[str] = set()
        for output, read, part in in_place_candidates(kernel, readers):
            is_input = read in V.graph.graph_inputs
            is_allowed = read in overwritable if is_input else read not in graph_outputs
            if not is_allowed or read in overwritten or output in assigned:
                continue
            other_readers = {r.get_name() for r in readers[read] if r is not part}
            if other_readers <= finished | part.ancestors:
                in_place[output] = read
                overwritten.add(read)
                assigned.add(output)
        finished.update(name for part in kernel.get_nodes() for name in part.get_operation_names())
    return in_place


def in_place_candidates(kernel: Any, readers: Readers) -> Iterator[tuple[str, str, Any]]:
    """Yield (output, read buffer, scheduler node) where a fused node of the kernel writes the
    output at the indices at which it reads a buffer of the same size. If nothing else needs the
    buffer after this kernel, the output may take its memory."""
    kernel_parts = {part.get_name() for part in kernel.get_nodes()}
    internal = internal_buffers(kernel)
    for part in kernel.get_nodes():
        if not isinstance(part, SchedulerNode) or not _backend_allows_in_place(part):
            continue
        for buffer in part.get_outputs():
            output: Any = buffer.node
            if not output.should_allocate() or buffer.get_aliases() or buffer.get_mutations():
                continue
            if buffer.get_name() in internal:
                continue
            for read in part.read_writes.reads:
                source = _overwritable_buffer(read.name)
                own_readers = [r for r in readers[read.name] if r.get_name() in kernel_parts]
                if (
                    source is not None
                    and all(r is part or r.get_name() in part.ancestors for r in own_readers)
                    and isinstance(read, MemoryDep)
                    and part.can_inplace(read)
                    and can_match_buffer_size(source, output)
                    and can_match_buffer_size(output, source)  # equal to the byte
                    and _has_equal_indices(read, own_readers)
                ):
                    if read.name in internal:
                        break  # Inductor picks this one, and it has no memory to take
                    yield buffer.get_name(), read.name, part


def internal_buffers(kernel: Any) -> set[str]:
    """Return the names of the buffers that only the kernel itself reads; none for a kernel of one
    scheduler node. They are never allocated, except those in `cpu_reduction_buffers`."""
    parts = {part.get_name() for part in kernel.get_nodes()}
    outputs = kernel.get_outputs() if len(parts) > 1 else ()
    return {b.get_name() for b in outputs if all(user.get_name() in parts for user in b.users)}


def cpu_reduction_buffers(kernel: Any) -> set[str]:
    """Return the names of the internal buffers with results of reductions on the CPU: one loop of
    the kernel may write them for its next loop. On GPUs they stay in registers: no names."""
    reductions = (p for p in kernel.get_nodes() if p.is_reduction() and _runs_on_cpu(p))
    return internal_buffers(kernel) & {b.get_name() for p in reductions for b in p.get_outputs()}


def concat_buffer_of(name: str) -> str | None:
    """Return the name of the concatenated buffer that this buffer is, or is a slice of; None if it
    is neither. Kernels write the slices of a concatenation directly."""
    scheduled = V.graph.scheduler.name_to_buf.get(name)
    buffer: Any = scheduled.node if scheduled is not None else None
    if isinstance(buffer, ir.ConcatKernel):
        return _outermost_concat(buffer)
    layout = getattr(buffer, "layout", None)
    if isinstance(layout, ir.NonOwningLayout):
        return _outermost_concat(V.graph.get_buffer(layout.view.get_name()))
    return None


def _outermost_concat(buffer: Any) -> str:
    """Return the name of the concatenated buffer that no other one contains."""
    while isinstance(buffer.layout, ir.NonOwningLayout):  # a slice of another concatenation
        buffer = V.graph.get_buffer(buffer.layout.view.get_name())
    return buffer.get_name()


def _runs_on_cpu(part: Any) -> bool:
    """True if a scheduler node runs on the CPU."""
    device = part.get_device()
    return device is not None and device.type == "cpu"


def _backend_allows_in_place(part: SchedulerNode) -> bool:
    """True if Inductor may write in place on the device of a scheduler node."""
    device = part.get_device()
    return config.inplace_buffers and V.graph.has_feature(device, BackendFeature.INPLACE_BUFFERS)


def _overwritable_buffer(name: str) -> Any:
    """Return the buffer or graph input of this name if its memory may be reused in place; None if
    it has views, is mutated, or has no memory of its own."""
    scheduler = V.graph.scheduler
    if name in scheduler.mutation_renames or name in scheduler.mutation_real_name:
        return None
    if name in V.graph.constants or name in V.graph.never_reuse_buffers:
        return None
    if name in V.graph.graph_inputs:
        graph_input: Any = V.graph.graph_inputs[name]
        return graph_input if hasattr(graph_input, "get_layout") else None
    buffer = scheduler.name_to_buf.get(name)
    if buffer is None or buffer.node is None or buffer.get_aliases():
        return None
    if isinstance(buffer.defining_op, NopKernelSchedulerNode):
        return None
    is_unallocated = isinstance(buffer.node.get_output_spec(), _UNALLOCATED_LAYOUTS)
    return None if is_unallocated else buffer.node


def _has_equal_indices(read: MemoryDep, parts: Sequence[Any]) -> bool:
    """True if the scheduler nodes `parts` read and write the buffer of `read` at the same
    indices."""
    deps = {d for p in parts for d in p.read_writes.reads_and_writes() if d.name == read.name}
    return len(deps) <= 1
