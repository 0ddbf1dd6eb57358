"""What a backend is handed, and what it hands back. Operands are already checked and of one dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moeloom.config import MoEConfig
from moeloom.runtime.ep_group import EPGroup
from moeloom.schedule import Schedule


@dataclass(frozen=True)
class Request:
    """What decides whether a backend can run a call, before any work starts.

    Attributes:
        device: of all tensors. dtype: of the operands.
        hidden, inner, local_experts, top_k: H, I, experts of this rank, routes of a token.
        ranks: of the EP group.
        shared: whether there are shared experts.
    """

    device: torch.device
    dtype: torch.dtype
    hidden: int
    inner: int
    local_experts: int
    top_k: int
    ranks: int
    shared: bool


@dataclass(frozen=True)
class SharedWeights:
    """Shared experts as one of their total width ``S``.

    Attributes:
        gate_up: [2S, H], gate rows then up rows.
        down: [H, S].
        gate: [H] or None; the output is multiplied by ``sigmoid(x . gate)``.
    """

    gate_up: Tensor
    down: Tensor
    gate: Tensor | None


@dataclass(frozen=True)
class LayerCall:
    """One call of the layer on this rank.

    Attributes:
        x: [T, H] contiguous.
        topk_ids: int64 [T, K]; outside [0, num_experts) = no route.
        topk_weights: [T, K] in the accumulation dtype.
        gate_up_proj: [experts of this rank, 2I, H].
        down_proj: [experts of this rank, H, I].
        shared: shared experts, or None.
        swiglu_limit: clamp, or None.
        group: EP group.
        config: options.
        tokens_by_rank: T of every rank in group order.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    shared: SharedWeights | None
    swiglu_limit: float | None
    group: EPGroup
    config: MoEConfig
    tokens_by_rank: list[int]

    @property
    def num_local_experts(self) -> int:
        """Experts held by this rank."""
        return self.gate_up_proj.shape[0]

    @property
    def num_experts(self) -> int:
        """Experts of the whole EP group."""
        return self.num_local_experts * self.group.size

    @property
    def top_k(self) -> int:
        """Routes of a token."""
        return self.topk_ids.shape[1]


@dataclass(frozen=True)
class Saved:
    """What forward keeps for backward besides its arguments.

    Attributes:
        schedule: of this call.
        row_weight: [C] accumulation dtype, router weight of every row; unwritten for padding.
        gate_up: [saved heights, 2I] operand dtype, pre-activations of the row blocks below ``saved_rows``.
        shared_gate_up: [T, 2S] operand dtype, or None.
        shared_out: [T, H] accumulation dtype, shared output before the gate; None without a gate.
        plan: what the backend worked out on the host from the schedule, or None; no tensor of activations.
    """

    schedule: Schedule
    row_weight: Tensor
    gate_up: Tensor
    shared_gate_up: Tensor | None
    shared_out: Tensor | None
    plan: object = None

    @property
    def rows_per_expert(self) -> Tensor:
        """int64 [experts of this rank], live rows."""
        return self.schedule.rows_per_expert

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors as a flat list, the form in which autograd saves them."""
        rest = [self.row_weight, self.gate_up, self.shared_gate_up, self.shared_out]
        return [getattr(self.schedule, field.name) for field in fields(Schedule)] + rest

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor | None], plan: object) -> Saved:
        """Undo :meth:`tensors`."""
        count = len(fields(Schedule))
        return cls(Schedule(*tensors[:count]), *tensors[count:], plan=plan)


@dataclass(frozen=True)
class Wanted:
    """Which gradients the caller asked for."""

    x: bool = True
    topk_weights: bool = True
    gate_up_proj: bool = True
    down_proj: bool = True
    shared: bool = True


@dataclass
class Gradients:
    """Gradients of one call; None where nobody asked. Weight gradients are in the accumulation dtype; those of
    routed experts may be in the operand dtype, rounded once, where a backend's GEMM gives them so.

    Attributes:
        x: [T, H] operand dtype.
        topk_weights: [T, K] accumulation dtype; exactly 0 where there is no route.
        gate_up_proj, down_proj: like the weights; exactly 0 for experts without rows.
        shared_gate_up, shared_down, shared_gate: this rank's own sums.
    """

    x: Tensor | None = None
    topk_weights: Tensor | None = None
    gate_up_proj: Tensor | None = None
    down_proj: Tensor | None = None
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate: Tensor | None = None
