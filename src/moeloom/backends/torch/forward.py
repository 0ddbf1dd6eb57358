"""Forward of the torch backend: sort, pull, two GEMMs around SwiGLU, push, ordered sum."""

from __future__ import annotations

from torch import Tensor

from moeloom.backends.call import LayerCall
from moeloom.backends.torch.activation import swiglu
from moeloom.backends.torch.exchange import RemoteRows, open_exchange
from moeloom.backends.torch.routing import ordered_sum, sort_routes
from moeloom.backends.torch.saved import SavedCall, keeps_all
from moeloom.backends.torch.shared import shared_forward


def forward(call: LayerCall, *, save: bool) -> tuple[Tensor, SavedCall | None]:
    """Run the layer.

    Args:
        call: arguments.
        save: keep what backward needs.

    Returns:
        out [T, H] in the operand dtype, and what backward needs or None.

    Raises:
        PeerLost: a rank of the EP group did not take part.

    Determinism: equal bits for equal inputs on one device; see :mod:`moeloom.backends.torch`.
    """
    routes = sort_routes(call.topk_ids, call.num_experts)
    exchange = open_exchange(call, routes, keeps=save and keeps_all(call))
    (x_rows,) = exchange.pull([routes.take(call.x)], phase="forward pull")
    gate_up = exchange.experts.products(x_rows, call.gate_up_proj.transpose(1, 2))
    # To gather rows again costs little, to move them again between ranks does not.
    kept_rows = x_rows if exchange.keeps and isinstance(exchange, RemoteRows) else None
    del x_rows
    hidden = swiglu(gate_up, call.swiglu_limit)
    kept_gate_up = gate_up if exchange.keeps else None
    del gate_up
    rows = exchange.experts.products(hidden, call.down_proj.transpose(1, 2))
    del hidden
    (rows,) = exchange.push([rows], phase="forward push")
    shared_out, shared_gate_up, ungated = shared_forward(call)
    out = ordered_sum(shared_out, rows, routes, call.topk_weights).to(call.x.dtype)
    if not save:
        return out, None
    return out, SavedCall(routes, kept_gate_up, kept_rows, shared_gate_up, ungated, exchange)
