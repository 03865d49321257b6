"""Which modules of a model are planned, which are run as they are, and what of it is seen then."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import nn

from remat.errors import TraceError
from remat.frontend.blocks.block_options import Ways
from remat.frontend.blocks.discovery import Site, blocks_of, parts_of
from remat.frontend.blocks.dry_run import Observation, observe
from remat.frontend.planning.options import OptimizeOptions
from remat.frontend.runtime.guards import Call
from remat.limits.outputs import are_dropped
from remat.report.tables import starred

_ROUTED = "data decide on how it is called"


def settled(
    model: nn.Module, call: Call, options: OptimizeOptions, ways: Ways, *, whole: bool = False
) -> tuple[Observation, dict[int, str]]:
    """Blocks that cannot be captured give way to their parts, until what is left is captured, or is
    run once to see what it takes: what has no parts, and what data decide on. `whole` ones do not:
    they are run once themselves. Also, why blocks could not be captured."""
    sites = blocks_of(model) or parts_of(Site("", model))
    if not sites:
        raise TraceError(f"this {type(model).__name__} has no modules that could be planned")
    parts: dict[int, Site] = {}
    eager: dict[int, Site] = {}
    whys: dict[int, str] = {}
    while True:
        seen = _observed(model, call, sites, list(eager.values()), options)
        routed = {} if not parts else _routed(seen, parts)
        failed: set[int] = set()
        opaque = {id(each.site.module) for each in seen.calls if each.key is None}
        for each in seen.calls:
            module = id(each.site.module)
            if module not in opaque and (module in eager or module in routed):
                continue
            if isinstance(found := ways.trace(each), str):
                failed.add(module)
                whys[module] = found
        if not failed and routed.keys() <= eager.keys():
            return seen, whys
        eager |= routed
        whys |= dict.fromkeys(routed, _ROUTED)
        if whole:
            eager |= {id(s.module): s for s in sites if id(s.module) in failed - opaque}
            failed &= opaque
        sites = [part for site in sites for part in _instead(site, failed, opaque, parts, eager)]
        if not sites:
            raise TraceError(
                f"nothing of this {type(model).__name__} can be planned: "
                f"{next(iter(whys.values()))}"
            )


def _instead(
    site: Site,
    failed: Container[int],
    opaque: Container[int],
    parts: dict[int, Site],
    eager: dict[int, Site],
) -> list[Site]:
    """Modules without parts are not captured: where one reads its input twice and others read it,
    too, the gradients would be summed up in another order. Those that are given something opaque,
    such as a cache, may change it: they are never run twice."""
    if id(site.module) not in failed:
        return [site]
    parts.pop(id(site.module), None)
    found = parts_of(site)
    if not found:
        found = [] if id(site.module) in opaque else [site]
    parts |= {id(p.module): p for p in found}
    eager |= {id(p.module): p for p in found if p is site or not parts_of(p)}
    return found


def _routed(seen: Observation, parts: dict[int, Site]) -> dict[int, Site]:
    """The parts that stand in a list with others of their class and get inputs of other shapes, or
    none, such as experts: the next batch will come in other shapes."""
    shapes: dict[tuple[str, str], set[object]] = {}
    members: dict[tuple[str, str], dict[int, Site]] = {}
    for each in seen.calls:
        shapes.setdefault(_group(each.site), set()).add(each.key and each.key.inputs)
    for module, site in parts.items():
        members.setdefault(_group(site), {})[module] = site
    called = {id(each.site.module) for each in seen.calls}
    found: dict[int, Site] = {}
    for group, own in members.items():
        if group in shapes and (len(shapes[group]) > 1 or not own.keys() <= called):
            found |= own
    return found


def _group(site: Site) -> tuple[str, str]:
    return starred(site.path), site.kind


def _observed(
    model: nn.Module,
    call: Call,
    sites: Sequence[Site],
    measured: Sequence[Site],
    options: OptimizeOptions,
) -> Observation:
    return observe(
        model,
        call,
        sites,
        measured=measured,
        differentiate=options.differentiate,
        dropped=are_dropped(options.outputs),
    )
