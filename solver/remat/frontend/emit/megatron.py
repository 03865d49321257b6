"""Layers of Megatron-core, which run again as a whole, or named modules inside of them: the same in
every layer, or the first so many layers of each stack.

Its own switches are set and its own checkpoints run, so what is measured is what it will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, combinations
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from remat.blockwise.policies import AS_IT_IS, CHECKPOINTED, SELECTIVE, BlockPolicy
from remat.blockwise.settings import Setting
from remat.errors import RematError, TraceError

_SWITCHES: dict[str, tuple[tuple[str, str], ...]] = {
    "core_attn": (
        ("self_attention", "checkpoint_core_attention"),
        ("cross_attention", "checkpoint_core_attention"),
    ),
    "layernorm": (("", "recompute_input_layernorm"), ("", "recompute_pre_mlp_layernorm")),
    "mla_up_proj": (("self_attention", "recompute_up_proj"),),
    "mlp": (("", "recompute_mlp"),),
    "moe": (("mlp", "moe_layer_recompute"),),
    "moe_act": (("mlp.experts", "activation_recompute"),),
    "shared_experts": (("mlp", "shared_experts_recompute"),),
}
"""By the names that Megatron has for them: the attributes that have a layer run them again, and
the modules that these are of (megatron-core 0.16, `TransformerConfig.recompute_modules`)."""

_NORMS = {
    "recompute_input_layernorm": "input_layernorm",
    "recompute_pre_mlp_layernorm": "pre_mlp_layernorm",
}
"""What a switch lets go of: nothing that only passes its input on, where norms are fused."""


def check(model: nn.Module) -> None:
    """Raises `RematError` where Megatron-core is missing, and `TraceError` for models without its
    layers, or that run something again already."""
    kind = _layer_class()
    layers = [module for module in model.modules() if isinstance(module, kind)]
    if not layers:
        raise TraceError(
            f"this {type(model).__name__} has no TransformerLayer of Megatron-core; other rules "
            'are for any model: rules="operators"'
        )
    granularity = getattr(getattr(layers[0], "config", None), "recompute_granularity", None)
    if granularity is not None:
        raise TraceError(
            f"this {type(model).__name__} was made with recompute_granularity={granularity!r}: "
            "make it without, and emit tells what to set"
        )


def run(
    policy: BlockPolicy, module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A call of a layer by its policy; `own` is its forward."""
    if policy.how != CHECKPOINTED:
        with _switched(module, policy.modules):
            return own(*args, **kwargs)
    from megatron.core.tensor_parallel import checkpoint

    leaves, shape = tree_flatten((args, kwargs))
    places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(*tensors: torch.Tensor) -> Any:
        own_leaves = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            own_leaves[place] = tensor
        own_args, own_kwargs = tree_unflatten(own_leaves, shape)
        return own(*own_args, **own_kwargs)

    return checkpoint(forward, False, *(leaves[place] for place in places))


def choices(
    block: str, module: nn.Module, forward: Callable[[], Any]
) -> list[tuple[BlockPolicy, float | None]]:
    """As those of `operators`; only a trial tells how long modules inside of the layer take."""
    if not isinstance(module, _layer_class()):
        return []
    names = [name for name in _SWITCHES if any(True for _ in _places(module, name))]
    several = chain.from_iterable(combinations(names, n + 1) for n in range(len(names)))
    return [
        (BlockPolicy(block=block, how=CHECKPOINTED), 1.0),
        *((BlockPolicy(block=block, how=SELECTIVE, modules=m), None) for m in several),
    ]


def gradients(
    ends: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """By `backward()`, which Megatron's checkpoints need. Gradients are as before afterwards."""
    before = [(tensor, tensor.grad) for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    try:
        torch.autograd.backward(ends, tangents)
        return [tensor.grad for tensor in inputs]
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


def settings(
    paths: Sequence[str], policies: Sequence[tuple[BlockPolicy, ...]]
) -> Iterator[Setting]:
    """The ways of all calls that one configuration can ask for, given the blocks that are called
    and the policies tried for each."""
    ways = [{(p.how, p.modules): way for way, p in enumerate(own)} for own in policies]
    known = {name for own in policies for policy in own for name in policy.modules}
    names = [name for name in _SWITCHES if name in known]
    for chosen in chain.from_iterable(combinations(names, n) for n in range(len(names) + 1)):
        found = [_with(chosen, own) for own in ways]
        if None not in found:
            yield tuple(way for way in found if way is not None)
    numbers = _numbers(paths)
    whole = [own.get((CHECKPOINTED, ())) for own in ways]
    for count in range(1, max(numbers, default=-1) + 2):
        found = [way if n < count else 0 for way, n in zip(whole, numbers, strict=True)]
        if None not in found:
            yield tuple(way for way in found if way is not None)


def _with(chosen: Sequence[str], ways: dict[tuple[str, tuple[str, ...]], int]) -> int | None:
    """The way of a call whose layer runs those of the chosen modules again that it has."""
    own = {name for _, modules in ways for name in modules}
    wanted = tuple(name for name in chosen if name in own)
    return ways.get((SELECTIVE if wanted else AS_IT_IS, wanted))


def _numbers(paths: Sequence[str]) -> list[int]:
    """Of each block in its stack, in the order of the model."""
    stacks: dict[str, list[str]] = {}
    for path in paths:
        own = stacks.setdefault(path.rpartition(".")[0], [])
        if path not in own:
            own.append(path)
    return [stacks[path.rpartition(".")[0]].index(path) for path in paths]


def _places(layer: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """Of the switches for those modules the ones that this layer has, with whose they are."""
    config: Any = getattr(layer, "config", None)
    is_moe = bool(getattr(layer, "is_moe_layer", False))
    absent = {
        # Megatron's checkpoint of a module that returns its own bias has no end.
        "mlp": is_moe or config.add_bias_linear,
        "moe": not is_moe,
        "shared_experts": not getattr(config, "moe_shared_expert_intermediate_size", None),
    }
    if absent.get(name):
        return
    for path, attribute in _SWITCHES[name]:
        try:
            module = layer.get_submodule(path)
        except AttributeError:
            continue
        norm = _NORMS.get(attribute)
        if norm and type(getattr(layer, norm, None)).__name__ == "IdentityOp":
            continue
        if isinstance(getattr(module, attribute, None), bool):
            yield module, attribute


@contextmanager
def _switched(layer: nn.Module, modules: Sequence[str]) -> Iterator[None]:
    """Within it, the layer runs these modules again, and no others."""
    before = [
        (module, attribute, getattr(module, attribute), name in modules)
        for name in _SWITCHES
        for module, attribute in _places(layer, name)
    ]
    for module, attribute, _, is_on in before:
        setattr(module, attribute, is_on)
    try:
        yield
    finally:
        for module, attribute, was_on, _ in before:
            setattr(module, attribute, was_on)


def _layer_class() -> type[nn.Module]:
    try:
        from megatron.core.transformer.transformer_layer import TransformerLayer
    except ImportError:
        raise RematError(
            "rules of Megatron are those of megatron-core, which is not installed: pip install "
            "'remat[megatron]'; rules of operators need nothing but torch"
        ) from None
    return TransformerLayer
