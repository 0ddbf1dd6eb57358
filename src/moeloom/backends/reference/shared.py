"""Shared experts: every token of this rank, in blocks of a fixed number of rows so that bits do not depend on T."""

from __future__ import annotations

from torch import Tensor

from moeloom.backends.call import Gradients, SharedWeights
from moeloom.backends.reference.activation import SwiGLU
from moeloom.numerics import accumulate_dtype, fold_sum_, matmul, rows_matmul, sigmoid


def shared_forward(x: Tensor, shared: SharedWeights, limit: float | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (output, pre-activations, output before the gate).

    Args:
        x: [T, H] operand dtype.
        shared: weights in the operand dtype.
        limit: SwiGLU clamp.

    Returns:
        [T, H] accumulation dtype, [T, 2S] operand dtype, and [T, H] accumulation dtype or None without a gate.
    """
    gate_up = rows_matmul(x, shared.gate_up.t()).to(x.dtype)
    out = rows_matmul(SwiGLU(gate_up, limit).hidden(), shared.down.t())
    if shared.gate is None:
        return out, gate_up, None
    return out * _gate(x, shared.gate), gate_up, out


def shared_backward(
    x: Tensor,
    d_out: Tensor,
    shared: SharedWeights,
    gate_up: Tensor,
    ungated: Tensor | None,
    limit: float | None,
    grads: Gradients | None,
) -> Tensor:
    """Return the shared experts' part of d_x, [T, H] accumulation dtype; fill this rank's weight gradients.

    Args:
        x, d_out: [T, H] operand dtype.
        shared: weights in the operand dtype.
        gate_up: [T, 2S] pre-activations from forward.
        ungated: [T, H] output before the gate from forward, or None.
        limit: SwiGLU clamp.
        grads: where the weight gradients go; None to skip them.
    """
    wide = accumulate_dtype(x.dtype)
    d_y = d_out
    d_x_gate = None
    if shared.gate is not None:
        gate = _gate(x, shared.gate)
        d_logit = fold_sum_(d_out.to(wide) * ungated)[:, None] * gate * (1 - gate)
        d_x_gate = d_logit * shared.gate.to(wide)
        d_y = (d_out.to(wide) * gate).to(x.dtype)
        if grads is not None:
            grads.shared_gate = (x.to(wide) * d_logit).sum(0)
    d_hidden = rows_matmul(d_y, shared.down)
    activation = SwiGLU(gate_up, limit)
    d_gate_up = activation.backward(d_hidden)
    if grads is not None:
        hidden = activation.hidden()
        grads.shared_gate_up = matmul(d_gate_up.t(), x)
        grads.shared_down = matmul(d_y.t(), hidden)
    d_x = rows_matmul(d_gate_up, shared.gate_up)
    return d_x if d_x_gate is None else d_x + d_x_gate


def _gate(x: Tensor, weight: Tensor) -> Tensor:
    """Return sigmoid(x . weight), [T, 1] accumulation dtype."""
    wide = accumulate_dtype(x.dtype)
    return sigmoid(fold_sum_(x.to(wide) * weight.to(wide)))[:, None]
