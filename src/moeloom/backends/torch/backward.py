"""Backward of the torch backend: every gradient of one call from grouped GEMMs over the same rows as in forward."""

from __future__ import annotations

from torch import Tensor

from moeloom.backends.call import Gradients, LayerCall, Wanted
from moeloom.backends.torch.activation import swiglu_backward
from moeloom.backends.torch.routing import ordered_sum
from moeloom.backends.torch.saved import SavedCall
from moeloom.backends.torch.shared import shared_backward


def backward(call: LayerCall, saved: SavedCall, d_out: Tensor, wanted: Wanted) -> Gradients:
    """Compute the gradients of one call.

    Router weights only ever multiply: they may be zero or negative.

    Args:
        call: arguments of forward.
        saved: what forward returned.
        d_out: [T, H] gradient of the output, operand dtype, contiguous.
        wanted: which gradients to compute. Ranks must pull and push alike, so with several ranks d_x and d_w are
            always formed.

    Returns:
        The gradients. Those of routed weights are in the accumulation dtype, but in the operand dtype, rounded once,
        where the grouped GEMM gives them. There the gradient of the activations is rounded to the operand dtype, too,
        before router weights meet it.

    Raises:
        PeerLost: a rank of the EP group did not take part.

    Determinism: equal bits for equal inputs on one device; gradients of shared experts are this rank's own sums.
    """
    grads = Gradients()
    d_x_slots, d_w_slots = _routed(call, saved, d_out, wanted, grads)
    d_x = None
    if call.shared is not None and (wanted.x or wanted.shared):
        kept = saved.shared_gate_up, saved.shared_out
        d_x = shared_backward(call, d_out, *kept, grads, weights=wanted.shared)
    if wanted.x:
        grads.x = ordered_sum(d_x, d_x_slots, saved.routes).to(call.x.dtype)
    if wanted.topk_weights:
        grads.topk_weights = saved.routes.slots(d_w_slots)
    return grads


def _routed(
    call: LayerCall, saved: SavedCall, d_out: Tensor, wanted: Wanted, grads: Gradients
) -> tuple[Tensor | None, Tensor | None]:
    """Fill the gradients of routed weights; return d_x [R + 1, H] and d_w [R + 1, 1] in sorted order, or None."""
    exchange, experts = saved.plan, saved.plan.experts
    several = call.group.size > 1
    wants_x, wants_w = several or wanted.x, several or wanted.topk_weights
    wants_gate_up = wants_x or wanted.gate_up_proj
    if not (wants_gate_up or wants_w or wanted.down_proj):
        return None, None
    pulled = [saved.routes.take(d_out), saved.routes.take_weights(call.topk_weights)]
    d_out_rows, weights = exchange.pull(pulled, phase="backward pull")
    del pulled
    gate_up, x_rows = saved.gate_up, None
    if gate_up is None:
        x_rows = _token_rows(call, saved)
        gate_up = experts.products(x_rows, call.gate_up_proj.transpose(1, 2))
    d_gate_up, hidden, d_weights = swiglu_backward(
        gate_up,
        experts.products(d_out_rows, call.down_proj, wide=True),
        weights,
        call.swiglu_limit,
        wants_gate_up=wants_gate_up,
        wants_hidden=wanted.down_proj,
        wants_factor=wants_w,
    )
    del gate_up
    if wanted.down_proj:
        grads.down_proj = experts.outer_sums(d_out_rows, hidden)
    del d_out_rows, hidden
    if x_rows is None and (wanted.gate_up_proj or exchange.someone_lacks):
        x_rows = _token_rows(call, saved)
    if wanted.gate_up_proj:
        grads.gate_up_proj = experts.outer_sums(d_gate_up, x_rows)
    del x_rows
    results = [d_weights] if wants_w else []
    if wants_x:
        results.append(experts.products(d_gate_up, call.gate_up_proj))
    pushed = exchange.push(results, phase="backward push") if results else []
    return pushed.pop() if wants_x else None, pushed.pop() if wants_w else None


def _token_rows(call: LayerCall, saved: SavedCall) -> Tensor:
    """Return the token rows in expert order, [M, H], moving them again where they were not kept."""
    found = saved.x_rows
    if call.group.size == 1:
        found = saved.routes.take(call.x)
    elif saved.plan.someone_lacks:
        pulled = saved.plan.pull_again(saved.routes.take(call.x), phase="backward pull")
        found = found if pulled is None else pulled
    return found
