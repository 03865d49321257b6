"""A call of each random operator of torch, by the name of its overload.

An operator is random if it has torch's tag `nondeterministic_seeded`. An operator without a call
has a reason in `REASONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

Call = Callable[[Any, Tensor], Any]
"""A call of an operator, given the operator and an activation of shape (16, 12), between -1 and 1.
The operator broadcasts to that shape."""

TAG = torch.Tag.nondeterministic_seeded

SIZE = [16, 12]

_NAMESPACES = ("aten", "prims", "rngprims", "inductor_prims")


def operator(name: str) -> OpOverload:
    """Return the operator of a name such as "aten.bernoulli.p"."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def random_operators() -> list[str]:
    """Return the names of all operators of this torch that sample random numbers."""
    names: list[str] = []
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, name = qualified.split("::")
        packet, _, overload = name.partition(".")
        if namespace in _NAMESPACES:
            names.append(f"{namespace}.{packet}.{overload or 'default'}")
    return sorted(name for name in names if TAG in operator(name).tags)


def _probabilities(h: Tensor) -> Tensor:
    return h.sigmoid()


def _constant(h: Tensor) -> Tensor:
    """Probabilities without a gradient."""
    return h.detach().sigmoid()


def _rates(h: Tensor) -> Tensor:
    return 3 * _constant(h) + 0.1


def _heads(h: Tensor) -> list[Tensor]:
    """Queries, keys and values: 2 sequences, 2 heads, 8 tokens, 6 features."""
    return [h.view(2, 8, 2, 6).transpose(1, 2)] * 3


def _recurrent(op: Any, h: Tensor, gates: int, *, packed: bool = False) -> Tensor:
    """Call a recurrent network of two layers with dropout between them, on 2 steps of 4 sequences.
    Its weights are activations, too: each has a gradient."""
    matrix = h.repeat(gates, 1)[: gates * 12]
    weights = [matrix, matrix.flip(0), matrix[:, 0], matrix[:, 1]] * 2
    start = torch.zeros(2, 4, 12)
    state = [start, start] if gates == 4 else start
    if packed:
        outputs = op(h[:8], torch.full((2,), 4), state, weights, True, 2, 0.3, True, False)
    else:
        steps = h[:8].view(2, 4, 12)
        outputs = op(steps, state, weights, True, 2, 0.3, True, False, False)
    return outputs[0].reshape(8, 12).repeat(2, 1)


def _out(*sizes: int) -> Tensor:
    return torch.empty(sizes or tuple(SIZE))


def _integers_out(*sizes: int) -> Tensor:
    return torch.empty(sizes or tuple(SIZE), dtype=torch.int64)


