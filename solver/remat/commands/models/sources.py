"""`load_step`: a training step from what a person can write on a command line.

* `package.module:factory` or `path/to/script.py:factory`: a function that returns the model and the
  arguments of one call;
* `hf:gpt2`: a model type of transformers in its default configuration;
* `hf:org/name`: the configuration of a model of the hub (never its weights, never its code);
* `config.json`: a configuration file of transformers or diffusers.

Weights are random. Whatever is wrong with a source is a `TraceError` of one line.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from remat.commands.models.batches import Sizes
from remat.commands.models.configurations import from_file, from_name
from remat.commands.models.factories import from_factory
from remat.errors import RematError, TraceError, one_line
from remat.frontend.capture.trace import normalise_inputs
from remat.frontend.common.pytree import flatten, unflatten
from remat.frontend.common.target_gpu import local_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUGGING_FACE = "hf:"
_FORMS = "package.module:factory, path/to/script.py:factory, hf:gpt2, hf:org/name or a config.json"


@dataclass(frozen=True)
class Step:
    """A model and one call of it. `name` is short: the factory's, the model type's or the file's.

    A model from a configuration returns a loss; one from a factory what its author wants.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_step(
    source: str,
    sizes: Sizes | None = None,
    *,
    overrides: Sequence[str] = (),
    device: str = "cpu",
    dtype: str | None = None,
    seed: int = 0,
) -> Step:
    """The step that `source` names; see the module's docstring for its forms.

    `sizes` and `overrides` ("n_layer=4", the value as JSON or else text) are for configurations; a
    factory chooses for itself. Model and tensors go to `device` ("cpu", "cuda", or "meta", where
    nothing is allocated even while they are made), floating-point ones to `dtype` ("float32",
    "bfloat16", "float16"). The random generators start from `seed`. What the source prints goes to
    stderr.

    Raises `TraceError`, one line that names the place in the user's file where there is one.
    """
    place = _device(device)
    if dtype is not None and dtype not in DTYPES:
        raise TraceError(f"the dtype {dtype!r} is not known; use {', '.join(DTYPES)}")
    _seed(seed)
    made_on = place if place.type == "meta" else contextlib.nullcontext()
    with contextlib.redirect_stdout(sys.stderr), made_on:
        name, model, args, kwargs = _load(source, sizes or Sizes(), overrides)
        args, kwargs = normalise_inputs(model, args, kwargs)
        return _placed(Step(name, model, args, kwargs), place, DTYPES[dtype] if dtype else None)


def _load(
    source: str, sizes: Sizes, overrides: Sequence[str]
) -> tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]:
    if source.startswith(_HUGGING_FACE):
        return from_name(source.removeprefix(_HUGGING_FACE), sizes, overrides)
    if source.endswith(".json"):
        return from_file(source, sizes, overrides)
    place, colon, name = source.rpartition(":")
    if not (colon and place and name):
        example = f"{source.rstrip(':') or 'script.py'}:factory"
        raise TraceError(
            f"{source!r} does not say which function makes the model; write {example!r} (forms of "
            f"a source: {_FORMS})"
        )
    if overrides:
        raise TraceError(
            f"{overrides[0]!r} would change a configuration, and {source!r} is a function; change "
            "it there, or use hf:TYPE or a config.json"
        )
    return name, *from_factory(place, name)


def _device(name: str) -> torch.device:
    return torch.device("meta") if name == "meta" else local_device(name)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _placed(step: Step, device: torch.device, dtype: torch.dtype | None) -> Step:
    """The step on that device, floating-point tensors in that dtype; shared tensors stay shared."""
    try:
        model = step.model.to(device=device, dtype=dtype)
        leaves, structure = flatten((step.args, step.kwargs), f"{step.name}: the call ")
        moved = [_moved(leaf, device, dtype) for leaf in leaves]
        if all(new is old for new, old in zip(moved, leaves, strict=True)):
            return Step(step.name, model, step.args, step.kwargs)
        args, kwargs = unflatten(structure, moved)
    except RematError as error:
        raise TraceError(str(error)) from error
    except Exception as error:
        where = f"{device}" + ("" if dtype is None else f" in {dtype}")
        raise TraceError(f"{step.name} cannot be put on {where}: {one_line(error)}") from error
    return Step(step.name, model, args, kwargs)


def _moved(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    moved = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
    if moved is tensor:
        return tensor
    return moved.detach().requires_grad_(tensor.requires_grad)
