"""Fused cells of LSTM and GRU, which exist for CUDA only: gates and gradients in float32.

The workspace that the forward leaves to the backward has the sizes of torch's, with the gates
after their activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def _gates(arguments: Mapping[str, Any], name: str, bias: str) -> Tensor:
    gates = arguments[name].float()
    return gates if arguments[bias] is None else gates + arguments[bias].float()


def lstm_cell(arguments: Mapping[str, Any], _: object) -> tuple[Tensor, ...]:
    """`_thnn_fused_lstm_cell`."""
    gates = _gates(arguments, "input_gates", "input_bias")
    gates = gates + _gates(arguments, "hidden_gates", "hidden_bias")
    in_gate, forget, cell, out = gates.chunk(4, 1)
    in_gate, forget, cell, out = in_gate.sigmoid(), forget.sigmoid(), cell.tanh(), out.sigmoid()
    cy = forget * arguments["cx"].float() + in_gate * cell
    return out * cy.tanh(), cy, torch.cat([in_gate, forget, cell, out], 1)


def lstm_cell_backward(arguments: Mapping[str, Any], _: object) -> tuple[Tensor | None, ...]:
    """`_thnn_fused_lstm_cell_backward_impl`."""
    in_gate, forget, cell, out = arguments["workspace"].float().chunk(4, 1)
    cx, cy = arguments["cx"].float(), arguments["cy"].float()
    of_hy, of_cy = (
        torch.zeros_like(cy) if arguments[name] is None else arguments[name].float()
        for name in ("grad_hy", "grad_cy")
    )
    activated = cy.tanh()
    of_out = of_hy * activated * out * (1 - out)
    of_cy = of_cy + of_hy * out * (1 - activated**2)
    of_in = of_cy * cell * in_gate * (1 - in_gate)
    of_forget = of_cy * cx * forget * (1 - forget)
    of_cell = of_cy * in_gate * (1 - cell**2)
    of_gates = torch.cat([of_in, of_forget, of_cell, of_out], 1)
    of_bias = of_gates.sum(0) if arguments["has_bias"] else None
    return of_gates, of_cy * forget, of_bias


def gru_cell(arguments: Mapping[str, Any], _: object) -> tuple[Tensor, ...]:
    """`_thnn_fused_gru_cell`."""
    of_input = _gates(arguments, "input_gates", "input_bias").chunk(3, 1)
    of_hidden = _gates(arguments, "hidden_gates", "hidden_bias").chunk(3, 1)
    hx = arguments["hx"].float()
    reset = (of_input[0] + of_hidden[0]).sigmoid()
    update = (of_input[1] + of_hidden[1]).sigmoid()
    new = (of_input[2] + reset * of_hidden[2]).tanh()
    hy = new + update * (hx - new)
    return hy, torch.cat([reset, update, new, hx, of_hidden[2]], 1)


def gru_cell_backward(arguments: Mapping[str, Any], _: object) -> tuple[Tensor | None, ...]:
    """`_thnn_fused_gru_cell_backward`."""
    reset, update, new, hx, hidden = arguments["workspace"].float().chunk(5, 1)
    of_hy = arguments["grad_hy"].float()
    of_new = of_hy * (1 - update) * (1 - new**2)
    of_update = of_hy * (hx - new) * update * (1 - update)
    of_reset = of_new * hidden * reset * (1 - reset)
    of_input = torch.cat([of_reset, of_update, of_new], 1)
    of_hidden = torch.cat([of_reset, of_update, of_new * reset], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if arguments["has_bias"] else (None, None)
    return of_input, of_hidden, of_hy * update, *biases


COUNTERPARTS = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}
