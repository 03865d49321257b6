"""Layers of Megatron-core, with Megatron's own recomputation: of whole layers or of named modules.

Megatron recomputes the same modules in every layer, or the first n layers of each stack. A trial
sets Megatron's own switches and runs its own checkpoints, so it measures what Megatron does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, combinations
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from remat.blockwise.block_step import AS_IT_IS, CHECKPOINTED, SELECTIVE
from remat.blockwise.choose import ExecutorSetting
from remat.blockwise.policies import BlockPolicy
from remat.errors import RematError, TraceError
from remat.frontend.common.torch_modes import attributes_set

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
"""For each name in Megatron's `TransformerConfig.recompute_modules`, the boolean attributes that
make a layer recompute the module, each after the path of the submodule that has it (megatron-core
0.16)."""

_NORM_OF_SWITCH = {
    "recompute_input_layernorm": "input_layernorm",
    "recompute_pre_mlp_layernorm": "pre_mlp_layernorm",
}
"""The norm that a switch recomputes. Where norms are fused into linear layers, it is an identity,
and its recomputation saves nothing."""


def check_megatron_model(model: nn.Module) -> None:
    """Raise `RematError` if Megatron-core is not installed, and `TraceError` if the model has none
    of its layers or recomputes already."""
    layer_class = _megatron_layer_class()
    layers = [module for module in model.modules() if isinstance(module, layer_class)]
    if not layers:
        raise TraceError(
            f"this {type(model).__name__} has no TransformerLayer of Megatron-core; "
            'rules="operators" is for any model'
        )
    granularity = getattr(getattr(layers[0], "config", None), "recompute_granularity", None)
    if granularity is not None:
        raise TraceError(
            f"this {type(model).__name__} was made with recompute_granularity={granularity!r}: "
            "make it without, and emit reports what to set"
        )


def run_block_under_policy(
    policy: BlockPolicy,
    module: nn.Module,
    original_forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a layer of Megatron-core under its policy, with Megatron's switches or its checkpoint."""
    if policy.how != CHECKPOINTED:
        with _recompute_switches_set(module, policy.modules):
            return original_forward(*args, **kwargs)
    from megatron.core.tensor_parallel import checkpoint

    leaves, spec = tree_flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(*tensors: torch.Tensor) -> Any:
        new_leaves = list(leaves)
        for position, tensor in zip(positions, tensors, strict=True):
            new_leaves[position] = tensor
        new_args, new_kwargs = tree_unflatten(new_leaves, spec)
        return original_forward(*new_args, **new_kwargs)

    return checkpoint(forward, False, *(leaves[position] for position in positions))


def candidate_policies(
    block: str, module: nn.Module, forward: Callable[[], Any]
) -> list[tuple[BlockPolicy, float | None]]:
    """Return the policies of a layer that are worth a trial, each with the fraction of the
    forward's time that the recomputation takes; None if only a trial shows it. Return none for a
    module that is no layer of Megatron-core."""
    if not isinstance(module, _megatron_layer_class()):
        return []
    names = [name for name in _SWITCHES if any(True for _ in _recompute_switches(module, name))]
    subsets = chain.from_iterable(combinations(names, n + 1) for n in range(len(names)))
    return [
        (BlockPolicy(block=block, how=CHECKPOINTED), 1.0),
        *((BlockPolicy(block=block, how=SELECTIVE, modules=m), None) for m in subsets),
    ]


