"""Pull and push: the two ways in which rows move between ranks, one minibatch at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeloom.backends.reference.plan import Minibatch
from moeloom.config import MoEConfig
from moeloom.runtime.ep_group import EPGroup


class Ring:
    """A buffer of ``ring_rows`` rows that the routed rows pass through, minibatch by minibatch, lap after lap.

    Contents are unwritten memory until a row is pulled or computed; nothing reads a place before that.

    Args:
        config: sizes of ring and minibatch.
        minibatches: how many will pass; a ring larger than all of them is cut to that.
        width: columns.
        like: dtype and device.
    """

    def __init__(self, config: MoEConfig, minibatches: int, width: int, like: Tensor) -> None:
        self._stride = config.resolved_minibatch_rows
        self._turn = min(config.resolved_ring_rows // self._stride, max(minibatches, 1))
        self._data = torch.empty(self._turn * self._stride, width, dtype=like.dtype, device=like.device)

    def rows(self, minibatch: Minibatch) -> Tensor:
        """Return the place of a minibatch, [heights, width]: its row blocks one after the other."""
        first = minibatch.index % self._turn * self._stride
        return self._data[first : first + minibatch.heights]

    def blocks(self, minibatch: Minibatch) -> Sequence[Tensor]:
        """Return the place of each row block, [height, width]."""
        return minibatch.split(self.rows(minibatch))


def pull(
    group: EPGroup, minibatch: Minibatch, tokens: list[tuple[Tensor, Ring]], *, top_k: int, phase: str, seconds: float
) -> None:
    """Fill rings with the token rows of one minibatch, and the padding rows of its tail blocks with zeros.

    Args:
        group: EP group.
        minibatch: which rows.
        tokens: pairs of [T, W] token rows of this rank and the ring they go to, pulled together.
        top_k: routes of a token.
        phase: named in errors.
        seconds: deadline of the exchange.
    """
    outgoing = []
    for transfer in minibatch.transfers:
        wanted = transfer.slots // top_k
        outgoing.append([source.index_select(0, wanted) for source, _ in tokens])
    incoming = [
        [source.new_empty(transfer.places.numel(), source.shape[1]) for source, _ in tokens]
        for transfer in minibatch.transfers
    ]
    incoming[group.rank] = outgoing[group.rank]
    group.exchange(outgoing, incoming, phase=phase, seconds=seconds)
    for place, (_, ring) in enumerate(tokens):
        rows = ring.rows(minibatch)
        for transfer, received in zip(minibatch.transfers, incoming, strict=True):
            rows.index_copy_(0, transfer.places, received[place])
        rows.index_fill_(0, minibatch.padding, 0)


def push(
    group: EPGroup, minibatch: Minibatch, results: list[tuple[Tensor, Tensor]], *, phase: str, seconds: float
) -> None:
    """Write every row of one minibatch into its private slot on the rank that holds the token.

    Args:
        group: EP group.
        minibatch: which rows.
        results: pairs of the minibatch's rows [heights, W] and the [T * K, W] slots of this rank, pushed together.
        phase: named in errors.
        seconds: deadline of the exchange.
    """
    outgoing = [[rows.index_select(0, transfer.places) for rows, _ in results] for transfer in minibatch.transfers]
    incoming = [
        [slots.new_empty(transfer.slots.numel(), slots.shape[1]) for _, slots in results]
        for transfer in minibatch.transfers
    ]
    incoming[group.rank] = outgoing[group.rank]
    group.exchange(outgoing, incoming, phase=phase, seconds=seconds)
    for transfer, received in zip(minibatch.transfers, incoming, strict=True):
        for (_, slots), values in zip(results, received, strict=True):
            slots.index_copy_(0, transfer.slots, values)


def ordered_sum(start: Tensor, slots: Tensor, weights: Tensor | None, is_route: Tensor) -> Tensor:
    """Add the slots of every token to ``start`` in the order k = 0 .. K-1 in the accumulation dtype, in place.

    Slots that are no route are unwritten memory and are never read as numbers.

    Args:
        start: [T, H] accumulation dtype.
        slots: [T * K, H] operand dtype.
        weights: [T, K] accumulation dtype, or None for plain sums.
        is_route: bool [T, K].
    """
    top_k = is_route.shape[1]
    slots = slots.view(is_route.shape[0], top_k, slots.shape[1])
    every = bool(is_route.all())
    for k in range(top_k):
        term = slots[:, k].to(start.dtype)
        if weights is not None:
            term = term * weights[:, k, None]
        if every:
            start += term
        else:
            start = torch.where(is_route[:, k, None], start + term, start)
    return start
