"""Backward of the hopper backend, for the time being that of the torch backend.

Pre-activations are those of our forward kernel in either case, saved or made again by a second run of it, so that the
gradients have equal bits whatever ``saved_rows`` is. Those of shared experts are what forward has made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeloom.backends import torch as torch_backend
from moeloom.backends.call import Gradients, LayerCall, Wanted
from moeloom.backends.hopper.forward_pass import run
from moeloom.backends.hopper.saved import SavedCall
from moeloom.backends.torch.exchange import open_exchange
from moeloom.backends.torch.routing import Routes, sort_routes
from moeloom.backends.torch.saved import SavedCall as TorchSaved
from moeloom.config import ROW_BLOCK, capacity_rows


def run_backward(call: LayerCall, saved: SavedCall, d_out: Tensor, wanted: Wanted) -> Gradients:
    """Compute the gradients of one call.

    Args:
        call: arguments of forward.
        saved: what forward returned.
        d_out: [T, H] gradient of the output, operand dtype, contiguous.
        wanted: which gradients to compute.

    Raises:
        KernelTimeout: a wait of an earlier call lasted longer than its deadline.

    Determinism: equal bits for equal inputs.
    """
    gate_up = saved.gate_up
    if gate_up is None and call.x.shape[0]:
        _, _, gate_up = run(call, capacity_rows(call.topk_ids.numel(), call.num_local_experts))
    routes = sort_routes(call.topk_ids, call.num_experts)
    if gate_up is None:
        gate_up = call.x.new_zeros(1, call.gate_up_proj.shape[1])
    in_order = gate_up.index_select(0, rows_of(routes, saved.rows_per_expert, gate_up.shape[0]))
    exchange = open_exchange(call, routes, keeps=True)
    kept = TorchSaved(routes, in_order, None, saved.shared_gate_up, saved.shared_out, exchange)
    return torch_backend.backward(call, kept, d_out, wanted)


def rows_of(routes: Routes, rows_per_expert: Tensor, capacity: int) -> Tensor:
    """Return the row of the routed buffer of every sorted row, int64 [R + 1]; past the last route any row.

    Sorted rows lie next to each other; in the routed buffer every expert begins at a new row block.

    Args:
        routes: of this rank's tokens.
        rows_per_expert: int64 [E], live rows.
        capacity: rows of the buffer.
    """
    place = torch.arange(routes.order.shape[0], device=rows_per_expert.device)
    blocks = (rows_per_expert + (ROW_BLOCK - 1)) // ROW_BLOCK
    shift = (blocks.cumsum(0) - blocks) * ROW_BLOCK - (rows_per_expert.cumsum(0) - rows_per_expert)
    expert = torch.searchsorted(routes.ends, place.to(routes.ends.dtype), right=True)
    row = place + shift[expert.clamp(max=rows_per_expert.shape[0] - 1)]
    return row.clamp(0, capacity - 1)
