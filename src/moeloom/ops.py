"""Autograd around a backend: what is saved, which gradients are asked for, and where weight gradients go."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moeloom.backends.call import Gradients, LayerCall, SharedWeights, Wanted
from moeloom.config import MoEConfig
from moeloom.runtime.ep_group import EPGroup, agree


@dataclass(frozen=True)
class CallFacts:
    """The arguments of one call that are no differentiable tensors.

    Attributes:
        topk_ids: int64 [T, K].
        compute_dtype: dtype of the operands.
        swiglu_limit, group, config: as in :class:`~moeloom.backends.call.LayerCall`.
        backend: the backend module.
        entry: facts that all ranks must agree on, see :func:`~moeloom.runtime.ep_group.agree`.
        tokens_by_rank: as in :class:`~moeloom.backends.call.LayerCall`.
        parameters: the weights as the caller passed them, in the order of :class:`MoEFunction`; their ``main_grad``
            is looked up when backward runs.
    """

    topk_ids: Tensor
    compute_dtype: torch.dtype
    swiglu_limit: float | None
    group: EPGroup
    config: MoEConfig
    backend: ModuleType
    entry: dict[str, int]
    tokens_by_rank: list[int]
    parameters: tuple[Tensor | None, ...]


def forward_only(facts: CallFacts, x: Tensor, topk_weights: Tensor, weights: tuple[Tensor | None, ...]) -> Tensor:
    """Run the backend where nobody asks for gradients: nothing is saved, and autograd is not troubled.

    Args:
        facts: of the call.
        x: [T, H]. topk_weights: [T, K].
        weights: as the arguments of :class:`MoEFunction`.

    Returns:
        [T, H] in the operand dtype.
    """
    with torch.no_grad(), _no_autocast(x):
        return facts.backend.forward(_layer_call(facts, x, topk_weights, weights), save=False)[0]


def _no_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Switch autocast off; costs nothing where it is off."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


class MoEFunction(torch.autograd.Function):
    """``(x, topk_weights, gate_up_proj, down_proj, shared gate_up, down, gate) -> out`` with all gradients."""

    @staticmethod
    def forward(ctx, facts: CallFacts, x: Tensor, topk_weights: Tensor, *weights: Tensor | None) -> Tensor:
        """Run the backend and save for backward exactly what it needs."""
        save = any(ctx.needs_input_grad)
        with _no_autocast(x):
            out, saved = facts.backend.forward(_layer_call(facts, x, topk_weights, weights), save=save)
        if saved is not None:
            ctx.save_for_backward(x, topk_weights, *weights, *saved.tensors())
            ctx.facts, ctx.num_weights, ctx.plan, ctx.saved_type = facts, len(weights), saved.plan, type(saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backend's backward; weights that carry ``main_grad`` get their gradient added there instead."""
        x, topk_weights, *rest = ctx.saved_tensors
        weights, saved = rest[: ctx.num_weights], ctx.saved_type.from_tensors(rest[ctx.num_weights :], ctx.plan)
        facts: CallFacts = ctx.facts
        needs_x, needs_router, *needs = ctx.needs_input_grad[1:]
        wanted = Wanted(needs_x, needs_router, needs[0], needs[1], any(needs[2:]))
        agree(
            facts.group,
            {**facts.entry, "phase (1 forward, 2 backward)": 2},
            phase="backward entry",
            seconds=facts.config.wait_seconds(entry=True),
        )
        with _no_autocast(x):
            call = _layer_call(facts, x, topk_weights, weights)
            grads = facts.backend.backward(call, saved, d_out.to(facts.compute_dtype).contiguous(), wanted)
        d_weights = [
            _deliver(parameter, gradient, saved.rows_per_expert) if need else None
            for parameter, gradient, need in zip(facts.parameters, _weight_gradients(grads), needs, strict=True)
        ]
        d_x = grads.x.to(x.dtype) if needs_x else None
        return None, d_x, grads.topk_weights if needs_router else None, *d_weights


def _layer_call(facts: CallFacts, x: Tensor, topk_weights: Tensor, weights: tuple[Tensor | None, ...]) -> LayerCall:
    """Bring the operands to the compute dtype and into one object."""
    gate_up, down, shared_gate_up, shared_down, shared_gate = (
        None if w is None else w.to(facts.compute_dtype).contiguous() for w in weights
    )
    shared = None if shared_gate_up is None else SharedWeights(shared_gate_up, shared_down, shared_gate)
    return LayerCall(
        x=x.to(facts.compute_dtype).contiguous(),
        topk_ids=facts.topk_ids,
        topk_weights=topk_weights.contiguous(),
        gate_up_proj=gate_up,
        down_proj=down,
        shared=shared,
        swiglu_limit=facts.swiglu_limit,
        group=facts.group,
        config=facts.config,
        tokens_by_rank=facts.tokens_by_rank,
    )


def _weight_gradients(grads: Gradients) -> tuple[Tensor | None, ...]:
    return grads.gate_up_proj, grads.down_proj, grads.shared_gate_up, grads.shared_down, grads.shared_gate


def _deliver(parameter: Tensor, gradient: Tensor, rows_per_expert: Tensor) -> Tensor | None:
    """Return the gradient in the parameter's dtype, or add it to ``parameter.main_grad`` and return None.

    The sum with ``main_grad`` is formed in the wider of both dtypes, at least fp32, and rounded once. Experts without
    rows are left untouched there.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None:
        return gradient.to(parameter.dtype)
    if parameter.dim() == 3:
        # Adding -0 changes nothing, not even the sign of a zero. So the host need not know which experts have rows.
        gradient.masked_fill_((rows_per_expert == 0)[:, None, None], -0.0)
    main_grad.add_(gradient)
    parameter.grad_added_to_main_grad = True
    return None
