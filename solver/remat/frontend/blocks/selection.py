"""Selection of the submodules to plan: blocks that can be captured, else their child modules."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from remat.costs.roofline import Roofline
from remat.errors import TraceError
from remat.frontend.blocks.block_options import BlockSolver
from remat.frontend.blocks.discovery import (
    Submodule,
    children_with_parameters,
    repeated_blocks,
)
from remat.frontend.blocks.dry_run import DryRun, run_dry
from remat.frontend.blocks.profile import measure_eager_options
from remat.frontend.runtime.guards import ModelCall
from remat.limits.options import are_dropped
from remat.plan_options import CheckedOptions
from remat.report.report import fold_layer_numbers

_DATA_DEPENDENT = "its calls depend on the data"


@dataclass(frozen=True)
class Selection:
    """The dry run with the selected blocks. `failures` says why modules cannot be captured, by the
    `id` of the module. `replaced` are pairs of a block's path and the reason why its submodules
    were selected instead."""

    dry_run: DryRun
    failures: Mapping[int, str]
    replaced: tuple[tuple[str, str], ...]


def select_blocks(
    model: nn.Module,
    call: ModelCall,
    options: CheckedOptions,
    solver: BlockSolver,
    *,
    keep_uncapturable: bool = False,
    limit_bytes: int | None = None,
    growth_bytes: int = 0,
) -> Selection:
    """Select the blocks to plan, and run a step dry with them.

    A block that cannot be captured is replaced by its child modules, until the rest can be
    captured. Modules without children and those whose calls depend on the data are measured in
    eager mode instead. With `keep_uncapturable`, blocks that cannot be captured are measured in
    eager mode as a whole, too. `limit_bytes` and `growth_bytes` are for `run_dry`, which raises
    `DryRunTooLarge`.
    """
    blocks = repeated_blocks(model) or children_with_parameters(Submodule("", model))
    if not blocks:
        raise TraceError(f"this {type(model).__name__} has no modules that could be planned")
    roofline = options.costs if isinstance(options.costs, Roofline) else None
    child_modules: dict[int, Submodule] = {}  # child modules that replace an uncapturable block
    eager: dict[int, Submodule] = {}
    failures: dict[int, str] = {}
    replaced: list[tuple[str, str]] = []
    while True:
        dry_run = run_dry(
            model,
            call,
            blocks,
            measured_submodules=list(eager.values()),
            measure_options=partial(measure_eager_options, roofline=roofline),
            differentiate=options.differentiate,
            outputs_dropped=are_dropped(options.outputs),
            limit_bytes=limit_bytes,
            growth_bytes=growth_bytes,
        )
        data_dependent = (
            {} if not child_modules else _data_dependent_submodules(dry_run, child_modules)
        )
        uncapturable: set[int] = set()
        unrepeatable = {id(c.submodule.module) for c in dry_run.calls if c.signature is None}
        for block_call in dry_run.calls:
            module = id(block_call.submodule.module)
            if module not in unrepeatable and (module in eager or module in data_dependent):
                continue
            if isinstance(failure := solver.trace_or_failure(block_call), str):
                uncapturable.add(module)
                failures[module] = failure
        if not uncapturable and data_dependent.keys() <= eager.keys():
            return Selection(dry_run, failures, tuple(replaced))
        eager |= data_dependent
        failures |= dict.fromkeys(data_dependent, _DATA_DEPENDENT)
        if keep_uncapturable:
            eager |= {
                id(b.module): b for b in blocks if id(b.module) in uncapturable - unrepeatable
            }
            uncapturable &= unrepeatable
        replacements = [
            (
                block,
                _replacement_submodules(block, uncapturable, unrepeatable, child_modules, eager),
            )
            for block in blocks
        ]
        replaced += [
            (block.path, f"{block.class_name}: {failures[id(block.module)]}")
            for block, others in replacements
            if others != [block] and not any(block.path.startswith(f"{p}.") for p, _ in replaced)
        ]
        blocks = [block for _, others in replacements for block in others]
        if not blocks:
            raise TraceError(
                f"nothing of this {type(model).__name__} can be planned: "
                f"{next(iter(failures.values()))}"
            )


def _replacement_submodules(
    block: Submodule,
    uncapturable: Container[int],
    unrepeatable: Container[int],
    child_modules: dict[int, Submodule],
    eager: dict[int, Submodule],
) -> list[Submodule]:
    """Return the child modules that replace an uncapturable block; the block itself if it can be
    captured, or has no children.

    Adds the replacements to `child_modules`, and those that run in eager mode to `eager`: modules
    without children, since where one reads its input twice and others read it, too, a plan would
    sum the gradients in another order. Without children, a block in `unrepeatable` (its arguments
    cannot be described, such as a cache, or it has side effects) is left out: it must never run
    twice.
    """
    if id(block.module) not in uncapturable:
        return [block]
    child_modules.pop(id(block.module), None)
    children = children_with_parameters(block)
    if not children:
        children = [] if id(block.module) in unrepeatable else [block]
    child_modules |= {id(c.module): c for c in children}
    eager |= {id(c.module): c for c in children if c is block or not children_with_parameters(c)}
    return children


def _data_dependent_submodules(
    dry_run: DryRun, child_modules: dict[int, Submodule]
) -> dict[int, Submodule]:
    """Return the `child_modules` whose calls depend on the data, such as experts: the modules of
    one list and class get inputs of different shapes, or some are not called, but not all. The next
    batch differs."""
    input_properties: dict[tuple[str, str], set[object]] = {}
    members: dict[tuple[str, str], dict[int, Submodule]] = {}
    for call in dry_run.calls:
        group = _layer_path_and_class(call.submodule)
        input_properties.setdefault(group, set()).add(call.signature and call.signature.inputs)
    for module, part in child_modules.items():
        members.setdefault(_layer_path_and_class(part), {})[module] = part
    called = {id(call.submodule.module) for call in dry_run.calls}
    data_dependent: dict[int, Submodule] = {}
    for group, modules in members.items():
        properties = input_properties.get(group, ())
        if properties and (len(properties) > 1 or not modules.keys() <= called):
            data_dependent |= modules
    return data_dependent


def _layer_path_and_class(submodule: Submodule) -> tuple[str, str]:
    return fold_layer_numbers(submodule.path), submodule.class_name
