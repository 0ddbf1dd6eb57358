"""The layer as a differentiable function of tensors: :func:`moe`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moeloom import backends
from moeloom.config import MoEConfig
from moeloom.errors import ArgumentError, ArgumentTypeError, MoeloomError, complain
from moeloom.numerics import accumulate_dtype
from moeloom.ops import CallFacts, MoEFunction
from moeloom.runtime.ep_group import EPGroup, agree, resolve_group

#: Operand dtypes and the number that stands for each when ranks compare their calls.
DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float64: 3}


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
    ``config`` (same backend) and every size of the EP group with the same global batch. Gradients of shared experts
    are each rank's own sums.
    """
    config = MoEConfig() if config is None else config
    ep = resolve_group(group)
    try:
        dtype = _compute_dtype(x)
        _check(x, topk_ids, topk_weights, gate_up_proj, down_proj, dtype)
        _check_options(shared, x, dtype, swiglu_limit, config, topk_ids)
        if config.checked:
            _check_values(topk_ids, topk_weights, gate_up_proj.shape[0] * ep.size)
    except MoeloomError:
        _tell_peers_refused(ep, config)
        raise

    top_k, hidden = topk_ids.shape[-1], x.shape[-1]
    tokens = math.prod(x.shape[:-1])
    weights = (gate_up_proj, down_proj)
    weights += (None, None, None) if shared is None else (shared.gate_up_proj, shared.down_proj, shared.gate)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, topk_weights, *weights))
    entry = _entry_facts(
        ep,
        config,
        hidden=hidden,
        inner=down_proj.shape[2],
        experts=gate_up_proj.shape[0],
        top_k=top_k,
        dtype=DTYPES[dtype],
        minibatch=config.minibatch_rows,
        needs_grad=int(needs_grad),
        tokens=tokens,
    )
    stated = agree(ep, entry, phase="forward entry", seconds=config.wait_seconds(entry=True))
    facts = CallFacts(
        topk_ids=topk_ids.detach().reshape(tokens, top_k).to(torch.int64),
        compute_dtype=dtype,
        swiglu_limit=swiglu_limit,
        group=ep,
        config=config,
        backend=backends.choose(config.backend, x.device.type),
        entry=entry,
        tokens_by_rank=[other["_tokens"] for other in stated],
        number=ep.calls,
        parameters=weights,
    )
    out = MoEFunction.apply(facts, x.reshape(tokens, hidden), topk_weights.reshape(tokens, top_k), *weights)
    return out.reshape(x.shape)


def _compute_dtype(x: Tensor) -> torch.dtype:
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(complain("x", "be a torch.Tensor", type(x).__name__, "Pass a tensor [..., H]."))
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if dtype not in DTYPES or not x.is_floating_point():
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ArgumentTypeError(complain("x", f"be one of {names} (or be cast so by autocast)", dtype, "Convert it."))
    return dtype


