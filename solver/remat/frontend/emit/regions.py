"""Blocks under torch_remat, which saves what selected submodules (regions) of a block save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from remat.blockwise.block_step import AS_IT_IS, CHECKPOINTED, SELECTIVE
from remat.blockwise.choose import SaveCandidate, selections_to_save
from remat.blockwise.policies import BlockPolicy
from remat.errors import RematError
from remat.frontend.blocks.module_state import patched_forwards
from remat.frontend.blocks.profile import synchronized_time_s
from remat.frontend.common.pytree import tensors_in

_ROUNDS = 3


def run_block_under_policy(
    policy: BlockPolicy,
    module: nn.Module,
    original_forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block under its policy with torch_remat, or as it is."""
    if policy.how == AS_IT_IS:
        return original_forward(*args, **kwargs)
    package = import_torch_remat()

    def forward(*block_args: Any, **block_kwargs: Any) -> Any:
        regions = {name: module.get_submodule(name) for name in policy.regions}
        saving = {m: _saving_forward(package, name, m) for name, m in regions.items()}
        with patched_forwards(saving):
            return original_forward(*block_args, **block_kwargs)

    hooks = (_RngStateHook(tree_leaves((args, kwargs))),)
    checkpoint = package.checkpoint(region_name=policy.block, recompute_state_hooks=hooks)
    return checkpoint(forward)(*args, **kwargs)


def candidate_policies(
    block: str, module: nn.Module, forward: Callable[[], Any]
) -> list[tuple[BlockPolicy, float]]:
    """Return the policies of a block that are worth a trial, each with the fraction of the
    forward's time that the recomputation takes. Raises `RematError` if torch_remat is not
    installed."""
    import_torch_remat()
    profiles = [_profile_regions(module, forward) for _ in range(_ROUNDS)]
    block_s = min(block_profile.time_s for block_profile, _ in profiles)
    first = profiles[0][1]
    names = [name for name, p in first.items() if p.can_be_saved and p.calls == 1]
    candidates = [
        SaveCandidate(
            min(submodules[name].time_s for _, submodules in profiles if name in submodules),
            first[name].saved_bytes,
            excludes=tuple(i for i, other in enumerate(names) if other.startswith(f"{name}.")),
        )
        for name in names
    ]
    policies = [(BlockPolicy(block=block, how=CHECKPOINTED), 1.0)]
    for selection in selections_to_save(candidates):
        regions = tuple(names[n] for n in sorted(selection))
        recompute_s = max(0.0, block_s - sum(candidates[n].time_s for n in selection))
        policy = BlockPolicy(block=block, how=SELECTIVE, regions=regions)
        policies.append((policy, recompute_s / block_s))
    return policies


def _saving_forward(package: Any, name: str, module: nn.Module) -> Callable[..., Any]:
    """Return the forward of the submodule `name` as a region that is saved, outputs included."""
    region = package.region(module.forward, name, recompute=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = region(*args, **kwargs)
        package.recompute_needs_tensor(*tensors_in(outputs))  # their readers are recomputed
        return outputs

    return forward


class _RngStateHook:
    """A state hook of torch_remat: restores the random number generators for the recomputation of
    a block, and after the regions that it skips."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._devices = {t.device for t in leaves if isinstance(t, torch.Tensor) and t.is_cuda}

    def snapshot(self) -> Any:
        """Return the generator states of the CPU and of the GPUs that have an argument."""
        return torch.get_rng_state(), {d: torch.cuda.get_rng_state(d) for d in self._devices}

    def restore(self, state: Any) -> None:
        """Set the generators to the states of `snapshot`."""
        torch.set_rng_state(state[0])
        for device, device_state in state[1].items():
            torch.cuda.set_rng_state(device_state, device)


@dataclass
class _RegionProfile:
    """Time of a block or submodule in one forward, and the bytes that saving it would retain."""

    time_s: float = 0.0
    calls: int = 0
    can_be_saved: bool = True
    saved: dict[StorageWeakRef, int] = field(default_factory=dict)
    """The storages that are retained if the submodule is saved, with their bytes."""
    outputs: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """The outputs with their versions, to detect later writes to them."""

    @property
    def saved_bytes(self) -> int:
        """The bytes of all saved storages."""
        return sum(self.saved.values())


def _profile_regions(
    module: nn.Module, forward: Callable[[], Any]
) -> tuple[_RegionProfile, dict[str, _RegionProfile]]:
    """Run a block's forward once, and return the profiles of the block and, by name, of its
    submodules."""
    profiles: dict[str, _RegionProfile] = {}
    active: list[_RegionProfile] = []
    state = [*module.parameters(), *module.buffers()]
    state_storages = {StorageWeakRef(tensor.untyped_storage()) for tensor in state}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (ref := StorageWeakRef(storage)) not in state_storages:
            for profile in active:
                profile.saved.setdefault(ref, storage.nbytes())
        return tensor.detach()  # an output that references itself would never be freed

    def profiled_forward(name: str, submodule: nn.Module) -> Callable[..., Any]:
        original_forward = submodule.forward

        def run_profiled(*args: Any, **kwargs: Any) -> Any:
            profile = profiles.setdefault(name, _RegionProfile())
            profile.calls += 1
            active.append(profile)
            with _time_added_to_profile(profile, (args, kwargs)):
                outputs = original_forward(*args, **kwargs)
            active.pop()
            profile.can_be_saved &= _is_region_output(outputs)
            inputs = {StorageWeakRef(t.untyped_storage()) for t in tensors_in((args, kwargs))}
            for tensor in tensors_in(outputs):
                profile.outputs.append((tensor.detach(), tensor._version))
                storage = tensor.untyped_storage()
                profile.saved.setdefault(StorageWeakRef(storage), storage.nbytes())
            for ref in inputs:  # they are recomputed outside of the submodule
                profile.saved.pop(ref, None)
            return outputs

        return run_profiled

    block_profile = _RegionProfile()
    forwards = {m: profiled_forward(name, m) for name, m in module.named_modules() if name}
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        patched_forwards(forwards),
        _time_added_to_profile(block_profile, ()),
    ):
        forward()
    for profile in profiles.values():
        profile.can_be_saved &= all(t._version == version for t, version in profile.outputs)
        profile.outputs.clear()
    return block_profile, profiles


@contextmanager
def _time_added_to_profile(profile: _RegionProfile, arguments: Any) -> Iterator[None]:
    """Add the time of this context to a profile. The devices of the `arguments` are synchronized
    before and after."""
    start_s = synchronized_time_s(arguments)
    yield
    profile.time_s += synchronized_time_s(arguments) - start_s


def _is_region_output(outputs: Any) -> bool:
    """True if torch_remat allows a region to return `outputs`: a tensor, or a list or tuple of
    tensors and None with at least one tensor."""
    leaves = outputs if isinstance(outputs, tuple | list) else [outputs]
    return all(item is None or isinstance(item, torch.Tensor) for item in leaves) and any(
        isinstance(item, torch.Tensor) for item in leaves
    )


def import_torch_remat() -> Any:
    """Return the package torch_remat. Raises `RematError` if it is not installed."""
    try:
        import torch_remat as package
    except ImportError:
        raise RematError(
            'rules="regions" needs torch_remat, which is not installed: pip install '
            "'remat[torch-remat]'; rules=\"operators\" needs only torch"
        ) from None
    return package
