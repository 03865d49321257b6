"""Operators whose rule follows from their kind: those that work element by element, or along one
dimension. Data, one name for each operator of ATen."""

from __future__ import annotations

_UNARY = """
    abs.default acos.default acosh.default alias.default angle.default asin.default asinh.default
    atan.default atanh.default bitwise_not.default ceil.default celu.default clamp.default
    clamp_max.default clamp_min.default clone.default cos.default cosh.default deg2rad.default
    detach.default elu.default erf.default erfc.default erfinv.default exp.default exp2.default
    expm1.default floor.default frac.default full_like.default gelu.default
    hardshrink.default hardsigmoid.default hardswish.default hardtanh.default i0.default
    isinf.default isnan.default leaky_relu.default lgamma.default log.default log10.default
    log1p.default log2.default log_sigmoid_forward.default logical_not.default logit.default
    mish.default nan_to_num.default neg.default ones_like.default positive.default rad2deg.default
    reciprocal.default relu.default relu6.default round.default rsqrt.default sgn.default
    sigmoid.default sign.default signbit.default silu.default sin.default sinc.default sinh.default
    softplus.default softshrink.default sqrt.default square.default tan.default tanh.default
    threshold.default trunc.default zeros_like.default _to_copy.default
"""

_BINARY = """
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor mul.Tensor mul.Scalar
    div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode floor_divide.default fmod.Scalar
    fmod.Tensor remainder.Scalar remainder.Tensor pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
    maximum.default minimum.default fmax.default fmin.default atan2.default hypot.default
    xlogy.Tensor eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar
    gt.Tensor gt.Scalar ge.Tensor ge.Scalar logical_and.default logical_or.default
    logical_xor.default bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar
    bitwise_xor.Tensor bitwise_xor.Scalar copysign.Tensor clamp.Tensor clamp_max.Tensor
    clamp_min.Tensor
"""

_TERNARY = """
    addcmul.default addcdiv.default lerp.Scalar lerp.Tensor where.self where.ScalarOther
    where.ScalarSelf where.Scalar masked_fill.Scalar masked_fill.Tensor
"""

_BACKWARD = """
    elu_backward.default gelu_backward.default hardsigmoid_backward.default
    hardswish_backward.default hardtanh_backward.default leaky_relu_backward.default
    log_sigmoid_backward.default mish_backward.default native_dropout_backward.default
    sigmoid_backward.default silu_backward.default softplus_backward.default
    softshrink_backward.default tanh_backward.default threshold_backward.default
"""

ELEMENTWISE = frozenset(
    f"aten.{name}" for names in (_UNARY, _BINARY, _TERNARY, _BACKWARD) for name in names.split()
)
"""Operators that compute each element from the elements in its place, after broadcasting."""

ALONG_ONE_DIMENSION = {
    "aten._softmax.default": 1,
    "aten._log_softmax.default": 1,
    "aten._softmax_backward_data.default": 2,
    "aten._log_softmax_backward_data.default": 2,
    "aten.cumsum.default": 1,
    "aten.gather.default": 1,
    "aten.scatter.value": 1,
    "aten.scatter.src": 1,
    "aten.scatter_add.default": 1,
}
"""Operators that mix elements along one dimension, with the index of the argument that names it.
All their tensors have the same rows."""
