"""Validation loss in bits per byte."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import torch
from torch.nn import functional as F

from moeloom.runtime.ep_group import EPGroup
from moeloom.train.data import IGNORE_INDEX, validation_windows
from moeloom.train.model import MoELanguageModel

#: Windows of one evaluation call over all ranks; a multiple of every sensible number of ranks.
WINDOWS = 64


@torch.no_grad()
def bits_per_byte(
    model: MoELanguageModel,
    text: np.ndarray,
    *,
    seq: int,
    group: EPGroup,
    limit_bytes: int | None = None,
    autocast: contextlib.AbstractContextManager | None = None,
) -> float:
    """Return the mean of ``-log2 p(byte | up to seq bytes before)`` over the text; ranks share the windows.

    Args:
        model: any device; put into evaluation mode for the call.
        text: uint8 array.
        seq: bytes of a window.
        group: EP group; every rank calls this alike, and gets the same number.
        limit_bytes: look at about that much, evenly spread; None for all.
        autocast: context for the model's forward.
    """
    training = model.training
    model.eval()
    device = model.head.weight.device
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in validation_windows(text, seq, WINDOWS, limit_bytes):
        first, end = (WINDOWS * r // group.size for r in (group.rank, group.rank + 1))
        mine = targets[first:end].reshape(-1).to(device)
        with autocast or contextlib.nullcontext():
            logits, _ = model(inputs[first:end].to(device))
        nats = F.cross_entropy(logits.view(mine.numel(), -1), mine, ignore_index=IGNORE_INDEX, reduction="sum")
        total[0] += nats.double().cpu()
        total[1] += int((mine != IGNORE_INDEX).sum())
    group.sum_ordered(total, phase="validation sum", seconds=30.0)
    model.train(training)
    return float(total[0] / total[1]) / math.log(2)
