"""Recurrent networks with dropout between their layers; see `overrides` in this folder.

torch's decompositions leave this dropout out (seen in torch 2.13, `_rnn_helper`). On the CPU, a
capture calls them for one layer at a time, with dropout in between, as eager mode's kernels do. On
a GPU, cuDNN samples the masks, from a generator state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from remat.errors import TraceError

Tensor = torch.Tensor
Kernel = Callable[..., tuple[Tensor, ...]]

_aten = torch.ops.aten

RECURRENT_OPERATORS: tuple[OpOverload, ...] = (
    _aten.gru.input,
    _aten.lstm.input,
    _aten.rnn_relu.input,
    _aten.rnn_tanh.input,
)


def layer_by_layer(operator: OpOverload) -> Kernel:
    """Return the kernel that replaces a recurrent operator on the CPU."""
    decomposition = operator.py_kernels[DispatchKey.CompositeImplicitAutograd]

    def kernel(
        x: Tensor,
        state: Tensor | Sequence[Tensor],
        weights: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        options = (train, bidirectional)
        if not _has_dropout(num_layers, dropout, train):
            return decomposition(
                x, state, weights, has_biases, num_layers, 0.0, *options, batch_first
            )
        states = [state] if isinstance(state, Tensor) else list(state)
        num_weights, num_states = len(weights) // num_layers, 2 if bidirectional else 1
        x = x.transpose(0, 1) if batch_first else x
        last_states: list[list[Tensor]] = [[] for _ in states]
        for layer in range(num_layers):
            layer_states = [s.narrow(0, layer * num_states, num_states) for s in states]
            x, *new_states = decomposition(
                x if layer == 0 else _aten.dropout.default(x, dropout, True),
                layer_states[0] if isinstance(state, Tensor) else layer_states,
                weights[layer * num_weights : (layer + 1) * num_weights],
                has_biases, 1, 0.0, *options, False,
            )  # fmt: skip
            for collected, new_state in zip(last_states, new_states, strict=True):
                collected.append(new_state)
        x = x.transpose(0, 1) if batch_first else x
        return (x, *(torch.cat(collected) for collected in last_states))

    return kernel


def without_dropout(operator: OpOverload) -> Kernel:
    """Return the kernel that replaces a recurrent operator on a GPU: it refuses dropout between
    layers."""
    decomposition = operator.py_kernels[DispatchKey.CompositeImplicitAutograd]

    def kernel(*args: Any) -> tuple[Tensor, ...]:
        num_layers, dropout, train = args[4:7]
        if _has_dropout(num_layers, dropout, train):
            raise TraceError(
                f"a recurrent network of {num_layers} layers with dropout between them runs in "
                "cuDNN, whose random numbers a plan cannot repeat; use one module per layer with "
                "nn.Dropout between them, or set its dropout to 0"
            )
        return decomposition(*args)

    return kernel


def _has_dropout(num_layers: int, dropout: float, train: bool) -> bool:
    return train and dropout > 0 and num_layers > 1
