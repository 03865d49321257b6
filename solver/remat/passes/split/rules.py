"""The rule of each operator that can be split: `RULES` has a line for each.

A rule gives the states of an operation's results from those of its arguments. An operator without a
rule ends a region.
"""

from __future__ import annotations

from remat.passes.split.call import Call, Rule, SplitCall
from remat.passes.split.elementwise_rules import along_one_dimension, elementwise
from remat.passes.split.layer_rules import (
    elementwise_loss,
    elementwise_loss_backward,
    embedding,
    embedding_backward,
    negative_log_likelihood,
    negative_log_likelihood_backward,
    normalization,
    normalization_backward,
)
from remat.passes.split.operators import ALONG_ONE_DIMENSION, ELEMENTWISE
from remat.passes.split.product_rules import (
    batched_product,
    matrix_product,
    product_with_bias,
    reduction,
)
from remat.passes.split.states import SUM, PartialSum, Rows
from remat.passes.split.view_rules import (
    concatenation,
    expand,
    parts,
    permute,
    reshape,
    selection,
    selection_backward,
    squeeze,
    unsqueeze,
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **{target: along_one_dimension(index) for target, index in ALONG_ONE_DIMENSION.items()},
    "aten.mm.default": matrix_product,
    "aten.addmm.default": product_with_bias,
    "aten.bmm.default": batched_product,
    "aten.view.default": reshape,
    "aten._unsafe_view.default": reshape,
    "aten.reshape.default": reshape,
    "aten.expand.default": expand,
    "aten.t.default": permute,
    "aten.transpose.int": permute,
    "aten.permute.default": permute,
    "aten.unsqueeze.default": unsqueeze,
    "aten.squeeze.dim": squeeze,
    "aten.squeeze.dims": squeeze,
    "aten.slice.Tensor": selection,
    "aten.select.int": selection,
    "aten.slice_backward.default": selection_backward,
    "aten.split.Tensor": parts,
    "aten.split_with_sizes.default": parts,
    "aten.cat.default": concatenation,
    "aten.sum.default": reduction,
    "aten.sum.dim_IntList": reduction,
    "aten.mean.default": reduction,
    "aten.mean.dim": reduction,
    "aten.amax.default": reduction,
    "aten.amin.default": reduction,
    "aten.logsumexp.default": reduction,
    "aten.native_layer_norm.default": normalization,
    "aten.native_layer_norm_backward.default": normalization_backward((3, 4)),
    "aten._fused_rms_norm.default": normalization,
    "aten._fused_rms_norm_backward.default": normalization_backward((3,)),
    "aten.nll_loss_forward.default": negative_log_likelihood,
    "aten.nll_loss_backward.default": negative_log_likelihood_backward,
    "aten.mse_loss.default": elementwise_loss(2),
    "aten.mse_loss_backward.default": elementwise_loss_backward(3),
    "aten.binary_cross_entropy.default": elementwise_loss(3),
    "aten.binary_cross_entropy_backward.default": elementwise_loss_backward(4),
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_backward,
}
"""The rule of each operator that can be split, by target."""


def split_call(call: Call) -> SplitCall | None:
    """Return what a call in these states gives; None if it cannot be split so, or if nothing of it
    is split."""
    rule = RULES.get(call.node.target)
    if rule is None or call.node.random or not any(isinstance(s, Rows) for s in call.all_states):
        return None
    result = rule(call)
    return None if result is None or _may_overflow(call, result) else result


def _may_overflow(call: Call, result: SplitCall) -> bool:
    """True if a mean becomes a sum in float16: torch adds it up in float32."""
    return any(
        isinstance(state, PartialSum) and state != SUM and item.tensor.dtype == "float16"
        for item, state in zip(call.node.results, result.results, strict=True)
    )
