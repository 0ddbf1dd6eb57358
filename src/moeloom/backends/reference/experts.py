"""Weights of single experts as GEMM operands, and the step that forward and recomputation share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moeloom.backends.call import LayerCall
from moeloom.backends.reference.plan import Minibatch
from moeloom.backends.reference.transfer import Ring
from moeloom.numerics import accumulate_dtype, matmul

#: Bytes; a weight that starts elsewhere is copied, since BLAS may round another way at another alignment.
_ALIGNMENT = 64


class ExpertWeights(NamedTuple):
    """gate_up [2I, H] and down [H, I] of one expert."""

    gate_up: Tensor
    down: Tensor


def expert_weights(call: LayerCall, minibatch: Minibatch) -> dict[int, ExpertWeights]:
    """Return the weights of the experts that have rows in this minibatch, by local expert."""
    experts = dict.fromkeys(block.expert for block in minibatch.blocks)
    return {e: ExpertWeights(_operand(call.gate_up_proj[e]), _operand(call.down_proj[e])) for e in experts}


def pre_activations(
    minibatch: Minibatch, weights: dict[int, ExpertWeights], x_ring: Ring, saved: Tensor, *, keep: bool
) -> Tensor:
    """Return gate and up of one minibatch, [heights, 2I], rounded to the dtype of the ring: the one place for that.

    Args:
        minibatch: which row blocks.
        weights: of its experts.
        x_ring: holds the pulled token rows.
        saved: [any, 2I], saved pre-activations from this minibatch on; may hold fewer rows than the minibatch.
        keep: True in forward: compute all rows, and write those that have a place in ``saved`` there. False in
            backward: read them there, and compute the others.
    """
    wholly_saved = saved.shape[0] >= minibatch.heights
    gate_up = saved[: minibatch.heights] if wholly_saved else saved.new_empty(minibatch.heights, saved.shape[1])
    known = 0 if keep else min(saved.shape[0], minibatch.heights)
    if known and not wholly_saved:
        gate_up[:known] = saved[:known]
    parts = zip(minibatch.blocks, x_ring.blocks(minibatch), minibatch.split(gate_up), strict=True)
    done = 0
    for block, x, rows in parts:
        if done >= known:
            matmul(x, weights[block.expert].gate_up.t(), out=rows)
        done += block.height
    if keep and not wholly_saved:
        saved.copy_(gate_up[: saved.shape[0]])
    return gate_up


def _operand(weight: Tensor) -> Tensor:
    """Return the weight of one expert ready for many GEMMs: widened once on a CPU, aligned."""
    if not weight.is_cuda:
        weight = weight.to(accumulate_dtype(weight.dtype))
        if weight.data_ptr() % _ALIGNMENT:
            weight = weight.clone()
    return weight
