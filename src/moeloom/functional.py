"""The layer as a differentiable function of tensors: :func:`moe`."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moeloom import backends
from moeloom.backends.call import Request
from moeloom.config import MoEConfig
from moeloom.errors import MoeloomError
from moeloom.ops import CallFacts, MoEFunction, forward_only
from moeloom.runtime.ep_group import EPGroup, agree, resolve_group
from moeloom.validation import DTYPES, check_options, check_routed, check_shared, check_values, compute_dtype


@dataclass(frozen=True)
class SharedExperts:
    """Shared experts, seen by every token, as one expert of their total width ``S``.

    Several shared experts of any widths are the same as one whose rows are theirs, one after the other: all gate rows,
    then all up rows.

    Attributes:
        gate_up_proj: [2S, H], gate rows then up rows.
        down_proj: [H, S].
        gate: [H]; the shared output of a token is multiplied by ``sigmoid(x . gate)``. None for no such factor.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    gate: Tensor | None = None


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    shared: SharedExperts | None = None,
    swiglu_limit: float | None = None,
    group: dist.ProcessGroup | None = None,
    config: MoEConfig | None = None,
) -> Tensor:
    """Run an MoE layer: ``out[t] = shared(x[t]) + sum_k w[t,k] * expert_{id[t,k]}(x[t])``.

    ``expert(x) = W_down( silu(W_gate x) * (W_up x) )``. ``E`` experts are held by this rank; an EP group of n ranks has
    n * E of them, rank r those with ids r * E .. r * E + E - 1. Every rank of the group must make the same calls in
    the same order, with any number of tokens, also none.

    Args:
        x: [..., H], fp32, bf16 or fp64, any stride, any number of tokens T.
        topk_ids: int32 or int64 [..., K]; -1 = no route, also every other id that is no expert. A repeated id counts
            as two routes.
        topk_weights: [..., K] fp32 (fp64 for fp64 ``x``); any sign.
        gate_up_proj: [E, 2I, H], gate rows then up rows. Dtype of ``x``, or any of the dtypes under autocast.
        down_proj: [E, H, I], likewise.
        shared: shared experts, or None.
        swiglu_limit: clamp ``gate <= limit`` and ``-limit <= up <= limit`` before the activation; None for none.
        group: EP group from ``torch.distributed``, or None for one process.
        config: options; none of them changes the bits of a result.

    Returns:
        [..., H] in the dtype of ``x`` (under autocast: in its dtype). Differentiable with respect to ``x``,
        ``topk_weights`` and every weight; a weight with a ``main_grad`` attribute (same shape; fp32, bf16, or fp64)
        gets its gradient added there, ``grad_added_to_main_grad = True``, and no ``.grad``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks its rule; nothing was started.
        PeerMismatch: ranks came with arguments that do not fit together.
        PeerLost: a rank died or did not come in time.

    Determinism: ``out``, d_x, d_topk_weights and routed weight gradients have equal bits for equal inputs, for every
    ``config`` (same backend) and, by the reference backend, every size of the EP group with the same global batch.
    Gradients of shared experts are each rank's own sums.
    """
    config = MoEConfig() if config is None else config
    ep = resolve_group(group)
    try:
        dtype = compute_dtype(x)
        check_routed(x, topk_ids, topk_weights, gate_up_proj, down_proj, dtype)
        if shared is not None:
            check_shared(shared.gate_up_proj, shared.down_proj, shared.gate, x, dtype)
        top_k, hidden, tokens = topk_ids.shape[-1], x.shape[-1], math.prod(x.shape[:-1])
        check_options(swiglu_limit, tokens, config)
        if config.checked:
            check_values(topk_ids, topk_weights, gate_up_proj.shape[0] * ep.size)
        asked = Request(
            device=x.device,
            dtype=dtype,
            hidden=hidden,
            inner=down_proj.shape[2],
            local_experts=gate_up_proj.shape[0],
            top_k=top_k,
            ranks=ep.size,
            shared=shared is not None,
        )
        backend = backends.choose(config.backend, x.device.type, asked)
    except MoeloomError:
        _tell_peers_refused(ep, config)
        raise

    weights = (gate_up_proj, down_proj)
    weights += (None, None, None) if shared is None else (shared.gate_up_proj, shared.down_proj, shared.gate)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, topk_weights, *weights))
    sizes = (hidden, down_proj.shape[2], gate_up_proj.shape[0], top_k, DTYPES[dtype], config.minibatch_rows or 0)
    sizes += (backends.number(backend),)
    entry = _entry_facts(ep, sizes, needs_grad=needs_grad, tokens=tokens)
    stated = agree(ep, entry, phase="forward entry", seconds=config.wait_seconds(entry=True))
    if x.dim() == 2:
        rows, ids, factors = x, topk_ids, topk_weights
    else:
        rows, ids, factors = (t.reshape(tokens, t.shape[-1]) for t in (x, topk_ids, topk_weights))
    facts = CallFacts(
        topk_ids=ids.to(torch.int64),
        compute_dtype=dtype,
        swiglu_limit=swiglu_limit,
        group=ep,
        config=config,
        backend=backend,
        entry=entry,
        tokens_by_rank=[other["_tokens"] for other in stated],
        parameters=weights,
    )
    if needs_grad:
        out = MoEFunction.apply(facts, rows, factors, *weights)
    else:
        out = forward_only(facts, rows, factors, weights)
    return out if x.dim() == 2 else out.reshape(x.shape)


#: What ranks compare of a call's sizes, in this order.
_SIZES = (
    "the hidden size",
    "the intermediate size",
    "experts a rank",
    "top_k",
    "the dtype of x (1 fp32, 2 bf16, 3 fp64)",
    "minibatch_rows",
    "the backend (1 reference, 2 torch, 3 hopper)",
)


def _entry_facts(
    ep: EPGroup, sizes: tuple[int, ...], *, needs_grad: bool, tokens: int, refused: bool = False
) -> dict[str, int]:
    """Count this call, and state it in integers."""
    ep.calls += 1
    return {
        "phase (1 forward, 2 backward)": 1,
        "the call's number": ep.calls,
        **dict(zip(_SIZES, sizes, strict=True)),
        "needing gradients": int(needs_grad),
        "_tokens": tokens,
        "_refused": int(refused),
    }


def _tell_peers_refused(ep: EPGroup, config: MoEConfig) -> None:
    """Let the other ranks of a refused call fail at once with a message, instead of waiting for their deadline."""
    if ep.size > 1:
        entry = _entry_facts(ep, (0,) * len(_SIZES), needs_grad=False, tokens=0, refused=True)
        with contextlib.suppress(MoeloomError):  # What this rank has to say matters more than who did not hear it.
            agree(ep, entry, phase="forward entry", seconds=config.wait_seconds(entry=True))
