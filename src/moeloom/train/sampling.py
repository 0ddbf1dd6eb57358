"""Generate text from a model."""

from __future__ import annotations

import torch

from moeloom.train.data import NEWLINE
from moeloom.train.model import MoELanguageModel


@torch.no_grad()
def generate(
    model: MoELanguageModel, prompt: bytes, length: int, *, context: int, temperature: float, seed: int
) -> bytes:
    """Continue ``prompt`` by ``length`` bytes.

    With an EP group every rank must call this alike; all of them return the same bytes, since a row's bits do not
    depend on the rank that computes it.

    Args:
        model: any device; put into evaluation mode for the call.
        prompt: at least the last ``context`` bytes are seen; empty means a newline.
        length: bytes to add.
        context: bytes that the model looks back on.
        temperature: 0 always takes the likeliest byte.
        seed: of the draws.

    Returns:
        The prompt and what follows.
    """
    training = model.training
    model.eval()
    device = model.head.weight.device
    draws = torch.Generator().manual_seed(seed)
    text = list(prompt) or [NEWLINE]
    shown = len(text) - len(prompt)
    for _ in range(length):
        logits, _ = model(torch.tensor([text[-context:]], dtype=torch.int64, device=device))
        last = logits[0, -1].double().cpu()
        if temperature == 0:
            text.append(int(last.argmax()))
        else:
            text.append(int(torch.multinomial((last / temperature).softmax(-1), 1, generator=draws)))
    model.train(training)
    return bytes(text[shown:])
