"""Pull and push: the two ways in which rows move between ranks, one minibatch at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from moeloom.backends.reference.plan import Minibatch, RowBlock
from moeloom.runtime.ep_group import EPGroup


class Ring:
    """A buffer of ``ring_rows`` rows that the routed rows pass through; row r lies at place ``r % ring_rows``.

    Contents are unwritten memory until a row is pulled or computed; nothing reads a place before that.
    """

    def __init__(self, ring_rows: int, width: int, like: Tensor) -> None:
        self.rows = ring_rows
        self.data = torch.empty(ring_rows, width, dtype=like.dtype, device=like.device)

    def places(self, rows: Tensor) -> Tensor:
        """Return the places of ``rows`` (int64)."""
        return rows % self.rows

    def block(self, block: RowBlock) -> Tensor:
        """Return the view [height, W] of one row block; a row block never wraps."""
        first = block.first_row % self.rows
        return self.data[first : first + block.height]


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
    outgoing = [
        [source.index_select(0, transfer.slots // top_k) for source, _ in tokens] for transfer in minibatch.transfers
    ]
    incoming = [
        [source.new_empty(transfer.rows.numel(), source.shape[1]) for source, _ in tokens]
        for transfer in minibatch.transfers
    ]
    incoming[group.rank] = outgoing[group.rank]
    group.exchange(outgoing, incoming, phase=phase, seconds=seconds)
    for transfer, received in zip(minibatch.transfers, incoming, strict=True):
        for (_, ring), values in zip(tokens, received, strict=True):
            ring.data.index_copy_(0, ring.places(transfer.rows), values)
    for block in minibatch.blocks:
        for _, ring in tokens:
            ring.block(block)[block.rows :] = 0


def push(
    group: EPGroup, minibatch: Minibatch, results: list[tuple[Ring, Tensor]], *, phase: str, seconds: float
) -> None:
    """Write every row of one minibatch into its private slot on the rank that holds the token.

    Args:
        group: EP group.
        minibatch: which rows.
        results: pairs of the ring that holds the rows and the [T * K, W] slots of this rank, pushed together.
        phase: named in errors.
        seconds: deadline of the exchange.
    """
    outgoing = [
        [ring.data.index_select(0, ring.places(transfer.rows)) for ring, _ in results]
        for transfer in minibatch.transfers
    ]
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
