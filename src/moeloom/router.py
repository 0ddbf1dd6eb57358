"""Routers: from token rows to expert ids and weights, with load counters and two ways of balancing.

Words: *scores* are what an expert gets for a token, in [0, 1]; the *selection bias* is added to scores only to choose
experts, never to weigh them; the *load* of an expert is the number of routes it received.

Example: softmax top-2 over logits ``[1, 3, 3, 0]``: the tie between experts 1 and 2 goes to the lower index, ids are
``[1, 2]``, scores are about 0.46 each; renormalised weights are ``[0.5, 0.5]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moeloom.errors import ArgumentError, complain
from moeloom.numerics import accumulate_dtype, rows_matmul, sigmoid
from moeloom.runtime.ep_group import resolve_group

SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class RouterConfig:
    """How a router scores and chooses.

    Attributes:
        scoring: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        renormalize: divide the chosen weights by their sum (+ 1e-20, as published sigmoid routers do).
        scale: factor on the weights after that.
        selection_bias: keep a bias that is added to scores for choosing only, see :meth:`Router.update_selection_bias`.

    Raises:
        ArgumentError: a value breaks its rule.
    """

    scoring: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    selection_bias: bool = False

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise ArgumentError(
                complain("scoring", f"be one of {', '.join(SCORINGS)}", repr(self.scoring), "Fix the name.")
            )
        if not 0 < self.scale < float("inf"):
            raise ArgumentError(complain("scale", "be a finite number > 0", repr(self.scale), "Use 1.0 for none."))


@dataclass(frozen=True)
class Routing:
    """What a router decided.

    Attributes:
        topk_ids: int64 [..., K], distinct ids of a token, best first, ties by lower index.
        topk_weights: fp32 [..., K], differentiable.
        scores: fp32 [..., E], differentiable.
        aux_loss: scalar, see :func:`load_balance_loss`; differentiable.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    scores: Tensor
    aux_loss: Tensor


class Router(nn.Module):
    """A linear router in fp32.

    Args:
        hidden_size: H.
        num_experts: E of the whole EP group.
        top_k: experts of a token, 1..E.
        config: scoring and choice.
        device: where the weight lives.

    Attributes:
        weight: fp32 [E, H].
        selection_bias: fp32 [E] buffer, or None.
        load: int64 [E] buffer, routes since :meth:`take_load`; counted in training mode, once for each token, also
            when activation checkpointing runs the forward twice.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, config: RouterConfig | None = None, *, device=None
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ArgumentError(complain("top_k", f"lie in 1..{num_experts} (num_experts)", top_k, "Choose fewer."))
        self.config = config or RouterConfig()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=torch.float32, device=device))
        bias = torch.zeros(num_experts, device=device) if self.config.selection_bias else None
        self.register_buffer("selection_bias", bias)
        self.register_buffer("load", torch.zeros(num_experts, dtype=torch.int64, device=device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, 1/H)."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Routing:
        """Route tokens.

        Args:
            x: [..., H], any floating dtype; logits are formed in fp32.

        Returns:
            The routing. Whatever the logits hold, NaN included, ids are distinct and lie in [0, E).

        Determinism: a token's ids and weights depend on that token and the weight alone.
        """
        with torch.autocast(x.device.type, enabled=False):
            wide = accumulate_dtype(x.dtype)
            flat = x.reshape(-1, x.shape[-1]).to(wide)
            logits = _RowsLinear.apply(flat, self.weight.to(wide))
            scores = logits.softmax(-1) if self.config.scoring == "softmax" else _Sigmoid.apply(logits)
            ids = select_experts(scores, self.top_k, self.selection_bias)
            weights = scores.gather(1, ids)
            if self.config.renormalize:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            if self.config.scale != 1.0:
                weights = weights * self.config.scale
            aux_loss = load_balance_loss(scores, ids)
        if self.training and not _in_backward():
            self.load += count_routes(ids, self.weight.shape[0])
        lead = x.shape[:-1]
        top, every = (*lead, self.top_k), (*lead, self.weight.shape[0])
        return Routing(ids.view(top), weights.view(top), scores.view(every), aux_loss)

    def take_load(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 30.0) -> Tensor:
        """Return the load since the last call, summed over ``group``, int64 [E], and start again from zero.

        Raises:
            PeerLost: a rank of the group did not take part within ``timeout_s`` seconds.
        """
        load = self.load.clone()
        self.load.zero_()
        resolve_group(group).sum_ordered(load, phase="load sum", seconds=timeout_s)
        return load

    @torch.no_grad()
    def update_selection_bias(self, load: Tensor, rate: float) -> None:
        """Move the selection bias of every expert by ``rate`` against its load: up if below the mean, down if above.

        The rule of auxiliary-loss-free balancing (arXiv 2408.15664): ``bias += rate * sign(mean(load) - load)``.

        Args:
            load: int64 [E], summed over all ranks, see :meth:`take_load`.
            rate: step, for example 1e-3.

        Raises:
            ArgumentError: this router has no selection bias.
        """
        if self.selection_bias is None:
            fix = "Build it with RouterConfig(selection_bias=True)."
            raise ArgumentError(complain("the router", "have a selection bias", "none", fix))
        load = load.to(self.selection_bias.dtype)
        self.selection_bias += rate * torch.sign(load.mean() - load)


def select_experts(scores: Tensor, top_k: int, bias: Tensor | None = None) -> Tensor:
    """Choose ``top_k`` distinct experts of every token by ``scores + bias``; ties go to the lower index, NaN last.

    Args:
        scores: [T, E].
        top_k: 1..E.
        bias: [E] or None.

    Returns:
        int64 [T, top_k], best first.
    """
    key = scores.detach()
    if bias is not None:
        key = key + bias
    key = torch.where(torch.isnan(key), -torch.inf, key)
    return torch.sort(key, dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()


def count_routes(ids: Tensor, num_experts: int) -> Tensor:
    """Count how often each of ``num_experts`` ids occurs, int64 [num_experts]; shapes do not depend on values."""
    flat = ids.reshape(-1)
    count = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    return count.scatter_add_(0, flat, torch.ones_like(flat))


def load_balance_loss(scores: Tensor, ids: Tensor) -> Tensor:
    """Return ``E * sum_e f_e * p_e``: 1 when balanced, E when one expert takes all (arXiv 2101.03961, eq. 4 to 6).

    ``f_e`` is the share of routes that went to expert e (no gradient), ``p_e`` the mean over tokens of its share of the
    scores. 0 without tokens.

    Args:
        scores: [T, E], >= 0.
        ids: int64 [T, K].
    """
    tokens, num_experts = scores.shape
    share = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    mean_share = share.sum(0) / max(tokens, 1)
    routes = count_routes(ids, num_experts).to(scores.dtype) / max(ids.numel(), 1)
    return num_experts * (routes * mean_share).sum()


def _in_backward() -> bool:
    """Tell whether autograd is running backward on this thread, as it is when a checkpointed forward is repeated."""
    return torch._C._current_graph_task_id() != -1


class _RowsLinear(torch.autograd.Function):
    """``x @ weight^T`` whose rows do not depend on how many there are."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return rows_matmul(x, weight.t())

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        d_x = rows_matmul(d_out.contiguous(), weight) if ctx.needs_input_grad[0] else None
        return d_x, d_out.t() @ x if ctx.needs_input_grad[1] else None


class _Sigmoid(torch.autograd.Function):
    """:func:`moeloom.numerics.sigmoid` with its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out = sigmoid(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return d_out * out * (1 - out)
