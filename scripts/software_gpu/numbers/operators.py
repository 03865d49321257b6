"""The ATen operations that are replaced on CUDA, and what their schemas say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch._C import _dispatch_get_all_op_names as operator_names
from torch._C import _dispatch_has_computed_kernel_for_dispatch_key as runs_on
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch._ops import OpOverload

COMPUTED_KEYS = (
    "CUDA",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
"""Where the kernels of replaced operations are registered. Those registered as
CompositeImplicitAutograd are made of other operations, which are replaced."""

SPARSE_KEYS = ("SparseCUDA", "SparseCsrCUDA", "NestedTensorCUDA", "QuantizedCUDA")


def words(text: str) -> frozenset[str]:
    """Return the words of a text, as a set of names."""
    return frozenset(text.split())


NO_RESULT_TO_COMPUTE = words(
    """
    empty empty_like empty_strided empty_permuted empty_quantized new_empty new_empty_strided
    _empty_affine_quantized _empty_per_channel_affine_quantized _efficientzerotensor
    resize _resize_output _resize_output_ resize_as set _unsafe_view lift _make_dual_copy
    record_stream _pin_memory pin_memory is_pinned is_coalesced is_same_size is_set_to
    _assert_tensor_metadata _print sparse_dim dense_dim sym_constrain_range
    sym_constrain_range_for_size _assert_scalar _fused_sdp_choice _has_same_storage_numel
    _use_cudnn_ctc_loss _use_miopen_ctc_loss _linalg_check_errors _to_copy
    """
)
"""Operations that return memory as it is, or metadata; `_to_copy` leaves the values to `copy_`."""

SPLIT_INTO_REPLACED = words(
    """
    zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full clone rand randn
    rand_like randn_like randint randint_like randperm linspace arange eye allclose
    """
)
"""Operations whose kernel only allocates and calls replaced operations: not computed twice."""

NOT_DECLARED = {"native_batch_norm": ("running_mean", "running_var")}
"""Arguments that an operation writes without saying so in its schema."""


@dataclass(frozen=True)
class Operator:
    """An overload, with the facts of its schema that the replacement needs."""

    overload: OpOverload

    @property
    def name(self) -> str:
        """The name with namespace and overload, such as `aten::add.Tensor`."""
        return self.overload.name()

    @property
    def base_name(self) -> str:
        """The name without namespace and overload."""
        return self.overload._schema.name.removeprefix("aten::")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments, in order."""
        return tuple(argument.name for argument in self.overload._schema.arguments)

    @cached_property
    def mutated(self) -> frozenset[str]:
        """The names of the arguments that the operation writes."""
        arguments = self.overload._schema.arguments
        declared = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
        return frozenset(declared.union(NOT_DECLARED.get(self.base_name, ())))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The names of the arguments that receive the results, in an overload with `out`."""
        return tuple(a.name for a in self.overload._schema.arguments if a.is_out)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The arguments that have a default value, with it."""
        arguments = self.overload._schema.arguments
        return {a.name: a.default_value for a in arguments if a.has_default_value()}

    @cached_property
    def tensors(self) -> frozenset[str]:
        """The names of the arguments that are one tensor."""
        arguments = self.overload._schema.arguments
        return frozenset(a.name for a in arguments if str(a.type) == "Tensor")

    @property
    def is_random(self) -> bool:
        """True if the operation samples from a generator."""
        return torch.Tag.nondeterministic_seeded in self.overload.tags

    @property
    def has_cpu_kernel(self) -> bool:
        """True if the operation can be called with CPU tensors."""
        return runs_on(self.name, "CPU")

    @property
    def is_computed(self) -> bool:
        """True if the operation computes values: it is no view, no metadata, no allocation."""
        schema = self.overload._schema
        if torch.Tag.inplace_view in self.overload.tags or self.base_name in NO_RESULT_TO_COMPUTE:
            return False
        returned = (r.alias_info for r in schema.returns)
        return not any(alias and not alias.is_write for alias in returned)


def replaced_operators() -> Iterator[Operator]:
    """Yield the ATen operations to replace for dense CUDA tensors."""
    for operator in _operators("CUDA"):
        is_registered = any(has_kernel(operator.name, key) for key in COMPUTED_KEYS)
        if is_registered and operator.is_computed and not _is_split(operator):
            yield operator


def sparse_operators() -> Iterator[tuple[Operator, str]]:
    """Yield the ATen operations on sparse, nested and quantized CUDA tensors, and their key."""
    for key in SPARSE_KEYS:
        for operator in _operators(key):
            if has_kernel(operator.name, key) and operator.is_computed:
                yield operator, key


def _operators(key: str) -> Iterator[Operator]:
    for name in operator_names():
        if name.startswith("aten::") and runs_on(name, key):
            base, _, overload = name.removeprefix("aten::").partition(".")
            yield Operator(getattr(getattr(torch.ops.aten, base), overload or "default"))


def _is_split(operator: Operator) -> bool:
    is_split = operator.base_name in SPLIT_INTO_REPLACED
    return is_split and not has_kernel(operator.name, "CUDA") and not operator.mutated
