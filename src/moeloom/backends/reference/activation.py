"""SwiGLU with optional clamp, forward and backward, always from pre-activations in the operand dtype."""

from __future__ import annotations

from torch import Tensor

from moeloom.numerics import accumulate_dtype, silu, silu_backward


class SwiGLU:
    """``hidden = silu(gate) * up`` of some rows, with ``gate <= limit`` and ``-limit <= up <= limit`` enforced first.

    Args:
        gate_up: [m, 2I] operand dtype, gate columns then up columns.
        limit: clamp, or None.
    """

    def __init__(self, gate_up: Tensor, limit: float | None) -> None:
        half = gate_up.shape[-1] // 2
        wide = accumulate_dtype(gate_up.dtype)
        self._raw_gate, self._raw_up, self._limit = gate_up[..., :half], gate_up[..., half:], limit
        self._gate, self._up = self._raw_gate.to(wide).contiguous(), self._raw_up.to(wide)
        if limit is not None:
            self._gate, self._up = self._gate.clamp(max=limit), self._up.clamp(-limit, limit)
        self._silu = silu(self._gate)

    def hidden(self) -> Tensor:
        """Return [m, I], rounded once to the operand dtype."""
        return (self._silu * self._up).to(self._raw_gate.dtype)

    def backward(self, d_hidden: Tensor) -> Tensor:
        """Return the gradient with respect to ``gate_up``, [m, 2I] in the operand dtype.

        ``d_up = d_hidden * silu(gate)`` and ``d_gate = d_hidden * up * silu'(gate)``. Where the clamp holds a value
        fast, its gradient is 0.

        Args:
            d_hidden: [m, I] accumulation dtype, contiguous.
        """
        half = self._gate.shape[-1]
        d_gate_up = self._raw_gate.new_empty(*self._gate.shape[:-1], 2 * half)
        d_gate = silu_backward(d_hidden * self._up, self._gate)
        d_up = d_hidden * self._silu
        if self._limit is not None:
            d_gate.masked_fill_(self._raw_gate > self._limit, 0)
            d_up.masked_fill_(self._raw_up.abs() > self._limit, 0)
        d_gate_up[..., :half] = d_gate
        d_gate_up[..., half:] = d_up
        return d_gate_up
