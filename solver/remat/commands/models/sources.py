"""Loads a training step from a SOURCE, the text that names a model on the command line.

A source is one of these:

* `package.module:factory` or `path/to/script.py:factory`: a function that returns the model and the
  arguments of one call;
* `hf:gpt2`: a model type of transformers in its default configuration;
* `hf:org/name`: a configuration from the hub (never its weights, never its code);
* `config.json`: a configuration file of transformers or diffusers.

Weights are random. Errors are a `TraceError` with one line.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn

from remat.commands.models.batches import BatchSizes
from remat.commands.models.configurations import step_from_configuration, step_from_name
from remat.commands.models.factories import step_from_factory
from remat.errors import RematError, TraceError, one_line, similar_names_hint
from remat.frontend.api.adapters import with_adapters
from remat.frontend.capture.trace import normalise_inputs
from remat.frontend.common.pytree import flatten, unflatten
from remat.frontend.common.target_gpu import local_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUGGING_FACE_PREFIX = "hf:"
_FORMS = "package.module:factory, path/to/script.py:factory, hf:gpt2, hf:org/name or a config.json"


@dataclass(frozen=True)
class TrainingStep:
    """A model and the arguments of one call. `name` is the name of the factory, model type or file.

    A model from a configuration returns a loss; a model from a factory may return other outputs.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_training_step(
    source: str,
    sizes: BatchSizes | None = None,
    *,
    overrides: Sequence[str] = (),
    device: str = "cpu",
    dtype: str | None = None,
    seed: int = 0,
    lora: str | None = None,
    quantize: str | None = None,
) -> TrainingStep:
    """Load the training step that `source` names: a factory, a configuration file or a model type.

    `sizes` and `overrides` ("n_layer=4", where the value is JSON or else text) apply to
    configurations, not to factories. Model and tensors are moved to `device` ("cpu", "cuda" or
    "meta"; "meta" allocates nothing even during construction), and floating-point tensors are cast
    to `dtype` ("float32", "bfloat16", "float16"). `seed` seeds the random generators. The model
    then gets the adapters `lora` and the weights `quantize` of `remat.frontend.api.adapters`. Text
    that the source prints goes to stderr.

    Raises `TraceError` with one line, which names the line in the user's file if there is one.
    """
    target = _loading_device(device)
    if dtype is not None and dtype not in DTYPES:
        raise TraceError(f"the dtype {dtype!r} is not supported; use {', '.join(DTYPES)}")
    _seed_generators(seed)
    construction_device = target if target.type == "meta" else contextlib.nullcontext()
    with contextlib.redirect_stdout(sys.stderr), construction_device:
        name, model, args, kwargs = _load_source(source, sizes or BatchSizes(), overrides)
        args, kwargs = _checked_step_inputs(source, model, args, kwargs)
        step = TrainingStep(name, model, args, kwargs)
        step = _move_step(step, target, DTYPES[dtype] if dtype else None)
        if lora or quantize:
            return replace(step, model=with_adapters(step.model, lora, quantize))
        return step


def _checked_step_inputs(
    source: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call in the form that the model takes. Raises `TraceError` if it
    does not accept them, with the names that it does not have."""
    try:
        return normalise_inputs(model, args, kwargs)
    except TraceError as error:
        parameters = inspect.signature(model.forward).parameters
        accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        unknown = [] if accepts_any else [name for name in kwargs if name not in parameters]
        hints = (f"{name!r}{similar_names_hint(name, parameters, ', near ')}" for name in unknown)
        names = f" It has no argument {', '.join(hints)}." if unknown else ""
        raise TraceError(f"{error}.{names} Change what {source} returns") from None


def _load_source(
    source: str, sizes: BatchSizes, overrides: Sequence[str]
) -> tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the name, model and arguments of a source. Raises `TraceError` if it has none of the
    forms."""
    if source.startswith(_HUGGING_FACE_PREFIX):
        return step_from_name(source.removeprefix(_HUGGING_FACE_PREFIX), sizes, overrides)
    if source.endswith(".json"):
        return step_from_configuration(source, sizes, overrides)
    place, colon, name = source.rpartition(":")
    if not (colon and place and name):
        example = f"{source.rstrip(':') or 'script.py'}:factory"
        raise TraceError(
            f"{source!r} does not name the function that returns the model; write {example!r} "
            f"(forms of a source: {_FORMS})"
        )
    if overrides:
        raise TraceError(
            f"--set {overrides[0]} changes a configuration, but {source!r} is a function; change "
            "the model in its code, or use hf:TYPE or a config.json"
        )
    return name, *step_from_factory(place, name)


def _loading_device(name: str) -> torch.device:
    """Return the device "meta" or a device of this machine. Raises `TraceError` for others."""
    return torch.device("meta") if name == "meta" else local_device(name)


def _seed_generators(seed: int) -> None:
    """Seed the random generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _move_step(step: TrainingStep, device: torch.device, dtype: torch.dtype | None) -> TrainingStep:
    """Move the step to a device and cast its floating-point tensors; shared tensors stay shared."""
    try:
        model = step.model.to(device=device, dtype=dtype)
        leaves, structure = flatten((step.args, step.kwargs), f"{step.name}: the call ")
        moved = [_move_tensor(leaf, device, dtype) for leaf in leaves]
        if all(new is old for new, old in zip(moved, leaves, strict=True)):
            return TrainingStep(step.name, model, step.args, step.kwargs)
        args, kwargs = unflatten(structure, moved)
    except RematError as error:
        raise TraceError(str(error)) from error
    except Exception as error:
        target = f"{device}" + ("" if dtype is None else f" in {dtype}")
        raise TraceError(f"{step.name} cannot be moved to {target}: {one_line(error)}") from error
    return TrainingStep(step.name, model, args, kwargs)


def _move_tensor(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None
) -> torch.Tensor:
    """Return a tensor on a device, cast if it is floating-point; the tensor itself if nothing
    changes."""
    moved = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
    if moved is tensor:
        return tensor
    return moved.detach().requires_grad_(tensor.requires_grad)
