"""What a training loop does with gradients when the experts are spread over an EP group.

The rule. Each rank computes the mean loss over its own tokens; the loss of the step is the mean over ranks, so every
gradient is (1 / n) times a sum over ranks. Backward of the layer has already brought every token's share of an expert's
gradient to the rank that holds the expert: those need the factor 1 / n and nothing else. All other parameters are
replicated, and each rank has only its own tokens' share: those are summed over ranks, then take the factor.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moeloom.layer import MoE
from moeloom.runtime.ep_group import resolve_group


def expert_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of ``module`` that each rank holds alone, in module order."""
    return [p for layer in module.modules() if isinstance(layer, MoE) for p in layer.expert_parameters()]


def sync_gradients(module: nn.Module, group: dist.ProcessGroup | None, *, timeout_s: float = 30.0) -> None:
    """Turn the gradients of one backward into those of the mean loss over the ranks of ``group``, in place.

    Args:
        module: the model; experts are found through its :class:`~moeloom.MoE` layers.
        group: the EP group of those layers; None does nothing.
        timeout_s: deadline, in seconds.

    Raises:
        PeerLost: a rank did not take part.

    Determinism: sums over ranks are added in rank order, so replicated gradients have the same bits on all ranks.
    """
    ep = resolve_group(group)
    if ep.size == 1:
        return
    own = {id(p) for p in expert_parameters(module)}
    for p in expert_parameters(module):
        if p.grad is not None:
            p.grad /= ep.size
    shared = [p for p in module.parameters() if id(p) not in own and p.requires_grad]
    for p in shared:
        if p.grad is None:  # Every rank must send the same sizes.
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.reshape(-1).to(torch.float32) for p in shared])
    ep.sum_ordered(flat, phase="gradient sum", seconds=timeout_s)
    flat /= ep.size
    for p, piece in zip(shared, flat.split([p.numel() for p in shared]), strict=True):
        p.grad.copy_(piece.view(p.shape))


def clip_gradients(
    module: nn.Module, group: dist.ProcessGroup | None, max_norm: float, *, timeout_s: float = 30.0
) -> Tensor:
    """Scale all gradients so that their L2 norm over the model, all ranks' experts included, is at most ``max_norm``.

    Call it after :func:`sync_gradients`.

    Returns:
        The norm before clipping, a scalar; NaN or infinite gradients make it so, and nothing is scaled then.
    """
    ep = resolve_group(group)
    own = {id(p) for p in expert_parameters(module)}
    with_grad = [p for p in module.parameters() if p.grad is not None]
    experts = _square_sum([p.grad for p in with_grad if id(p) in own])
    ep.sum_ordered(experts, phase="gradient norm", seconds=timeout_s)
    norm = (experts[0] + _square_sum([p.grad for p in with_grad if id(p) not in own])[0]).sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    factor = torch.where(torch.isfinite(norm), factor, 1.0)
    for p in with_grad:
        p.grad *= factor.to(p.grad.device)
    return norm


def _square_sum(tensors: list[Tensor]) -> Tensor:
    """Return the sum of squares, fp64 [1], on the CPU."""
    if not tensors:
        return torch.zeros(1, dtype=torch.float64)
    norms = torch._foreach_norm(tensors)
    return torch.stack([n.to(torch.float64) for n in norms]).square().sum().reshape(1).cpu()
