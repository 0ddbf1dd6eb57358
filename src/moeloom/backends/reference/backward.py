"""Backward of the reference: the same minibatches again, with ``d_out`` and ``x`` pulled, every gradient at once."""

from __future__ import annotations

import torch
from torch import Tensor

from moeloom.backends.call import Gradients, LayerCall, Saved, Wanted
from moeloom.backends.reference.activation import SwiGLU
from moeloom.backends.reference.experts import expert_weights, pre_activations
from moeloom.backends.reference.plan import Minibatch
from moeloom.backends.reference.shared import shared_backward
from moeloom.backends.reference.transfer import Ring, ordered_sum, pull, push
from moeloom.numerics import accumulate_dtype, fold_sum_, matmul


def backward(call: LayerCall, saved: Saved, d_out: Tensor, wanted: Wanted) -> Gradients:
    """Compute the gradients of one call.

    Rows below the saved ones are read back, the others are computed again by the same GEMMs on the same shapes, so the
    bits do not depend on which. Router weights only ever multiply: they may be zero or negative.

    Args:
        call: arguments of forward.
        saved: what forward returned.
        d_out: [T, H] gradient of the output, operand dtype, contiguous.
        wanted: which gradients to compute. Ranks must pull and push alike, so with several ranks d_x and d_w are
            always formed.

    Returns:
        The gradients.

    Determinism: d_x, d_w and routed weight gradients depend on the global batch and the weights alone; gradients of
    shared experts are this rank's own sums.
    """
    plan: list[Minibatch] = saved.plan
    state = _State(call, saved, len(plan), d_out, wanted)
    seconds, top_k = call.config.wait_seconds(entry=False), call.top_k
    for minibatch in plan:
        tokens = [(call.x, state.x_ring), (d_out, state.d_out_ring)]
        pull(call.group, minibatch, tokens, top_k=top_k, phase="backward pull", seconds=seconds)
        _minibatch_backward(state, minibatch)
        if state.wants_slots:
            results = [
                (state.d_x_ring.rows(minibatch), state.d_x_slots),
                (state.d_w_ring.rows(minibatch), state.d_w_slots),
            ]
            push(call.group, minibatch, results, phase="backward push", seconds=seconds)
    return _finish(state)


class _State:
    """Buffers of one backward call; everything uninitialised here is written before it is read."""

    def __init__(self, call: LayerCall, saved: Saved, minibatches: int, d_out: Tensor, wanted: Wanted) -> None:
        self.call, self.saved, self.d_out, self.wanted = call, saved, d_out, wanted
        x, wide = call.x, accumulate_dtype(call.x.dtype)
        hidden_size = x.shape[1]
        self.x_ring, self.d_out_ring, self.d_x_ring = (Ring(call.config, minibatches, hidden_size, x) for _ in range(3))
        self.d_w_ring = Ring(call.config, minibatches, 1, call.topk_weights)
        self.wants_slots = call.group.size > 1 or wanted.x or wanted.topk_weights
        slots = x.shape[0] * call.top_k if self.wants_slots else 0
        self.d_x_slots = x.new_empty(slots, hidden_size)
        self.d_w_slots = call.topk_weights.new_empty(slots, 1)
        self.gradients = Gradients()
        for name in ("gate_up_proj", "down_proj"):
            if getattr(wanted, name):
                weight = getattr(call, name)
                setattr(self.gradients, name, torch.zeros(weight.shape, dtype=wide, device=weight.device))


def _minibatch_backward(state: _State, minibatch: Minibatch) -> None:
    """All gradients that come from the rows of one minibatch."""
    call, saved, grads = state.call, state.saved, state.gradients
    x, weights = call.x, expert_weights(call, minibatch)
    gate_up = pre_activations(minibatch, weights, state.x_ring, saved.gate_up[minibatch.first_height :], keep=False)
    activation = SwiGLU(gate_up, call.swiglu_limit)
    hidden = activation.hidden()
    row_weight = saved.row_weight[minibatch.rows, None]

    x_blocks, d_out_blocks = state.x_ring.blocks(minibatch), state.d_out_ring.blocks(minibatch)
    d_hidden = torch.empty(hidden.shape, dtype=accumulate_dtype(x.dtype), device=x.device)
    for block, d_out, d_h in zip(minibatch.blocks, d_out_blocks, minibatch.split(d_hidden), strict=True):
        matmul(d_out, weights[block.expert].down, out=d_h)
    if state.wants_slots:
        state.d_w_ring.rows(minibatch)[:, 0] = fold_sum_(d_hidden * hidden)
    d_gate_up = minibatch.split(activation.backward(d_hidden.mul_(row_weight)))
    weighted = minibatch.split((hidden * row_weight).to(x.dtype))

    d_x_blocks = state.d_x_ring.blocks(minibatch)
    for i, block in enumerate(minibatch.blocks):
        if state.wants_slots:
            matmul(d_gate_up[i], weights[block.expert].gate_up, out=d_x_blocks[i])
        # Padding rows are zeros on both sides, so a whole block may enter the sums.
        if grads.gate_up_proj is not None:
            matmul(d_gate_up[i].t(), x_blocks[i], add_to=grads.gate_up_proj[block.expert])
        if grads.down_proj is not None:
            matmul(d_out_blocks[i].t(), weighted[i], add_to=grads.down_proj[block.expert])


def _finish(state: _State) -> Gradients:
    """Ordered sums of this rank's tokens: shared experts first, then the slots k = 0 .. K-1."""
    call, saved, wanted, grads = state.call, state.saved, state.wanted, state.gradients
    is_route = (saved.schedule.route_rank >= 0).view(-1, call.top_k)[: call.x.shape[0]]
    total = torch.zeros(call.x.shape, dtype=accumulate_dtype(call.x.dtype), device=call.x.device)
    if call.shared is not None and (wanted.x or wanted.shared):
        total = shared_backward(
            call.x,
            state.d_out,
            call.shared,
            saved.shared_gate_up,
            saved.shared_out,
            call.swiglu_limit,
            grads if wanted.shared else None,
        )
    if wanted.x:
        grads.x = ordered_sum(total, state.d_x_slots, None, is_route).to(call.x.dtype)
    if wanted.topk_weights:
        grads.topk_weights = torch.where(is_route, state.d_w_slots.view(is_route.shape), 0)
    return grads
