"""Weights of single experts as GEMM operands, and the two steps that forward and recomputation share."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from moeloom.backends.call import LayerCall
from moeloom.backends.reference.plan import Minibatch, RowBlock
from moeloom.numerics import accumulate_dtype, matmul

#: Bytes; a weight that starts elsewhere is copied, since BLAS may round another way at another alignment.
_ALIGNMENT = 64


def blocks_with_weights(call: LayerCall, minibatch: Minibatch) -> Iterator[tuple[RowBlock, Tensor, Tensor]]:
    """Yield (row block, gate_up [2I, H], down [H, I]) for the row blocks of one minibatch in row order."""
    last = None
    for block in minibatch.blocks:
        if block.expert != last:
            gate_up = _operand(call.gate_up_proj[block.expert])
            down = _operand(call.down_proj[block.expert])
            last = block.expert
        yield block, gate_up, down


def pre_activations(rows: Tensor, gate_up: Tensor) -> Tensor:
    """Return ``rows @ gate_up^T`` [m, 2I] rounded to the dtype of ``rows``: the one place where that happens."""
    return matmul(rows, gate_up.t()).to(rows.dtype)


def _operand(weight: Tensor) -> Tensor:
    """Return the weight of one expert ready for many GEMMs: widened once on a CPU, aligned."""
    if not weight.is_cuda:
        weight = weight.to(accumulate_dtype(weight.dtype))
        if weight.data_ptr() % _ALIGNMENT:
            weight = weight.clone()
    return weight
