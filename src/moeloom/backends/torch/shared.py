"""Shared experts: one dense expert of their total width over every token of this rank."""

from __future__ import annotations

from torch import Tensor

from moeloom.backends.call import Gradients, LayerCall
from moeloom.backends.torch.activation import swiglu, swiglu_backward
from moeloom.backends.torch.gemm import wide_product
from moeloom.numerics import accumulate_dtype


def shared_forward(call: LayerCall) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (output, pre-activations, output before the gate); None where there is none.

    Returns:
        [T, H] accumulation dtype, [T, 2S] operand dtype, and [T, H] accumulation dtype or None without a gate.
    """
    x, shared = call.x, call.shared
    if shared is None:
        return None, None, None
    gate_up = wide_product(x, shared.gate_up.t()).to(x.dtype)
    out = wide_product(swiglu(gate_up, call.swiglu_limit), shared.down.t())
    return (out, gate_up, None) if shared.gate is None else (out * _gate(x, shared.gate), gate_up, out)


def shared_backward(
    call: LayerCall, d_out: Tensor, gate_up: Tensor, ungated: Tensor | None, grads: Gradients, *, weights: bool
) -> Tensor:
    """Return the shared experts' part of d_x, [T, H] accumulation dtype; fill this rank's weight gradients.

    Args:
        call: arguments of forward.
        d_out: [T, H] operand dtype.
        gate_up: [T, 2S] pre-activations from forward.
        ungated: [T, H] output before the gate from forward, or None.
        grads: where the weight gradients go.
        weights: compute them.
    """
    x, shared = call.x, call.shared
    wide = accumulate_dtype(x.dtype)
    d_y, d_logit = d_out, None
    if shared.gate is not None:
        gate = _gate(x, shared.gate)
        d_logit = (ungated * d_out).sum(1, keepdim=True) * gate * (1 - gate)
        d_y = (d_out * gate).to(x.dtype)
        if weights:
            grads.shared_gate = (x * d_logit).sum(0)
    d_hidden = wide_product(d_y, shared.down)
    inner = swiglu_backward(gate_up, d_hidden, None, call.swiglu_limit, wants_hidden=weights)
    if weights:
        grads.shared_gate_up = wide_product(inner.gate_up.t(), x)
        grads.shared_down = wide_product(d_y.t(), inner.hidden)
    d_x = wide_product(inner.gate_up, shared.gate_up)
    return d_x if d_logit is None else d_x.addcmul_(d_logit, shared.gate.to(wide))


def _gate(x: Tensor, weight: Tensor) -> Tensor:
    """Return sigmoid(x . weight), [T, 1] accumulation dtype."""
    return (x * weight.to(accumulate_dtype(x.dtype))).sum(1, keepdim=True).sigmoid()
