"""AdamW groups and the learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from moeloom.layer import MoE
from moeloom.train.options import Options

#: The learning rate ends at this share of its peak.
FINAL_SHARE = 0.02
BETAS = (0.9, 0.95)


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.AdamW:
    """Return AdamW; norms, biases, routers and embeddings do not decay."""
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    routers = {id(m.router.weight) for m in model.modules() if isinstance(m, MoE)}
    seen = {id(p) for p in embeddings}
    others = [p for p in model.parameters() if id(p) not in seen]
    groups = [
        {"params": [p for p in others if p.dim() >= 2 and id(p) not in routers], "weight_decay": options.weight_decay},
        {"params": [p for p in others if p.dim() < 2 or id(p) in routers], "weight_decay": 0.0},
        {"params": embeddings, "weight_decay": 0.0, "factor": options.embedding_lr},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=BETAS, fused=True)


def learning_rate(options: Options, step: int, progress: float) -> float:
    """Return the rate of a step: linear warm-up, then a cosine to 2 % of the peak.

    Args:
        options: peak and warm-up.
        step: 0 for the first one.
        progress: share of the training that is done, 0..1.
    """
    warm = min(1.0, (step + 1) / options.warmup) if options.warmup else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return options.lr * warm * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)
