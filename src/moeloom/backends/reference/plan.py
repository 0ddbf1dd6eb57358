"""The host's plan of one call, read off the schedule: minibatches, their row blocks, and what moves between ranks.

The schedule itself never needs the host. The reference runs on the host, so it reads the schedule once and then walks
this plan; kernels walk the schedule on the device.

Padding must not cost: a tail block of 3 live rows takes 16 rows of work, not 128. Inside a minibatch the row blocks
therefore lie one after the other at their *heights*, live rows rounded up to 16; the height depends on the expert's
row count alone, so the GEMMs of a row have the same shape under every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeloom.config import ROW_BLOCK, ceil_div, round_up
from moeloom.numerics import ROW_STEP
from moeloom.schedule import Schedule


@dataclass(frozen=True)
class RowBlock:
    """Rows ``first_row .. first_row + rows - 1`` of local expert ``expert``; GEMMs work on ``height`` >= ``rows``."""

    expert: int
    first_row: int
    rows: int
    height: int


@dataclass(frozen=True)
class Transfer:
    """What moves between this rank and one peer in one minibatch, either way; both lists are in row order.

    Attributes:
        slots: int64, slots (token * K + k) of this rank whose rows the peer holds.
        places: int64, places in this rank's minibatch of the rows whose tokens the peer holds.
    """

    slots: Tensor
    places: Tensor


@dataclass(frozen=True)
class Minibatch:
    """Row blocks processed together, and one :class:`Transfer` for each rank of the group.

    Attributes:
        index: 0, 1, ...
        blocks: in row order.
        transfers: in group order.
        first_height: heights of all row blocks in the minibatches before this one, added up.
        heights: heights of its own row blocks, added up.
        rows: int64 [heights], the row at each place.
        padding: int64, the places that are padding.
    """

    index: int
    blocks: tuple[RowBlock, ...]
    transfers: tuple[Transfer, ...]
    first_height: int
    heights: int
    rows: Tensor
    padding: Tensor

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Cut [heights, ...] into one view for each row block."""
        return tensor.split([block.height for block in self.blocks])


def make_plan(schedule: Schedule, *, minibatch_rows: int, num_ranks: int) -> list[Minibatch]:
    """Cut the rows of all ranks into minibatches.

    Every rank gets the same number of minibatches, that of the rank with most rows, so that all of them take part in
    every transfer, also those without a row or without a token.
    """
    count = ceil_div(int(schedule.num_rows.max()), minibatch_rows)
    device = schedule.source_rank.device
    blocks = _row_blocks(schedule, minibatch_rows, count)
    heights = [sum(block.height for block in mine) for mine in blocks]
    rows, place_of_row = _places(blocks, heights, schedule.source_rank.numel(), device)
    row = torch.arange(schedule.source_rank.numel(), device=device)
    places = _by_minibatch_and_rank(schedule.source_rank, row, place_of_row, minibatch_rows, count, num_ranks)
    slot = torch.arange(schedule.route_row.numel(), device=device)
    slots = _by_minibatch_and_rank(schedule.route_rank, schedule.route_row, slot, minibatch_rows, count, num_ranks)
    plan, first_height = [], 0
    for m, mine in enumerate(blocks):
        pairs = range(m * num_ranks, (m + 1) * num_ranks)
        padding = (schedule.source_rank[rows[m]] < 0).nonzero().squeeze(1)
        transfers = tuple(Transfer(slots[i], places[i]) for i in pairs)
        plan.append(Minibatch(m, tuple(mine), transfers, first_height, heights[m], rows[m], padding))
        first_height += heights[m]
    return plan


def _row_blocks(schedule: Schedule, minibatch_rows: int, count: int) -> list[list[RowBlock]]:
    """Read the row blocks of this rank off the schedule, by minibatch."""
    blocks: list[list[RowBlock]] = [[] for _ in range(count)]
    table = zip(schedule.block_expert.tolist(), schedule.block_rows.tolist(), strict=True)
    for index, (expert, rows) in enumerate(table):
        if rows:
            first = index * ROW_BLOCK
            blocks[first // minibatch_rows].append(RowBlock(expert, first, rows, round_up(rows, ROW_STEP)))
    return blocks


def _places(
    blocks: list[list[RowBlock]], heights: list[int], num_rows: int, device: torch.device
) -> tuple[Sequence[Tensor], Tensor]:
    """Return (the row at each place, by minibatch) and (the place in its minibatch of each row, int64 [num_rows])."""
    every = [block for mine in blocks for block in mine]
    height = torch.tensor([block.height for block in every], dtype=torch.int64)
    first_row = torch.tensor([block.first_row for block in every], dtype=torch.int64)
    place = torch.arange(sum(heights))
    row = place + (first_row - (height.cumsum(0) - height)).repeat_interleave(height, output_size=sum(heights))
    size = torch.tensor(heights, dtype=torch.int64)
    place -= (size.cumsum(0) - size).repeat_interleave(size, output_size=sum(heights))
    place_of_row = torch.zeros(num_rows, dtype=torch.int64).scatter_(0, row, place)
    return row.to(device).split(heights), place_of_row.to(device)


def _by_minibatch_and_rank(
    rank: Tensor, row: Tensor, value: Tensor, minibatch_rows: int, count: int, num_ranks: int
) -> Sequence[Tensor]:
    """Group ``value`` where ``rank >= 0`` by (minibatch of ``row``, ``rank``), each group in row order."""
    live = (rank >= 0).nonzero().squeeze(1)
    rank, row, value = rank[live].to(torch.int64), row[live], value[live]
    group = (row // minibatch_rows) * num_ranks + rank
    # One key sorts by group, then by row.
    order = torch.argsort(group * (int(row.max()) + 1) + row) if live.numel() else live
    sizes = torch.zeros(count * num_ranks, dtype=torch.int64, device=group.device)
    sizes = sizes.scatter_add(0, group, torch.ones_like(group))
    return value[order].split(sizes.tolist())
