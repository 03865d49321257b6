"""Where Inductor writes what a kernel makes over what it reads for the last time.

A kernel that reads and writes the same places of two tensors of one size needs memory for one of
them. Inductor decides on that while it generates code, in the order of the kernels
(`SchedulerNode.decide_inplace_update`); these are its rules, to be asked before. Where they leave
it open, a tensor counts as one of its own.
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

_OWN_LAYOUTS = (ir.NoneLayout, ir.MultiOutputLayout, ir.MutationLayoutSHOULDREMOVE)
"""Of what is no tensor of its own."""

Readers = Mapping[str, Sequence[Any]]
"""By the name of a tensor, the parts of kernels that read it."""


def readers_of(nodes: Sequence[Any]) -> dict[str, list[Any]]:
    """All tensors that these kernels read."""
    found: dict[str, list[Any]] = {}
    for node in nodes:
        for part in node.get_nodes():
            for name in dict.fromkeys(read.name for read in part.read_writes.reads):
                found.setdefault(name, []).append(part)
    return found


def donated() -> set[str]:
    """The inputs that a backward may write over: torch says which."""
    inputs = V.graph.graph_inputs_original.items()
    return {name for name, tensor in inputs if isinstance(tensor, ir.DonatedBuffer)}


def overwritten(nodes: Sequence[Any], given: Collection[str]) -> dict[str, str]:
    """By the name of a tensor that is written, that of the one whose memory it takes, for kernels
    in this order. Of the inputs, those `given` away may be written over."""
    readers = readers_of(nodes)
    returned = set(V.graph.get_output_names())
    done: set[str] = set()
    found: dict[str, str] = {}
    gone: set[str] = set()
    for node in nodes:
        taken: set[str] = set()
        for written, read, part in may_overwrite(node, readers):
            is_free = read in given if read in V.graph.graph_inputs else read not in returned
            if not is_free or read in gone or written in taken:
                continue
            others = {r.get_name() for r in readers[read] if r is not part}
            if others <= done | part.ancestors:
                found[written] = read
                gone.add(read)
                taken.add(written)
        done.update(name for part in node.get_nodes() for name in part.get_operation_names())
    return found


def may_overwrite(node: Any, readers: Readers) -> Iterator[tuple[str, str, Any]]:
    """What a kernel writes, what of that size it reads at the same places, and the part of it that
    does both: if nobody else needs it any more, one may take the other's memory."""
    own = {part.get_name() for part in node.get_nodes()}
    inside = inside_of(node)
    for part in node.get_nodes():
        if not isinstance(part, SchedulerNode) or not _is_allowed(part):
            continue
        for buffer in part.get_outputs():
            made: Any = buffer.node
            if not made.should_allocate() or buffer.get_aliases() or buffer.get_mutations():
                continue
            if buffer.get_name() in inside:
                continue
            for read in part.read_writes.reads:
                before = _tensor(read.name)
                here = [r for r in readers[read.name] if r.get_name() in own]
                if (
                    before is not None
                    and all(r is part or r.get_name() in part.ancestors for r in here)
                    and isinstance(read, MemoryDep)
                    and part.can_inplace(read)
                    and can_match_buffer_size(before, made)
                    and can_match_buffer_size(made, before)  # to the byte
                    and _is_read_alike(read, here)
                ):
                    if read.name in inside:
                        break  # its memory is taken, which it has for this: nothing is gained
                    yield buffer.get_name(), read.name, part


def inside_of(node: Any) -> set[str]:
    """What a kernel makes that only itself reads: it is never written, but `passed_on`."""
    own = {part.get_name() for part in node.get_nodes()}
    made = node.get_outputs() if len(own) > 1 else ()
    return {b.get_name() for b in made if all(user.get_name() in own for user in b.users)}


def passed_on(node: Any) -> set[str]:
    """Of that, sums and maxima that a loop of a kernel for CPUs may leave to its next one in a
    buffer. On GPUs they stay in registers."""
    sums = (p for p in node.get_nodes() if p.is_reduction() and _is_on_cpu(p))
    return inside_of(node) & {b.get_name() for part in sums for b in part.get_outputs()}


def whole_of(name: str) -> str | None:
    """The tensor that a concatenation makes, for itself and for the parts that kernels write into
    it; None for others."""
    found = V.graph.scheduler.name_to_buf.get(name)
    made: Any = found.node if found is not None else None
    if isinstance(made, ir.ConcatKernel):
        return _outermost(made)
    layout = getattr(made, "layout", None)
    if isinstance(layout, ir.NonOwningLayout):
        return _outermost(V.graph.get_buffer(layout.view.get_name()))
    return None


def _outermost(made: Any) -> str:
    while isinstance(made.layout, ir.NonOwningLayout):  # a part of another concatenation
        made = V.graph.get_buffer(made.layout.view.get_name())
    return made.get_name()


def _is_on_cpu(part: Any) -> bool:
    device = part.get_device()
    return device is not None and device.type == "cpu"


def _is_allowed(part: SchedulerNode) -> bool:
    device = part.get_device()
    return config.inplace_buffers and V.graph.has_feature(device, BackendFeature.INPLACE_BUFFERS)


def _tensor(name: str) -> Any:
    """What can be written over: a buffer or an input of which nothing else is a view, and which
    nothing changes."""
    scheduler = V.graph.scheduler
    if name in scheduler.mutation_renames or name in scheduler.mutation_real_name:
        return None
    if name in V.graph.constants or name in V.graph.never_reuse_buffers:
        return None
    if name in V.graph.graph_inputs:
        found: Any = V.graph.graph_inputs[name]
        return found if hasattr(found, "get_layout") else None
    buffer = scheduler.name_to_buf.get(name)
    if buffer is None or buffer.node is None or buffer.get_aliases():
        return None
    if isinstance(buffer.defining_op, NopKernelSchedulerNode):
        return None
    return None if isinstance(buffer.node.get_output_spec(), _OWN_LAYOUTS) else buffer.node


def _is_read_alike(read: MemoryDep, parts: Sequence[Any]) -> bool:
    """Whether all parts of a kernel that read or write it do so at the same places."""
    deps = {d for p in parts for d in p.read_writes.reads_and_writes() if d.name == read.name}
    return len(deps) <= 1