def _check(x: Tensor, ids: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> None:
    """Check shapes, dtypes and devices of the routed part."""
    for name, tensor in (("topk_ids", ids), ("topk_weights", router), ("gate_up_proj", gate_up), ("down_proj", down)):
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(complain(name, "be a torch.Tensor", type(tensor).__name__, "Pass a tensor."))
        if tensor.device != x.device:
            raise ArgumentError(complain(name, f"be on the device of x ({x.device})", tensor.device, "Move it there."))
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ArgumentError(complain("x", "have shape [..., H] with H >= 1", list(x.shape), "Check the last axis."))
    if ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(complain("topk_ids", "be int32 or int64", ids.dtype, "Use topk_ids.to(torch.int64)."))
    if ids.dim() < 1 or ids.shape[:-1] != x.shape[:-1] or ids.shape[-1] < 1:
        want = [*x.shape[:-1], "K"]
        raise ArgumentError(complain("topk_ids", f"have shape {want} with K >= 1", list(ids.shape), "One row a token."))
    if router.shape != ids.shape:
        fix = "One weight a route."
        raise ArgumentError(
            complain("topk_weights", f"have the shape of topk_ids {list(ids.shape)}", list(router.shape), fix)
        )
    if router.dtype != accumulate_dtype(dtype):
        fix = "Router weights are applied in the accumulation dtype; use topk_weights.float()."
        raise ArgumentTypeError(complain("topk_weights", f"be {accumulate_dtype(dtype)}", router.dtype, fix))
    hidden = x.shape[-1]
    if (
        gate_up.dim() != 3
        or gate_up.shape[0] < 1
        or gate_up.shape[1] < 2
        or gate_up.shape[1] % 2
        or gate_up.shape[2] != hidden
    ):
        fix = "Gate rows come first, then as many up rows; transpose weights stored the other way."
        raise ArgumentError(complain("gate_up_proj", f"have shape [E, 2I, {hidden}]", list(gate_up.shape), fix))
    want = [gate_up.shape[0], hidden, gate_up.shape[1] // 2]
    if list(down.shape) != want:
        fix = "It must fit gate_up_proj; transpose weights stored the other way."
        raise ArgumentError(complain("down_proj", f"have shape {want}", list(down.shape), fix))
    _check_weight("gate_up_proj", gate_up, x, dtype)
    _check_weight("down_proj", down, x, dtype)


def _check_weight(name: str, weight: Tensor, x: Tensor, dtype: torch.dtype) -> None:
    """Check dtype and ``main_grad`` of one weight."""
    autocast = torch.is_autocast_enabled(x.device.type)
    if weight.dtype != dtype and not (autocast and weight.dtype in DTYPES):
        fix = "Convert it, or run under torch.autocast to keep fp32 weights with bf16 operands."
        raise ArgumentTypeError(complain(name, f"be {dtype} like the operands", weight.dtype, fix))
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None and not (
        isinstance(main_grad, Tensor)
        and main_grad.shape == weight.shape
        and main_grad.device == weight.device
        and main_grad.dtype in DTYPES
    ):
        got = (
            f"{list(main_grad.shape)} {main_grad.dtype}" if isinstance(main_grad, Tensor) else type(main_grad).__name__
        )
        rule = f"be an fp32, bf16 or fp64 tensor of shape {list(weight.shape)} on {weight.device}"
        raise ArgumentError(complain(f"{name}.main_grad", rule, got, "Allocate it like the weight."))


def _check_options(
    shared: SharedExperts | None, x: Tensor, dtype: torch.dtype, limit: float | None, config: MoEConfig, ids: Tensor
) -> None:
    """Check shared experts, clamp and the token limit."""
    if limit is not None and not (isinstance(limit, (int, float)) and 0 < limit < math.inf):
        raise ArgumentError(complain("swiglu_limit", "be a number > 0, or None", repr(limit), "Use None for no clamp."))
    tokens = math.prod(x.shape[:-1])
    if config.max_tokens_per_rank is not None and tokens > config.max_tokens_per_rank:
        fix = "Split the batch or raise config.max_tokens_per_rank."
        raise ArgumentError(complain("x", f"have at most {config.max_tokens_per_rank} tokens", tokens, fix))
    if shared is None:
        return
    hidden = x.shape[-1]
    gate_up, down, gate = shared.gate_up_proj, shared.down_proj, shared.gate
    if gate_up.dim() != 2 or gate_up.shape[0] < 2 or gate_up.shape[0] % 2 or gate_up.shape[1] != hidden:
        got = list(gate_up.shape)
        raise ArgumentError(
            complain("shared.gate_up_proj", f"have shape [2S, {hidden}]", got, "Gate rows, then up rows.")
        )
    want = [hidden, gate_up.shape[0] // 2]
    if list(down.shape) != want:
        raise ArgumentError(
            complain("shared.down_proj", f"have shape {want}", list(down.shape), "Fit it to gate_up_proj.")
        )
    if gate is not None and list(gate.shape) != [hidden]:
        raise ArgumentError(
            complain("shared.gate", f"have shape [{hidden}]", list(gate.shape), "One number a column of x.")
        )
    for name, weight in (("gate_up_proj", gate_up), ("down_proj", down), ("gate", gate)):
        if weight is not None:
            if weight.device != x.device:
                got = weight.device
                raise ArgumentError(
                    complain(f"shared.{name}", f"be on the device of x ({x.device})", got, "Move it there.")
                )
            _check_weight(f"shared.{name}", weight, x, dtype)


def _check_values(ids: Tensor, weights: Tensor, num_experts: int) -> None:
    """The checks of ``checked=True``, which read values."""
    bad = ((ids < -1) | (ids >= num_experts)).nonzero()
    if bad.numel():
        place = bad[0].tolist()
        got = f"{int(ids[tuple(place)])} at {place} ({bad.shape[0]} in all)"
        raise ArgumentError(complain("topk_ids", f"lie in [-1, {num_experts})", got, "-1 means no route."))
    bad = (~torch.isfinite(weights)).nonzero()
    if bad.numel():
        place = bad[0].tolist()
        got = f"{float(weights[tuple(place)])} at {place} ({bad.shape[0]} in all)"
        raise ArgumentError(complain("topk_weights", "be finite", got, "Look at the router's logits."))


def _entry_facts(
    ep: EPGroup,
    config: MoEConfig,
    *,
    hidden: int = 0,
    inner: int = 0,
    experts: int = 0,
    top_k: int = 0,
    dtype: int = 0,
    minibatch: int = 0,
    needs_grad: int = 0,
    tokens: int = 0,
    refused: int = 0,
) -> dict[str, int]:
    """State this call in integers and count it."""
    ep.calls += 1
    return {
        "phase (1 forward, 2 backward)": 1,
        "the call's number": ep.calls,
        "the hidden size": hidden,
        "the intermediate size": inner,
        "experts a rank": experts,
        "top_k": top_k,
        "the dtype of x (1 fp32, 2 bf16, 3 fp64)": dtype,
        "minibatch_rows": minibatch,
        "needing gradients": needs_grad,
        "_tokens": tokens,
        "_refused": refused,
    }


def _tell_peers_refused(ep: EPGroup, config: MoEConfig) -> None:
    """Let the other ranks of a refused call fail at once with a message, instead of waiting for their deadline."""
    if ep.size > 1:
        entry = _entry_facts(ep, config, refused=1)
        agree(ep, entry, phase="forward entry", seconds=config.wait_seconds(entry=True))
