"""Wrong options are errors of the call that sets them, in every door, not of the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat


def optimized(budget: Any = "100%", **options: Any) -> None:
    remat.optimize(nn.Linear(4, 4), budget, **options)


def enabled(budget: Any = "100%", **options: Any) -> None:
    remat.enable(nn.Linear(4, 4), budget, **options)


def transformers_callback(budget: Any = "100%", **options: Any) -> None:
    pytest.importorskip("transformers")
    from remat.integrations.transformers import RematCallback

    RematCallback(budget, **options)


def lightning_callback(budget: Any = "100%", **options: Any) -> None:
    pytest.importorskip("pytorch_lightning")
    from remat.integrations.lightning import RematCallback

    RematCallback(budget, **options)


def by_client(budget: Any = "100%", **options: Any) -> None:
    with remat.Client("http://127.0.0.1:9") as client:  # no service: nothing is sent
        client.optimize(nn.Linear(4, 4), budget, **options)


def emitted(budget: Any = "100%", **options: Any) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    remat.emit(model, budget, (torch.ones(2, 4),), **options)


def largest_batch(budget: Any = "1GiB", **options: Any) -> None:
    def never(_: int) -> Any:
        raise AssertionError("the options are wrong")

    remat.max_batch(never, budget, **options)


def compiled(budget: Any = "100%", **options: Any) -> None:
    remat.compile(nn.Linear(4, 4), budget, **options)


DOORS = {
    door.__name__: door
    for door in (
        optimized, enabled, transformers_callback, lightning_callback, by_client, emitted,
        largest_batch, compiled,
    )
}  # fmt: skip

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"costs": "h100"}, r"'h100' is no device of this machine.*remat.Roofline\('h100'\)"),
    ({"costs": "H-200"}, r"pass 'cpu', 'cuda' or remat.Roofline\('h200'\)"),
    ({"costs": "roofline:h1000"}, r"h1000"),
    ({"costs": "gpu"}, r"remat.Roofline\('h100'\)"),
    ({"costs": "meta"}, "cannot measure on meta; pass 'cpu', 'cuda'"),
    ({"costs": 3}, r'costs needs a device or a remat.Roofline; got an int: .*Roofline\("h100"\)'),
    ({"costs": remat.Roofline}, "costs needs a device or a remat.Roofline; got a type"),
    ({"strategy": remat.Auto}, "pass an instance, such as remat.Auto"),
    ({"strategy": "auto"}, "strategy is a str"),
    ({"progress": "yes"}, "progress"),
    ({"budget": "0.6"}, 'pass "60%"'),
    ({"budget": 0.6}, 'pass "60%"'),
    ({"budget": ".6 B"}, 'pass "60%"'),
    ({"budget": "0"}, "it must be positive"),
]
HAVE_NO = {("compiled", "costs"), ("emitted", "progress")}
"""Doors without an option."""
CELLS = [
    pytest.param(door, options, match, id=f"{name} {options}")
    for name, door in DOORS.items()
    for options, match in WRONG
    if (name, next(iter(options))) not in HAVE_NO
]


@pytest.mark.parametrize(("door", "options", "match"), CELLS)
def test_a_wrong_option_is_an_error_at_once(
    door: Callable[..., None], options: dict[str, Any], match: str
) -> None:
    with pytest.raises((remat.RematError, TypeError, ValueError), match=match):
        door(**options)
