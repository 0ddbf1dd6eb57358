"""SwiGLU with optional clamp, forward and backward, always from pre-activations in the operand dtype.

Arithmetic is in the accumulation dtype, each result is rounded once. Rows are worked on in pieces, so that widened
copies take a bounded amount of memory. Operations with operands of two dtypes are used on purpose: torch widens while
it loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moeloom.numerics import accumulate_dtype

#: Elements of a piece: on a GPU 128 MiB in fp32, few launches; on a CPU what stays in its caches.
_GPU_PIECE = 1 << 25
_CPU_PIECE = 1 << 17


class SwiGLUGradients(NamedTuple):
    """What backward of SwiGLU gives; None for what nobody asked for.

    Attributes:
        gate_up: [m, 2I] operand dtype, gradient of the pre-activations.
        hidden: [m, I] operand dtype, the activation times its factor, as operand of a weight gradient.
        factor: [m, 1] accumulation dtype, gradient of the factor.
    """

    gate_up: Tensor | None
    hidden: Tensor | None
    factor: Tensor | None


def swiglu(gate_up: Tensor, limit: float | None) -> Tensor:
    """Return ``silu(gate) * up``, with ``gate <= limit`` and ``-limit <= up <= limit`` enforced first.

    Args:
        gate_up: [m, 2I] operand dtype, gate columns then up columns.
        limit: clamp, or None.

    Returns:
        [m, I] operand dtype.
    """
    half = gate_up.shape[1] // 2
    hidden = gate_up.new_empty(gate_up.shape[0], half)
    for part in _pieces(gate_up.shape[0], half, gate_up.device):
        silu, up = _activated(gate_up[part, :half], gate_up[part, half:], limit)
        torch.mul(silu, up, out=hidden[part])
    return hidden


def swiglu_backward(
    gate_up: Tensor,
    d_hidden: Tensor,
    factor: Tensor | None,
    limit: float | None,
    *,
    wants_gate_up: bool = True,
    wants_hidden: bool = True,
    wants_factor: bool = False,
) -> SwiGLUGradients:
    """Backward of ``factor * swiglu(gate_up)``.

    ``d_up = factor * d_hidden * silu(gate)``, ``d_gate = factor * d_hidden * up * silu'(gate)`` and ``d_factor =
    sum(d_hidden * hidden)``. Where the clamp holds a value fast, its gradient is 0. There is no division, so the factor
    may be zero.

    Args:
        gate_up: [m, 2I] operand dtype.
        d_hidden: [m, I] operand or accumulation dtype, gradient of the product.
        factor: [m, 1] accumulation dtype, or None for 1.
        limit: clamp, or None.
        wants_gate_up, wants_hidden, wants_factor: what to compute.
    """
    rows, half = d_hidden.shape
    wide = accumulate_dtype(gate_up.dtype)
    d_gate_up = torch.empty_like(gate_up) if wants_gate_up else None
    scaled = gate_up.new_empty(rows, half) if wants_hidden else None
    d_factor = torch.empty(rows, 1, dtype=wide, device=gate_up.device) if wants_factor else None
    for part in _pieces(rows, half, gate_up.device):
        raw_gate, raw_up = gate_up[part, :half], gate_up[part, half:]
        silu, up = _activated(raw_gate, raw_up, limit)
        if wants_hidden or wants_factor:
            hidden = torch.mul(silu, up, out=raw_gate.new_empty(raw_gate.shape) if factor is not None else scaled[part])
        if d_factor is not None:
            torch.sum(d_hidden[part].to(wide) * hidden, 1, keepdim=True, out=d_factor[part])
        if scaled is not None and factor is not None:
            torch.mul(hidden, factor[part], out=scaled[part])
        if d_gate_up is not None:
            d_h = d_hidden[part].to(wide) if factor is None else d_hidden[part] * factor[part]
            d_gate, d_up = d_gate_up[part, :half], d_gate_up[part, half:]
            torch.mul(d_h, silu, out=d_up)
            d_silu = d_h * up
            # In place, because this kernel computes in the dtype of its result on a GPU: bf16 would round twice.
            d_gate.copy_(torch.ops.aten.silu_backward.grad_input(d_silu, raw_gate, grad_input=d_silu))
            if limit is not None:  # Also where the line above met an infinite gate.
                d_gate.masked_fill_(raw_gate > limit, 0)
                d_up.masked_fill_(raw_up.abs() > limit, 0)
    return SwiGLUGradients(d_gate_up, scaled, d_factor)


def _activated(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Return silu(gate) in the accumulation dtype, and up, both after the clamp."""
    wide = accumulate_dtype(gate.dtype)
    if limit is None:
        return F.silu(gate.to(wide), inplace=gate.dtype != wide), up
    return F.silu(gate.to(wide).clamp(max=limit), inplace=True), up.to(wide).clamp(-limit, limit)


def _pieces(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Cut rows of ``width`` elements into pieces."""
    step = max(1, (_CPU_PIECE if device.type == "cpu" else _GPU_PIECE) // width)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))
