"""Selection of the submodules that are planned: blocks that can be captured, else their parts."""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from remat.errors import TraceError
from remat.frontend.blocks.block_options import BlockSolver
from remat.frontend.blocks.discovery import (
    Submodule,
    children_with_parameters,
    repeated_blocks,
)
from remat.frontend.blocks.dry_run import DryRun, run_dry
from remat.frontend.planning.optimize_options import OptimizeOptions
from remat.frontend.runtime.guards import ModelCall
from remat.limits.outputs import are_dropped
from remat.report.tables import fold_layer_numbers

_DATA_DEPENDENT = "its calls depend on the data"


def select_blocks(
    model: nn.Module,
    call: ModelCall,
    options: OptimizeOptions,
    solver: BlockSolver,
    *,
    keep_uncapturable: bool = False,
) -> tuple[DryRun, dict[int, str]]:
    """Select the blocks to plan; return a dry run with them, and the capture failures by module id.

    A block that cannot be captured is replaced by its child modules, until the rest can be
    captured. Modules without children and those whose calls depend on the data are measured in
    eager mode instead. With `keep_uncapturable`, blocks that cannot be captured are measured in
    eager mode as a whole, too.
    """
    blocks = repeated_blocks(model) or children_with_parameters(Submodule("", model))
    if not blocks:
        raise TraceError(f"this {type(model).__name__} has no modules that could be planned")
    parts: dict[int, Submodule] = {}  # child modules that replace an uncapturable block
    eager: dict[int, Submodule] = {}
    failures: dict[int, str] = {}
    while True:
        dry_run = run_dry(
            model,
            call,
            blocks,
            measured_submodules=list(eager.values()),
            differentiate=options.differentiate,
            outputs_dropped=are_dropped(options.outputs),
        )
        data_dependent = {} if not parts else _data_dependent(dry_run, parts)
        uncapturable: set[int] = set()
        opaque = {id(c.submodule.module) for c in dry_run.calls if c.signature is None}
        for block_call in dry_run.calls:
            module = id(block_call.submodule.module)
            if module not in opaque and (module in eager or module in data_dependent):
                continue
            if isinstance(failure := solver.trace_or_failure(block_call), str):
                uncapturable.add(module)
                failures[module] = failure
        if not uncapturable and data_dependent.keys() <= eager.keys():
            return dry_run, failures
        eager |= data_dependent
        failures |= dict.fromkeys(data_dependent, _DATA_DEPENDENT)
        if keep_uncapturable:
            eager |= {id(b.module): b for b in blocks if id(b.module) in uncapturable - opaque}
            uncapturable &= opaque
        blocks = [
            replacement
            for block in blocks
            for replacement in _replacements(block, uncapturable, opaque, parts, eager)
        ]
        if not blocks:
            raise TraceError(
                f"nothing of this {type(model).__name__} can be planned: "
                f"{next(iter(failures.values()))}"
            )


def _replacements(
    block: Submodule,
    uncapturable: Container[int],
    opaque: Container[int],
    parts: dict[int, Submodule],
    eager: dict[int, Submodule],
) -> list[Submodule]:
    """Return the child modules that replace an uncapturable block; the block itself if it can be
    captured, or has no children.

    Modules without children run in eager mode, not under a plan: where one reads its input twice
    and others read it, too, the gradients would be summed in another order. Without children, a
    block in `opaque` (its arguments cannot be described, such as a cache, or it has side effects)
    is left out: it must never run twice.
    """
    if id(block.module) not in uncapturable:
        return [block]
    parts.pop(id(block.module), None)
    children = children_with_parameters(block)
    if not children:
        children = [] if id(block.module) in opaque else [block]
    parts |= {id(c.module): c for c in children}
    eager |= {id(c.module): c for c in children if c is block or not children_with_parameters(c)}
    return children


def _data_dependent(dry_run: DryRun, parts: dict[int, Submodule]) -> dict[int, Submodule]:
    """Return the parts whose calls depend on the data, such as experts: the modules of one list and
    class get inputs of different shapes, or some are not called. The next batch differs."""
    input_properties: dict[tuple[str, str], set[object]] = {}
    members: dict[tuple[str, str], dict[int, Submodule]] = {}
    for call in dry_run.calls:
        group = _list_and_class(call.submodule)
        input_properties.setdefault(group, set()).add(call.signature and call.signature.inputs)
    for module, part in parts.items():
        members.setdefault(_list_and_class(part), {})[module] = part
    called = {id(call.submodule.module) for call in dry_run.calls}
    data_dependent: dict[int, Submodule] = {}
    for group, modules in members.items():
        properties = input_properties.get(group, ())
        if properties and (len(properties) > 1 or not modules.keys() <= called):
            data_dependent |= modules
    return data_dependent


def _list_and_class(submodule: Submodule) -> tuple[str, str]:
    return fold_layer_numbers(submodule.path), submodule.class_name
