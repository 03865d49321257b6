"""Checkpoints in the model's own code are looked through: what is computed again is remat's
decision, and one that stayed would fix a worse one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint


class _Switch(threading.local):
    is_off = False


_switch = _Switch()
_lock = threading.Lock()
_users = 0
_originals: tuple[Callable[..., Any], Callable[..., Any]] | None = None


@contextmanager
def checkpointing_disabled() -> Iterator[None]:
    """Within it, in this thread, `torch.utils.checkpoint` calls what it is given, and no more."""
    with _used(), _switched(True):
        yield


@contextmanager
def checkpointing_enabled() -> Iterator[None]:
    """Within it, it checkpoints as ever: for a checkpoint of our own."""
    with _switched(False):
        yield


@contextmanager
def _switched(is_off: bool) -> Iterator[None]:
    before, _switch.is_off = _switch.is_off, is_off
    try:
        yield
    finally:
        _switch.is_off = before


@contextmanager
def _used() -> Iterator[None]:
    """With torch's two ways to checkpoint replaced, for as long as any thread needs that."""
    global _users, _originals
    module = torch.utils.checkpoint
    with _lock:
        if not _users:
            _originals = (
                module._checkpoint_without_reentrant_generator,
                module.CheckpointFunction.apply,
            )
            _replace(*_originals)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                assert _originals is not None
                _put(*_originals)


def _replace(generator: Callable[..., Any], apply: Callable[..., Any]) -> None:
    def plain_generator(*args: object, **kwargs: object) -> Iterator[None]:
        if _switch.is_off:
            yield
        else:
            yield from generator(*args, **kwargs)

    def plain_apply(run: Callable[..., Any], preserve: bool, *args: object) -> object:
        return run(*args) if _switch.is_off else apply(run, preserve, *args)

    _put(plain_generator, plain_apply)


def _put(generator: Callable[..., Any], apply: Callable[..., Any]) -> None:
    module: Any = torch.utils.checkpoint
    module._checkpoint_without_reentrant_generator = generator
    module.CheckpointFunction.apply = apply
