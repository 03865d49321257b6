"""What a capture assumes of the model around the graph, and what each call checks again."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_leaves

from remat.documents.records import Environment
from remat.errors import TraceError
from remat.frontend.capture.absent_gpu.cuda_autocast import autocast_dtype
from remat.frontend.common.target import Target

AUTOCAST_DEVICES = ("cpu", "cuda")


def observe(model: nn.Module, target: Target | None = None) -> Environment:
    """The surroundings as they are now: training flags, autocast, torch's version. With a `target`,
    as they will be there."""
    autocast = autocast_modes()
    if target is not None:
        dtype = autocast_dtype()
        autocast = () if dtype is None else (f"cuda:{str(dtype).removeprefix('torch.')}",)
    return Environment(
        torch=torch.__version__,
        training=model.training,
        training_exceptions=training_exceptions(model),
        autocast=autocast,
        frees_tangents=hasattr(torch.autograd.Function, "boxed_grads_call"),
    )


def training_exceptions(model: nn.Module) -> tuple[str, ...]:
    """Modules whose `training` flag differs from the model's own, by name."""
    flag = model.training
    return tuple(name for name, module in model.named_modules() if module.training != flag)


def autocast_modes() -> tuple[str, ...]:
    """Enabled autocast modes, as "cpu:bfloat16"."""
    return tuple(
        f"{device}:{str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
        for device in AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    )


@contextmanager
def autocast_as(modes: Sequence[str]) -> Iterator[None]:
    """With these modes on, as `autocast_modes` names them, and no others."""
    known = dict(mode.split(":") for mode in modes)
    with ExitStack() as stack:
        for device in AUTOCAST_DEVICES:
            if device in known:
                dtype = getattr(torch, known[device])
                stack.enter_context(torch.autocast(device, dtype, enabled=True))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run a captured graph: its casts are in the graph already."""
    enabled = [d for d in AUTOCAST_DEVICES if torch.is_autocast_enabled(d)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)


@contextmanager
def random_numbers_restored() -> Iterator[None]:
    """Leave the random generators of all devices as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def nothing_drawn_in_python(model: nn.Module) -> Iterator[None]:
    """Raises `TraceError` where Python's or NumPy's random numbers are drawn, or torch's generator
    is seeded: a plan would do once what each step is to do. They are left as they were."""
    drawn, by_numpy, seed = random.getstate(), np.random.get_state(), torch.manual_seed
    here = threading.get_ident()

    def refused(number: int) -> torch.Generator:
        if threading.get_ident() != here:
            return seed(number)
        raise TraceError(_drawn(model, "seeds torch's random numbers"))

    torch.manual_seed = torch.random.manual_seed = refused
    what = ""
    try:
        yield
        if random.getstate() != drawn:
            what = "draws Python's random numbers"
        if not all(map(np.array_equal, np.random.get_state(), by_numpy)):
            what = "draws NumPy's random numbers"
    finally:
        torch.manual_seed = torch.random.manual_seed = seed
        random.setstate(drawn)
        np.random.set_state(by_numpy)
    if what:
        raise TraceError(_drawn(model, what))


def _drawn(model: nn.Module, what: str) -> str:
    return (
        f"the forward of {type(model).__name__} {what}, which a plan would do once for all steps. "
        "Remedy: do so outside, and pass what follows from it as an argument; or use torch.rand "
        'and torch.where; or plan the blocks inside: remat.enable(model, budget, scope="blocks")'
    )


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Leave parameters, buffers and random generators as they were: a capture computes on fake
    tensors, but the model's own code may assign to buffers or draw a seed, and torch forgets to
    give the parameters back of a module that has two names."""
    held: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (table, dict(table))
        for module in model.modules()
        for table in (module._parameters, module._buffers)
    ]
    try:
        with random_numbers_restored():
            yield
    finally:
        for table, before in held:
            table.clear()
            table.update(before)


@contextmanager
def attributes_of(model: nn.Module) -> Iterator[dict[str, str]]:
    """What a forward assigns to modules stays, as in eager mode, but for what means nothing outside
    of a capture (fake tensors, symbols), in whose place is what was there before. In the dictionary
    are afterwards the names of attributes that changed, and of the classes of their modules."""
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    changed: dict[str, str] = {}
    try:
        yield changed
    finally:
        for module, were in before:
            for name, now in list(module.__dict__.items()):
                was = were.get(name, _ABSENT)
                if now is was or _is_same_value(now, was):
                    continue
                changed[name] = type(module).__name__
                if not any(isinstance(leaf, _OF_CAPTURES) for leaf in tree_leaves(now)):
                    continue
                del module.__dict__[name]
                if was is not _ABSENT:
                    module.__dict__[name] = was


def _is_same_value(one: object, other: object) -> bool:
    return isinstance(one, (bool, int, float, str)) and type(one) is type(other) and one == other


_ABSENT = object()
_OF_CAPTURES = (FakeTensor, FunctionalTensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def buffers_by_module(model: nn.Module) -> dict[tuple[nn.Module, str], torch.Tensor | None]:
    """Each registered buffer by its owner and name."""
    return {
        (module, name): buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
    }
