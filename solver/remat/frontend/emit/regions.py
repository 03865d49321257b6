"""Blocks checkpointed by torch_remat, which saves what chosen modules inside of them save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from remat.blockwise.policies import AS_IT_IS, CHECKPOINTED, SELECTIVE, BlockPolicy
from remat.blockwise.saving import Candidate, selections
from remat.errors import RematError
from remat.frontend.blocks.patching import replaced
from remat.frontend.blocks.profile import now_s
from remat.frontend.common.pytree import tensors_in

_ROUNDS = 3


def run(
    policy: BlockPolicy, module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A call of a block by its policy; `own` is its forward."""
    if policy.how == AS_IT_IS:
        return own(*args, **kwargs)
    package = torch_remat()

    def forward(*own_args: Any, **own_kwargs: Any) -> Any:
        inside = {name: module.get_submodule(name) for name in policy.regions}
        with replaced({m: _saving(package, name, m) for name, m in inside.items()}):
            return own(*own_args, **own_kwargs)

    hooks = (_Random(tree_leaves((args, kwargs))),)
    wrapped = package.checkpoint(region_name=policy.block, recompute_state_hooks=hooks)
    return wrapped(forward)(*args, **kwargs)


def choices(
    block: str, module: nn.Module, forward: Callable[[], Any]
) -> list[tuple[BlockPolicy, float]]:
    """As those of `operators`."""
    torch_remat()
    rounds = [_profiled(module, forward) for _ in range(_ROUNDS)]
    whole_s = min(whole.time_s for whole, _ in rounds)
    seen = rounds[0][1]
    names = [n for n, part in seen.items() if part.can_be_saved and part.calls == 1]
    found = [
        Candidate(
            min(parts[name].time_s for _, parts in rounds if name in parts),
            seen[name].held_bytes,
            excludes=tuple(i for i, o in enumerate(names) if o.startswith(f"{name}.")),
        )
        for name in names
    ]
    tried = [(BlockPolicy(block=block, how=CHECKPOINTED), 1.0)]
    for chosen in selections(found):
        regions = tuple(names[n] for n in sorted(chosen))
        left_s = max(0.0, whole_s - sum(found[n].time_s for n in chosen))
        tried.append((BlockPolicy(block=block, how=SELECTIVE, regions=regions), left_s / whole_s))
    return tried


def _saving(package: Any, name: str, module: nn.Module) -> Callable[..., Any]:
    own = package.region(module.forward, name, recompute=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = own(*args, **kwargs)
        package.recompute_needs_tensor(*tensors_in(outputs))  # whoever reads them is run again
        return outputs

    return forward


class _Random:
    """Has the same random numbers when a block is run again, also after what is left out then."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._devices = {t.device for t in leaves if isinstance(t, torch.Tensor) and t.is_cuda}

    def snapshot(self) -> Any:
        return torch.get_rng_state(), {d: torch.cuda.get_rng_state(d) for d in self._devices}

    def restore(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        for device, own in state[1].items():
            torch.cuda.set_rng_state(own, device)


@dataclass
class _Part:
    """A module inside of a block as it ran: what it would hold if it were saved."""

    time_s: float = 0.0
    calls: int = 0
    can_be_saved: bool = True
    saved: dict[StorageWeakRef, int] = field(default_factory=dict)
    outputs: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """With their versions: nobody may write to them later."""

    @property
    def held_bytes(self) -> int:
        return sum(self.saved.values())


def _profiled(module: nn.Module, forward: Callable[[], Any]) -> tuple[_Part, dict[str, _Part]]:
    """The block, and the modules inside of it by their names, in one run of its forward."""
    parts: dict[str, _Part] = {}
    active: list[_Part] = []
    own = {StorageWeakRef(t.untyped_storage()) for t in _state(module)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (ref := StorageWeakRef(storage)) not in own:
            for part in active:
                part.saved.setdefault(ref, storage.nbytes())
        return tensor.detach()  # an output that holds itself would stay for ever

    def timed(name: str, inner: nn.Module) -> Callable[..., Any]:
        run_own = inner.forward

        def run_timed(*args: Any, **kwargs: Any) -> Any:
            part = parts.setdefault(name, _Part())
            part.calls += 1
            active.append(part)
            with _timing(part, (args, kwargs)):
                outputs = run_own(*args, **kwargs)
            active.pop()
            part.can_be_saved &= _is_flat(outputs)
            given = {StorageWeakRef(t.untyped_storage()) for t in tensors_in((args, kwargs))}
            for tensor in tensors_in(outputs):
                part.outputs.append((tensor.detach(), tensor._version))
                storage = tensor.untyped_storage()
                part.saved.setdefault(StorageWeakRef(storage), storage.nbytes())
            for ref in given:  # these are made again outside of it
                part.saved.pop(ref, None)
            return outputs

        return run_timed

    whole = _Part()
    inside = {m: timed(name, m) for name, m in module.named_modules() if name}
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        replaced(inside),
        _timing(whole, ()),
    ):
        forward()
    for part in parts.values():
        part.can_be_saved &= all(t._version == version for t, version in part.outputs)
        part.outputs.clear()
    return whole, parts


@contextmanager
def _timing(part: _Part, given: Any) -> Iterator[None]:
    began = now_s(given)
    yield
    part.time_s += now_s(given) - began


def _is_flat(outputs: Any) -> bool:
    """What torch_remat lets a region return."""
    leaves = outputs if isinstance(outputs, tuple | list) else [outputs]
    return all(item is None or isinstance(item, torch.Tensor) for item in leaves) and any(
        isinstance(item, torch.Tensor) for item in leaves
    )


def _state(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def torch_remat() -> Any:
    """The package. Raises `RematError` where it is missing."""
    try:
        import torch_remat as package
    except ImportError:
        raise RematError(
            "rules of regions are those of torch_remat, which is not installed: pip install "
            "'remat[torch-remat]'; rules of operators need nothing but torch"
        ) from None
    return package