CALLS: dict[str, Call] = {
    "aten._sample_dirichlet.default": lambda op, h: op(_rates(h)),
    "aten._sample_dirichlet.out": lambda op, h: op(_rates(h), out=_out()),
    "aten._scaled_dot_product_attention_math.default": lambda op, h: op(*_heads(h), None, 0.2)[
        0
    ].reshape(SIZE),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": lambda op, h: op(*_heads(h))[
        0
    ].reshape(SIZE),
    "aten._standard_gamma.default": lambda op, h: op(h.exp() + 0.5),
    "aten._standard_gamma.out": lambda op, h: op(_rates(h), out=_out()),
    "aten.alpha_dropout.default": lambda op, h: op(h, 0.3, True),
    "aten.alpha_dropout_.default": lambda op, h: op(h * 2, 0.3, True),
    "aten.bernoulli.default": lambda op, h: op(_probabilities(h)),
    "aten.bernoulli.p": lambda op, h: op(h.detach(), 0.3),
    "aten.bernoulli.Tensor": lambda op, h: op(h, _probabilities(h)),
    "aten.bernoulli.out": lambda op, h: op(_constant(h), out=_out()),
    "aten.bernoulli.float_out": lambda op, h: op(h.detach(), 0.3, out=_out()),
    "aten.bernoulli.Tensor_out": lambda op, h: op(h.detach(), _constant(h), out=_out()),
    "aten.bernoulli_.float": lambda op, h: op(torch.empty_like(h), 0.3),
    "aten.bernoulli_.Tensor": lambda op, h: op(torch.empty_like(h), _probabilities(h)),
    "aten.binomial.default": lambda op, h: op(torch.full_like(h.detach(), 9), _constant(h)),
    "aten.binomial.out": lambda op, h: op(torch.full(SIZE, 9.0), _constant(h), out=_out()),
    "aten.cauchy.default": lambda op, h: op(h, 1.0, 2.0),
    "aten.cauchy.out": lambda op, h: op(h.detach(), 1.0, 2.0, out=_out()),
    "aten.cauchy_.default": lambda op, h: op(torch.empty_like(h), 1.0, 2.0),
    "aten.dropout.default": lambda op, h: op(h, 0.3, True),
    "aten.dropout_.default": lambda op, h: op(h * 2, 0.3, True),
    "aten.exponential.default": lambda op, h: op(h, 2.0),
    "aten.exponential.out": lambda op, h: op(h.detach(), 2.0, out=_out()),
    "aten.exponential_.default": lambda op, h: op(torch.empty_like(h), 2.0),
    "aten.feature_alpha_dropout.default": lambda op, h: op(h, 0.3, True),
    "aten.feature_alpha_dropout_.default": lambda op, h: op(h * 2, 0.3, True),
    "aten.feature_dropout.default": lambda op, h: op(h, 0.3, True),
    "aten.feature_dropout_.default": lambda op, h: op(h * 2, 0.3, True),
    "aten.geometric.default": lambda op, h: op(h, 0.3),
    "aten.geometric.out": lambda op, h: op(h.detach(), 0.3, out=_out()),
    "aten.geometric_.default": lambda op, h: op(torch.empty_like(h), 0.3),
    "aten.gru.input": lambda op, h: _recurrent(op, h, 3),
    "aten.gru.data": lambda op, h: _recurrent(op, h, 3, packed=True),
    "aten.lstm.input": lambda op, h: _recurrent(op, h, 4),
    "aten.lstm.data": lambda op, h: _recurrent(op, h, 4, packed=True),
    "aten.log_normal.default": lambda op, h: op(h, 1.0, 0.5),
    "aten.log_normal.out": lambda op, h: op(h.detach(), 1.0, 0.5, out=_out()),
    "aten.log_normal_.default": lambda op, h: op(torch.empty_like(h), 1.0, 0.5),
    "aten.multinomial.default": lambda op, h: op(_probabilities(h), 12),
    "aten.multinomial.out": lambda op, h: op(_rates(h), 12, True, out=_integers_out()),
    "aten.native_dropout.default": lambda op, h: op(h, 0.3, True)[0],
    "aten.native_dropout.out": lambda op, h: op(
        h.detach(), 0.3, True, out0=_out(), out1=torch.empty(SIZE, dtype=torch.bool)
    )[0],
    "aten.normal.float_float": lambda op, h: op(1.0, 2.0, SIZE),
    "aten.normal.float_float_out": lambda op, h: op(1.0, 2.0, SIZE, out=_out()),
    "aten.normal.float_Tensor": lambda op, h: op(1.0, _rates(h)),
    "aten.normal.float_Tensor_out": lambda op, h: op(1.0, _rates(h), out=_out()),
    "aten.normal.Tensor_float": lambda op, h: op(h, 2.0),
    "aten.normal.Tensor_float_out": lambda op, h: op(h.detach(), 2.0, out=_out()),
    "aten.normal.Tensor_Tensor": lambda op, h: op(h, _rates(h)),
    "aten.normal.Tensor_Tensor_out": lambda op, h: op(h.detach(), _rates(h), out=_out()),
    "aten.normal.out": lambda op, h: op(h.detach(), 1.0, 2.0, out=_out()),
    "aten.normal_.default": lambda op, h: op(torch.empty_like(h), 1.0, 2.0),
    "aten.normal_functional.default": lambda op, h: op(h.detach(), 1.0, 2.0),
    "aten.poisson.default": lambda op, h: op(h.exp()),
    "aten.poisson.out": lambda op, h: op(_rates(h), out=_out()),
    "aten.rand.default": lambda op, h: op(SIZE),
    "aten.rand.out": lambda op, h: op(SIZE, out=_out()),
    "aten.rand.generator": lambda op, h: op(SIZE, generator=None),
    "aten.rand.generator_out": lambda op, h: op(SIZE, generator=None, out=_out()),
    "aten.rand_like.default": lambda op, h: op(h),
    "aten.rand_like.out": lambda op, h: op(h.detach(), out=_out()),
    "aten.rand_like.generator": lambda op, h: op(h, generator=None),
    "aten.rand_like.generator_out": lambda op, h: op(h.detach(), generator=None, out=_out()),
    "aten.randn.default": lambda op, h: op(SIZE),
    "aten.randn.out": lambda op, h: op(SIZE, out=_out()),
    "aten.randn.generator": lambda op, h: op(SIZE, generator=None),
    "aten.randn.generator_out": lambda op, h: op(SIZE, generator=None, out=_out()),
    "aten.randn_like.default": lambda op, h: op(h),
    "aten.randn_like.out": lambda op, h: op(h.detach(), out=_out()),
    "aten.randn_like.generator": lambda op, h: op(h, generator=None),
    "aten.randn_like.generator_out": lambda op, h: op(h.detach(), generator=None, out=_out()),
    "aten.randint.default": lambda op, h: op(9, SIZE),
    "aten.randint.low": lambda op, h: op(-3, 9, SIZE),
    "aten.randint.low_out": lambda op, h: op(-3, 9, SIZE, out=_integers_out()),
    "aten.randint.low_generator": lambda op, h: op(-3, 9, SIZE, generator=None),
    "aten.randint.low_generator_out": lambda op, h: op(
        -3, 9, SIZE, generator=None, out=_integers_out()
    ),
    "aten.randint.out": lambda op, h: op(9, SIZE, out=_integers_out()),
    "aten.randint.generator": lambda op, h: op(9, SIZE, generator=None),
    "aten.randint.generator_out": lambda op, h: op(9, SIZE, generator=None, out=_integers_out()),
    "aten.randint_like.default": lambda op, h: op(h.detach(), 9),
    "aten.randint_like.out": lambda op, h: op(h.detach(), 9, out=_out()),
    "aten.randint_like.generator": lambda op, h: op(h.detach(), 9, generator=None),
    "aten.randint_like.generator_out": lambda op, h: op(h.detach(), 9, generator=None, out=_out()),
    "aten.randint_like.low_dtype": lambda op, h: op(h.detach(), -3, 9),
    "aten.randint_like.low_dtype_out": lambda op, h: op(h.detach(), -3, 9, out=_out()),
    "aten.randint_like.low_generator_dtype": lambda op, h: op(h.detach(), -3, 9, generator=None),
    "aten.randint_like.low_generator_dtype_out": lambda op, h: op(
        h.detach(), -3, 9, generator=None, out=_out()
    ),
    "aten.randint_like.Tensor": lambda op, h: op(h.detach(), torch.tensor(9)),
    "aten.randint_like.Tensor_out": lambda op, h: op(h.detach(), torch.tensor(9), out=_out()),
    "aten.randint_like.Tensor_generator": lambda op, h: op(
        h.detach(), torch.tensor(9), generator=None
    ),
    "aten.randint_like.Tensor_generator_out": lambda op, h: op(
        h.detach(), torch.tensor(9), generator=None, out=_out()
    ),
    "aten.random.default": lambda op, h: op(h),
    "aten.random.out": lambda op, h: op(h.detach(), out=_out()),
    "aten.random.from": lambda op, h: op(h, -3, 9),
    "aten.random.from_out": lambda op, h: op(h.detach(), -3, 9, out=_out()),
    "aten.random.to": lambda op, h: op(h, 9),
    "aten.random.to_out": lambda op, h: op(h.detach(), 9, out=_out()),
    "aten.random_.default": lambda op, h: op(torch.empty_like(h)),
    "aten.random_.from": lambda op, h: op(torch.empty_like(h), -3, 9),
    "aten.random_.to": lambda op, h: op(torch.empty_like(h), 9),
    "aten.randperm.default": lambda op, h: op(12),
    "aten.randperm.out": lambda op, h: op(12, out=_integers_out(12)),
    "aten.randperm.generator": lambda op, h: op(12, generator=None),
    "aten.randperm.generator_out": lambda op, h: op(12, generator=None, out=_integers_out(12)),
    "aten.rnn_relu.input": lambda op, h: _recurrent(op, h, 1),
    "aten.rnn_relu.data": lambda op, h: _recurrent(op, h, 1, packed=True),
    "aten.rnn_tanh.input": lambda op, h: _recurrent(op, h, 1),
    "aten.rnn_tanh.data": lambda op, h: _recurrent(op, h, 1, packed=True),
    "aten.rrelu.default": lambda op, h: op(h, 0.1, 0.4, True),
    "aten.rrelu_.default": lambda op, h: op(h * 2, 0.1, 0.4, True),
    "aten.rrelu_with_noise.default": lambda op, h: op(h, torch.empty_like(h), 0.1, 0.4, True),
    "aten.rrelu_with_noise.out": lambda op, h: op(h.detach(), _out(), 0.1, 0.4, True, out=_out()),
    "aten.rrelu_with_noise_.default": lambda op, h: op(h * 2, torch.empty_like(h), 0.1, 0.4, True),
    "aten.rrelu_with_noise_functional.default": lambda op, h: op(
        h, torch.zeros_like(h), 0.1, 0.4, True
    )[0],
    "aten.scaled_dot_product_attention.default": lambda op, h: op(*_heads(h), None, 0.2).reshape(
        SIZE
    ),
    "aten.uniform.default": lambda op, h: op(h, -1.0, 2.0),
    "aten.uniform.out": lambda op, h: op(h.detach(), -1.0, 2.0, out=_out()),
    "aten.uniform_.default": lambda op, h: op(torch.empty_like(h), -1.0, 2.0),
    "prims.normal.default": lambda op, h: op(
        SIZE,
        mean=1.0,
        std=2.0,
        dtype=torch.float32,
        device=torch.device("cpu"),
        requires_grad=False,
    ),
    "prims.uniform.default": lambda op, h: op(
        SIZE, stride=(12, 1), low=1.0, high=2.0, dtype=torch.float32, device=torch.device("cpu")
    ),
}