def gradients_by_backward(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Return the gradients of the inputs by `backward()`, which Megatron's checkpoints need. The
    `.grad` of the inputs is restored afterwards."""
    original = [(tensor, tensor.grad) for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    try:
        torch.autograd.backward(outputs, tangents)
        return [tensor.grad for tensor in inputs]
    finally:
        for tensor, gradient in original:
            tensor.grad = gradient


def settings_for_all_blocks(
    paths: Sequence[str], policies: Sequence[tuple[BlockPolicy, ...]]
) -> Iterator[ExecutorSetting]:
    """Yield the policy indices of all calls for each possible `TransformerConfig`. `paths` and
    `policies` have the module path and the tried policies of each call."""
    indices_per_call = [
        {(policy.how, policy.modules): index for index, policy in enumerate(tried)}
        for tried in policies
    ]
    used = {name for tried in policies for policy in tried for name in policy.modules}
    names = [name for name in _SWITCHES if name in used]
    for modules in chain.from_iterable(combinations(names, n) for n in range(len(names) + 1)):
        setting = [_policy_index(modules, indices) for indices in indices_per_call]
        if None not in setting:
            yield tuple(index for index in setting if index is not None)
    positions = _positions_in_stacks(paths)
    checkpointed = [indices.get((CHECKPOINTED, ())) for indices in indices_per_call]
    for count in range(1, max(positions, default=-1) + 2):
        setting = [
            index if position < count else 0
            for index, position in zip(checkpointed, positions, strict=True)
        ]
        if None not in setting:
            yield tuple(index for index in setting if index is not None)


def _policy_index(
    modules: Sequence[str], indices: Mapping[tuple[str, tuple[str, ...]], int]
) -> int | None:
    """Return the index of the policy with which a layer recomputes the `modules`, as far as it
    has them; None if this policy was not tried or failed. `indices` has the index of each tried
    policy."""
    layer_modules = {name for _, names in indices for name in names}
    recomputed = tuple(name for name in modules if name in layer_modules)
    return indices.get((SELECTIVE if recomputed else AS_IT_IS, recomputed))


def _positions_in_stacks(paths: Sequence[str]) -> list[int]:
    """Return for each block its position among the blocks with the same parent module."""
    stacks: dict[str, list[str]] = {}
    for path in paths:
        stack = stacks.setdefault(path.rpartition(".")[0], [])
        if path not in stack:
            stack.append(path)
    return [stacks[path.rpartition(".")[0]].index(path) for path in paths]


def _recompute_switches(layer: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield the switches by which a layer recomputes the module `name`: the submodule and the name
    of its boolean attribute. Yield none if the layer lacks the module, or if its recomputation does
    not work or saves nothing."""
    config: Any = getattr(layer, "config", None)
    is_moe = bool(getattr(layer, "is_moe_layer", False))
    is_absent = {
        # Megatron's checkpoint of a module that returns its bias never ends (0.16.1).
        "mlp": is_moe or config.add_bias_linear,
        "moe": not is_moe,
        "shared_experts": not getattr(config, "moe_shared_expert_intermediate_size", None),
    }
    if is_absent.get(name):
        return
    for path, attribute in _SWITCHES[name]:
        try:
            module = layer.get_submodule(path)
        except AttributeError:
            continue
        norm = _NORM_OF_SWITCH.get(attribute)
        if norm and type(getattr(layer, norm, None)).__name__ == "IdentityOp":
            continue
        if isinstance(getattr(module, attribute, None), bool):
            yield module, attribute


@contextmanager
def _recompute_switches_set(layer: nn.Module, modules: Sequence[str]) -> Iterator[None]:
    """Inside this context, the layer recomputes exactly these modules, by their names in
    `recompute_modules`."""
    settings = (
        (module, attribute, name in modules)
        for name in _SWITCHES
        for module, attribute in _recompute_switches(layer, name)
    )
    with attributes_set(*settings):
        yield


def _megatron_layer_class() -> type[nn.Module]:
    """Return Megatron-core's `TransformerLayer`. Raises `RematError` if it is not installed."""
    try:
        from megatron.core.transformer.transformer_layer import TransformerLayer
    except ImportError:
        raise RematError(
            'rules="megatron" needs megatron-core, which is not installed: pip install '
            "'remat[megatron]'; rules=\"operators\" needs only torch"
        ) from None
    return TransformerLayer
