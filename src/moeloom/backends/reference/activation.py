"""SwiGLU with optional clamp, forward and backward, always from pre-activations in the operand dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from moeloom.numerics import accumulate_dtype, sigmoid


class SwiGLU:
    """``hidden = silu(gate) * up`` of some rows, with ``gate <= limit`` and ``-limit <= up <= limit`` enforced first.

    Args:
        gate_up: [m, 2I] operand dtype, gate columns then up columns.
        limit: clamp, or None.
    """

    def __init__(self, gate_up: Tensor, limit: float | None) -> None:
        half = gate_up.shape[-1] // 2
        wide = accumulate_dtype(gate_up.dtype)
        self._raw, self._limit = gate_up, limit
        self._gate = gate_up[..., :half].to(wide).contiguous()
        self._up = gate_up[..., half:].to(wide).contiguous()
        if limit is not None:
            self._gate, self._up = self._gate.clamp(max=limit), self._up.clamp(-limit, limit)
        self._sigmoid = sigmoid(self._gate)

    def hidden(self) -> Tensor:
        """Return [m, I], rounded once to the operand dtype."""
        return (self._sigmoid * self._gate).mul_(self._up).to(self._raw.dtype)

    def backward(self, d_hidden: Tensor) -> Tensor:
        """Return the gradient with respect to ``gate_up``, [m, 2I] in the operand dtype.

        With s = sigmoid(gate): ``d_up = d_hidden * (s * gate)`` and
        ``d_gate = d_hidden * up * s * (1 + gate * (1 - s))``. Where the clamp holds a value fast, its gradient is 0.

        Args:
            d_hidden: [m, I] accumulation dtype.
        """
        half = self._gate.shape[-1]
        d_gate_up = torch.empty_like(self._raw)
        d_up = (self._sigmoid * self._gate).mul_(d_hidden)
        d_gate = (1 - self._sigmoid).mul_(self._gate).add_(1).mul_(self._sigmoid).mul_(self._up).mul_(d_hidden)
        if self._limit is not None:
            d_gate.masked_fill_(self._raw[..., :half] > self._limit, 0)
            d_up.masked_fill_(self._raw[..., half:].abs() > self._limit, 0)
        d_gate_up[..., :half] = d_gate
        d_gate_up[..., half:] = d_up
        return d_gate_up
