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
    spared = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            spared.add(id(module.weight))
        elif isinstance(module, MoE):
            spared.add(id(module.router.weight))
    decay = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in spared]
    rest = [p for p in model.parameters() if p.dim() < 2 or id(p) in spared]
    groups = [
        {"params": decay, "weight_decay": options.weight_decay},
        {"params": rest, "weight_decay": 0.0},
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
