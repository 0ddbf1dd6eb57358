"""Forward of the reference: schedule, then laps of the ring, minibatch by minibatch, then the ordered sum."""

from __future__ import annotations

import torch
from torch import Tensor

from moeloom.backends.call import LayerCall, Saved
from moeloom.backends.reference.activation import SwiGLU
from moeloom.backends.reference.experts import expert_weights, pre_activations
from moeloom.backends.reference.plan import Minibatch, make_plan
from moeloom.backends.reference.shared import shared_forward
from moeloom.backends.reference.transfer import Ring, ordered_sum, pull, push
from moeloom.numerics import accumulate_dtype, matmul
from moeloom.schedule import Schedule, build_schedule


def forward(call: LayerCall, *, save: bool) -> tuple[Tensor, Saved | None]:
    """Run the layer.

    Args:
        call: arguments.
        save: keep what backward needs.

    Returns:
        out [T, H] in the operand dtype, and what backward needs or None.

    Determinism: the bits of ``out`` depend on the global batch and the weights alone.
    """
    schedule, row_weight = _schedule(call)
    plan = make_plan(schedule, minibatch_rows=call.config.resolved_minibatch_rows, num_ranks=call.group.size)
    x, top_k = call.x, call.top_k
    x_ring, out_ring = (Ring(call.config, len(plan), x.shape[1], x) for _ in range(2))
    saved_gate_up = x.new_empty(_saved_heights(call, plan) if save else 0, call.gate_up_proj.shape[1])
    slots = x.new_empty(x.shape[0] * top_k, x.shape[1])
    seconds = call.config.wait_seconds(entry=False)

    for minibatch in plan:
        pull(call.group, minibatch, [(x, x_ring)], top_k=top_k, phase="forward pull", seconds=seconds)
        weights = expert_weights(call, minibatch)
        gate_up = pre_activations(minibatch, weights, x_ring, saved_gate_up[minibatch.first_height :], keep=save)
        hidden = minibatch.split(SwiGLU(gate_up, call.swiglu_limit).hidden())
        for block, h, out in zip(minibatch.blocks, hidden, out_ring.blocks(minibatch), strict=True):
            matmul(h, weights[block.expert].down.t(), out=out)
        push(call.group, minibatch, [(out_ring.rows(minibatch), slots)], phase="forward push", seconds=seconds)

    wide = accumulate_dtype(x.dtype)
    shared_gate_up = shared_out = None
    if call.shared is None:
        total = torch.zeros(x.shape, dtype=wide, device=x.device)
    else:
        total, shared_gate_up, shared_out = shared_forward(x, call.shared, call.swiglu_limit)
    is_route = (schedule.route_rank >= 0).view(-1, top_k)[: x.shape[0]]
    out = ordered_sum(total, slots, call.topk_weights, is_route).to(x.dtype)
    return out, Saved(schedule, row_weight, saved_gate_up, shared_gate_up, shared_out, plan) if save else None


def _schedule(call: LayerCall) -> tuple[Schedule, Tensor]:
    """Publish routes and router weights to all ranks; build the schedule and the weight of every row."""
    group, top_k = call.group, call.top_k
    tokens = max(call.tokens_by_rank)
    ids = [torch.full((tokens, top_k), -1, dtype=torch.int64) for _ in range(group.size)]
    weights = [torch.zeros(tokens, top_k, dtype=call.topk_weights.dtype) for _ in range(group.size)]
    mine = [call.topk_ids.cpu(), call.topk_weights.cpu()]
    incoming = [[ids[p][:t], weights[p][:t]] for p, t in enumerate(call.tokens_by_rank)]
    group.exchange([mine] * group.size, incoming, phase="forward routes", seconds=call.config.wait_seconds(entry=False))
    for own, value in zip(incoming[group.rank], mine, strict=True):
        own.copy_(value)
    device = call.x.device
    schedule = build_schedule(torch.stack(ids).to(device), num_experts=call.num_experts, rank=group.rank)
    flat = torch.stack(weights).to(device).reshape(-1)
    index = schedule.source_rank.to(torch.int64) * (tokens * top_k) + schedule.source_slot
    if not flat.numel():
        return schedule, flat.new_zeros(index.shape)
    return schedule, torch.where(schedule.source_rank >= 0, flat[index.clamp(min=0)], 0)


def _saved_heights(call: LayerCall, plan: list[Minibatch]) -> int:
    """Rows of the saved pre-activations: the heights of all row blocks that lie below the saved rows."""
    routes = sum(call.tokens_by_rank) * call.top_k
    limit = call.config.resolved_saved_rows(routes, call.group.size, call.num_local_experts)
    return sum(block.height for minibatch in plan for block in minibatch.blocks if block.first_row < limit)
