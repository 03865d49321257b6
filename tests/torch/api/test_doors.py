"""Every option of a plan through every door: a wrong value is an error of the call that sets it, in
the same words everywhere, and an option that a door does not take is an error with the reason."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.command_line import quick
from torch import nn

import remat
from remat import plan_options
from remat.frontend.memory.device_memory import reserve_size
from remat.plan_options import OPTIONS, Door
from remat_server.work.solving import read_request


@cache
def traced() -> remat.Trace:
    return remat.measure(remat.trace(nn.Linear(4, 4), torch.ones(2, 4)), remat.Roofline("cpu"))


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


def accelerate_plugin(budget: Any = "100%", **options: Any) -> None:
    pytest.importorskip("accelerate")
    from remat.integrations.accelerate import dynamo_plugin

    dynamo_plugin(budget, **options)


def by_client(budget: Any = "100%", **options: Any) -> None:
    with remat.Client("http://127.0.0.1:9") as client:  # no service: nothing is sent
        client.optimize(nn.Linear(4, 4), budget, **options)


def planned_by_client(budget: Any = "100%", **options: Any) -> None:
    with remat.Client("http://127.0.0.1:9") as client:
        client.plan(traced(), budget, **options)


def posted(budget: Any = "100%", **options: Any) -> None:
    """Read a request as the service does."""
    request = {"trace": json.loads(traced().to_json()), "budget": budget}
    request["options"] = {n: options.pop(n) for n in ("strategy", "costs") if n in options}
    read_request("solve", json.dumps({**request, **options}, default=str).encode())


def solved(budget: Any = "100%", **options: Any) -> None:
    remat.solve_step(traced(), budget, **options)


def emitted(budget: Any = "100%", **options: Any) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    remat.emit(model, budget, (torch.ones(2, 4),), **options)


def largest_batch(budget: Any = "1GiB", **options: Any) -> None:
    def never(_: int) -> Any:
        raise AssertionError("the options are wrong")

    remat.max_batch(never, budget, **options)


def compiled(budget: Any = "100%", **options: Any) -> None:
    remat.compile(nn.Linear(4, 4), budget, **options)


CALLS: dict[Callable[..., None], Door] = {
    optimized: plan_options.OPTIMIZE,
    enabled: plan_options.ENABLE,
    transformers_callback: plan_options.ENABLE,
    lightning_callback: plan_options.ENABLE,
    by_client: plan_options.CLIENT_OPTIMIZE,
    planned_by_client: plan_options.CLIENT_PLAN,
    posted: plan_options.POST_SOLVE,
    solved: plan_options.SOLVE_STEP,
    compiled: plan_options.COMPILE,
    accelerate_plugin: plan_options.COMPILE,
}

FAST = remat.Link(1e11, 1e11)
BYTES = "is not a number of bytes; pass bytes"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"costs": "h100"}, r"'h100' is no device of this machine.*remat.Roofline\('h100'\)"),
    ({"costs": "H-200"}, r"pass 'cpu', 'cuda' or remat.Roofline\('h200'\)"),
    ({"costs": "gpu"}, r"remat.Roofline\('h100'\)"),
    ({"costs": "meta"}, "cannot measure on meta; pass 'cpu', 'cuda'"),
    ({"costs": 3}, r'costs needs a device or a remat.Roofline; got an int: .*Roofline\("h100"\)'),
    ({"costs": remat.Roofline}, "costs needs a device or a remat.Roofline; got a type"),
    ({"strategy": remat.Auto}, "pass an instance, such as remat.Auto"),
    ({"strategy": "auto"}, "strategy is a str"),
    ({"progress": "yes"}, "progress needs a bool or a callable; got a str: pass progress=print"),
    ({"budget": "0.6"}, 'pass "60%"'),
    ({"budget": 0.6}, 'pass "60%"'),
    ({"budget": ".6 B"}, 'pass "60%"'),
    ({"budget": "0"}, "it must be positive"),
    ({"reserve": "60%", "budget": "1GiB"}, f"the reserve '60%' {BYTES}"),
    ({"reserve": [1], "budget": "1GiB"}, "the reserve"),
    ({"reserve": 1 << 20}, "needs a budget in bytes; got the relative budget '100%'"),
    ({"reserve": 1 << 30, "budget": "1GiB"}, "leaves nothing for the step"),
    ({"outputs": "dropd"}, "outputs is 'dropd'; near are dropped"),
    ({"split": "atuo"}, "split is 'atuo'; near are auto"),
    ({"split": 0}, "split is 0; it is 'auto'"),
    ({"split": 2, "scope": "blocks"}, "split=2 needs a plan of the whole model"),
    ({"offload": "yes"}, "offload is 'yes'.*'auto'.*'off'"),
    ({"offload": "auto", "cuda_graphs": True}, "CUDA graphs: pass"),
    ({"host_budget": "abc", "offload": "auto"}, f"the host budget 'abc' {BYTES}"),
    ({"host_budget": 1 << 30}, 'host_budget is for offloaded tensors: pass offload="auto"'),
    ({"link": FAST}, 'link is for offloaded tensors: pass offload="auto"'),
    ({"link": 5e9, "offload": "auto"}, r"link needs a remat.Link; got a float: .*\(55e9, 55e9\)"),
    ({"in_flight": 0}, "in_flight is 0; pass the number of calls, 1 or more"),
    ({"infeasible": "smalest"}, "infeasible is 'smalest'; near are smallest"),
    ({"scope": "block"}, "scope is 'block'; near are blocks"),
]
OTHER_WORDS = {
    (posted, "strategy"): "strategy",  # JSON has names and options
    (posted, "costs"): "options.costs",
    (by_client, "scope"): "has no option 'scope'",
    (posted, "link"): "link",
    (posted, "host_budget"): "host_budget",
    (posted, "reserve"): "reserve",
    (planned_by_client, "costs"): 'costs are "measure" or "roofline:DEVICE"',
}
"""The words of a door whose values are of another kind."""


def wrong_cells() -> list[Any]:
    cells = []
    for call, door in CALLS.items():
        for options, words in WRONG:
            missing = [name for name in options if name in door.missing]
            if not missing:
                words = OTHER_WORDS.get((call, next(iter(options))), words)
                cells.append(pytest.param(call, options, words, id=f"{call.__name__} {options}"))
    for call, names in ((emitted, OPTIONS.keys() - {"progress"}), (largest_batch, {"costs"})):
        for options, words in WRONG:
            signature = remat.emit if call is emitted else remat.max_batch
            if names.issuperset(options) and options.keys() <= {
                *inspect.signature(signature).parameters
            }:
                cells.append(pytest.param(call, options, words, id=f"{call.__name__} {options}"))
    return cells


@pytest.mark.parametrize(("call", "options", "words"), wrong_cells())
def test_a_wrong_option_is_an_error_at_once(
    call: Callable[..., None], options: dict[str, Any], words: str
) -> None:
    with pytest.raises((remat.RematError, TypeError, ValueError), match=words):
        call(**options)


@pytest.mark.parametrize("call", CALLS)
def test_an_option_that_a_door_does_not_take_is_an_error_with_the_reason(
    call: Callable[..., None],
) -> None:
    door = CALLS[call]
    for name, reason in door.missing.items():
        with pytest.raises((TypeError, ValueError)) as raised:
            call(**{name: 1})
        assert f"{door.name} has no option '{name}': {reason}" in str(raised.value)
    with pytest.raises((TypeError, ValueError), match="no option 'splitt'; near are split"):
        call(splitt=2)


COMMAND_LINES = {
    plan_options.COMMAND_SOLVE: ("solve", "{trace}", "--budget=60%"),
    plan_options.COMMAND_SWEEP: ("sweep", "{trace}", "--budget=60%"),
    plan_options.COMMAND_RUN: ("run", "nowhere.py:step", "--budget=60%"),
}
WRONG_FLAGS = {
    "budget": ("60x", "the unknown unit 'x'"),
    "reserve": ("60%", f"the reserve '60%' {BYTES}"),
    "split": ("atuo", "--split is 'atuo'; near are auto"),
    "offload": ("of", "--offload is 'of'; near: off"),
    "host_budget": ("1GiB", "--host-budget is for offloaded tensors: pass --offload auto"),
    "infeasible": ("smalest", "--infeasible is 'smalest'; near are smallest"),
    "outputs": ("dropd", "--outputs is 'dropd'; near are dropped"),
    "strategy": ("autoo", "'autoo'"),
}


@pytest.mark.parametrize("door", COMMAND_LINES, ids=lambda d: d.name)
def test_a_command_takes_an_option_or_says_why_not(door: Door, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    traced().save(file)
    words = [word.format(trace=file) for word in COMMAND_LINES[door]]
    for name, (value, expected) in WRONG_FLAGS.items():
        ended = quick(*words, door.spell(name), value)
        assert ended.code == 2
        if name in door.missing:
            expected = f"has no option '{door.spell(name)}': {door.missing[name]}. See `{door.name}"
        assert expected in ended.error
    assert WRONG_FLAGS.keys() >= {n for n in door.options if OPTIONS[n].metavar is not None}


@pytest.mark.parametrize(
    ("function", "door"),
    [
        (remat.optimize, plan_options.OPTIMIZE),
        (remat.enable, plan_options.ENABLE),
        (remat.Client.optimize, plan_options.CLIENT_OPTIMIZE),
        (remat.Client.plan, plan_options.CLIENT_PLAN),
        (remat.solve_step, plan_options.SOLVE_STEP),
    ],
)
def test_help_shows_the_options_with_their_defaults(function: Any, door: Door) -> None:
    parameters = inspect.signature(function).parameters
    for name in door.options:
        assert parameters[name].default == door.default(name)


def test_the_state_of_an_optimizer_is_reserved_from_the_budget_of_a_trace() -> None:
    optimizer = torch.optim.Adam(nn.Linear(64, 64).parameters())
    plan = remat.solve_step(traced(), "1MiB", reserve=optimizer).plan
    assert plan.terms.reserved_for_others_bytes == reserve_size(optimizer).total_bytes > 0


def test_each_option_is_documented() -> None:
    described = [o for o in OPTIONS.values() if o.metavar or o.schema]
    assert all(option.help.endswith(".") for option in described)
    assert remat.optimize.__doc__
    missing = [name for name in OPTIONS if f"`{name}" not in remat.optimize.__doc__]
    assert missing == ["scope"]