CAPTURE_MAY_REFUSE = frozenset({
    "aten.gru.data", "aten.lstm.data", "aten.rnn_relu.data", "aten.rnn_tanh.data",
    "aten.randint_like.Tensor_generator", "aten.randint_like.Tensor_generator_out",
    "aten.random.from_out", "aten.uniform.out",
})  # fmt: skip
"""Operators that read values of tensors (sizes of packed sequences), or that torch cannot trace."""

TORCH_COMPILE_REFUSES = CAPTURE_MAY_REFUSE | {
    "aten.normal.out", "aten.rand_like.out", "aten.rand_like.generator_out", "aten.randn_like.out",
    "aten.randn_like.generator_out", "aten.randint_like.out", "aten.randint_like.generator_out",
    "aten.randint_like.low_dtype_out", "aten.randint_like.low_generator_dtype_out",
    "aten.randint_like.Tensor_out", "aten.random.from", "aten.random_.from",
}  # fmt: skip
"""Operators that torch.compile cannot trace with any backend, or runs in eager mode."""

_NO_GPU = "runs on a GPU only"
_OTHER_DEVICE = "runs on other devices only"

REASONS: dict[str, str] = {
    "aten._cudnn_attention_backward": _NO_GPU,
    "aten._cudnn_attention_forward": _NO_GPU,
    "aten._cudnn_init_dropout_state": _NO_GPU,
    "aten._cudnn_rnn": _NO_GPU,
    "aten._efficient_attention_forward": _NO_GPU,
    "aten._fill_mem_eff_dropout_mask_": _NO_GPU,
    "aten._flash_attention_forward": _NO_GPU,
    "aten._flash_attention_forward_no_dropout_inplace": _NO_GPU,
    "aten._fused_dropout": _NO_GPU,
    "aten._fused_sdp_choice": "returns the number of a kernel, and samples nothing",
    "aten._lstm_mps": _OTHER_DEVICE,
    "aten._nested_tensor_softmax_with_shape": "takes nested tensors, which remat refuses",
    "aten._scaled_dot_product_attention_math_for_mps": _OTHER_DEVICE,
    "aten._scaled_dot_product_cudnn_attention": _NO_GPU,
    "aten._scaled_dot_product_cudnn_attention_backward": _NO_GPU,
    "aten._scaled_dot_product_efficient_attention": _NO_GPU,
    "aten._scaled_dot_product_efficient_attention_backward": _NO_GPU,
    "aten._scaled_dot_product_flash_attention": _NO_GPU,
    "aten._scaled_dot_product_fused_attention_overrideable": _OTHER_DEVICE,
    "aten._triton_scaled_dot_attention": _NO_GPU,
    "aten.miopen_rnn": _NO_GPU,
    "prims.inductor_rand_eager_offset": "is in graphs of Inductor only",
    "prims.inductor_rand_eager_offsets": "is in graphs of Inductor only",
    "prims.inductor_seed": "is in graphs of Inductor only",
    "prims.inductor_seeds": "is in graphs of Inductor only",
    "rngprims.philox_rand": _NO_GPU,
}
"""Operators without a call, without the names of their overloads, and why."""
