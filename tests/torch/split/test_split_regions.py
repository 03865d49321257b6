"""Several regions of a trace are split at once where they have no tensors in common."""

from __future__ import annotations

from itertools import product

import pytest
from tests.torch.split.test_split_region import (
    WIDTH,
    Batch,
    Head,
    Model,
    assert_same_in_pieces,
    built,
    regions,
)
from torch import nn

import remat
from remat.passes.split.regions import Region
from remat.passes.split.rewriting import split_regions
from remat.passes.split.splits import split_largest_operations, with_recorded_splits

LAYERS = 3


def wide_layers() -> tuple[Model, Batch]:
    """Return a model whose layers need the same memory, and more than the head does."""
    _, batch = built([], "mean")
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, 300), nn.GELU(), nn.Linear(300, WIDTH))
        for _ in range(LAYERS)
    ]
    return Model(layers, Head()).double(), batch


def test_identical_layers_are_split_at_once() -> None:
    """Each layer is a region; the step computes the same, retained or recomputed."""
    model, batch = wide_layers()
    trace = remat.trace(model, batch)
    split = split_largest_operations(trace, 3)
    assert [record.with_previous for record in split.splits] == [False] + [True] * (LAYERS - 1)
    assert_same_in_pieces(split, model, batch, ["", "75%"])


def test_layers_split_at_once_are_those_split_one_after_the_other() -> None:
    """The same operations, with the same names, in another order."""
    model, batch = wide_layers()
    trace = remat.trace(model, batch)
    split = split_largest_operations(trace, 2)
    one_by_one = with_recorded_splits(
        trace, [r.model_copy(update={"with_previous": False}) for r in split.splits]
    )
    assert {n.name: n.target for n in split.nodes} == {n.name: n.target for n in one_by_one.nodes}
    assert with_recorded_splits(trace, split.splits).nodes == split.nodes


def overlapping(trace: remat.Trace) -> tuple[Region, Region]:
    """Return two regions with tensors in common."""
    pairs = product(regions(trace), repeat=2)
    return next(
        (one, other) for one, other in pairs if one.seed != other.seed and one.depends_on(other)
    )


def test_regions_with_tensors_in_common_are_not_split_at_once() -> None:
    trace = remat.trace(*wide_layers())
    with pytest.raises(remat.RematError, match="tensors in common"):
        split_regions(overlapping(trace), [2, 2])


def test_recorded_splits_of_one_region_are_not_applied_at_once() -> None:
    trace = remat.trace(*wide_layers())
    (record,) = split_regions([regions(trace)[0]], [2]).splits
    with pytest.raises(remat.RematError, match="tensors in common"):
        with_recorded_splits(trace, [record, record.model_copy(update={"with_previous": True})])
