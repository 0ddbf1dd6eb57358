"""The host's plan of one call, read off the schedule: minibatches, their row blocks, and what moves between ranks.

The schedule itself never needs the host. The reference runs on the host, so it reads the schedule once and then walks
this plan; kernels walk the schedule on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeloom.config import ROW_BLOCK, ceil_div, round_up
from moeloom.numerics import ROW_STEP
from moeloom.schedule import Schedule


@dataclass(frozen=True)
class RowBlock:
    """Live rows ``first_row .. first_row + rows - 1`` of local expert ``expert``; ``1 <= rows <= 128``.

    Its GEMMs work on ``height`` rows, ``rows`` rounded up to 16: a function of the expert's row count alone, and small
    for small experts. ``offset`` counts the heights of the blocks before it in the same minibatch.
    """

    expert: int
    first_row: int
    rows: int
    height: int
    offset: int


@dataclass(frozen=True)
class Transfer:
    """What moves between this rank and one peer in one minibatch, either way; both lists are in row order.

    Attributes:
        slots: int64, slots (token * K + k) of this rank whose rows the peer holds.
        rows: int64, rows of this rank whose tokens the peer holds.
    """

    slots: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Minibatch:
    """Row blocks processed together, and one :class:`Transfer` for each rank of the group.

    Attributes:
        blocks: in row order.
        transfers: in group order.
        first_height: heights of all blocks in the minibatches before this one.
        heights: heights of its own blocks, added up: the rows that elementwise work runs over.
        rows: int64 [heights], the row that each of them is; padding rows included.
    """

    blocks: tuple[RowBlock, ...]
    transfers: tuple[Transfer, ...]
    first_height: int
    heights: int
    rows: Tensor


def make_plan(schedule: Schedule, *, minibatch_rows: int, num_ranks: int) -> list[Minibatch]:
    """Cut the rows of all ranks into minibatches.

    Every rank gets the same number of minibatches, that of the rank with most rows, so that all of them take part in
    every transfer, also those without a row or without a token.
    """
    count = ceil_div(int(schedule.num_rows.max()), minibatch_rows)
    device = schedule.source_rank.device
    blocks = _blocks(schedule, minibatch_rows, count)
    row = torch.arange(schedule.source_rank.numel(), device=device)
    rows = _by_minibatch_and_rank(schedule.source_rank, row, row, minibatch_rows, count, num_ranks)
    slot = torch.arange(schedule.route_row.numel(), device=device)
    slots = _by_minibatch_and_rank(schedule.route_rank, schedule.route_row, slot, minibatch_rows, count, num_ranks)
    plan, first_height = [], 0
    for m, mine in enumerate(blocks):
        transfers = tuple(Transfer(slots[m * num_ranks + p], rows[m * num_ranks + p]) for p in range(num_ranks))
        heights = sum(block.height for block in mine)
        first = torch.tensor([b.first_row - b.offset for b in mine], dtype=torch.int64)
        height = torch.tensor([b.height for b in mine], dtype=torch.int64)
        places = torch.arange(heights) + first.repeat_interleave(height, output_size=heights)
        plan.append(Minibatch(tuple(mine), transfers, first_height, heights, places.to(device)))
        first_height += heights
    return plan


def _blocks(schedule: Schedule, minibatch_rows: int, count: int) -> list[list[RowBlock]]:
    """Read the row blocks of this rank off the schedule, by minibatch."""
    blocks: list[list[RowBlock]] = [[] for _ in range(count)]
    table = zip(schedule.block_expert.tolist(), schedule.block_rows.tolist(), strict=True)
    for index, (expert, rows) in enumerate(table):
        if rows:
            first = index * ROW_BLOCK
            before = blocks[first // minibatch_rows]
            offset = before[-1].offset + before[-1].height if before else 0
            before.append(RowBlock(expert, first, rows, round_up(rows, ROW_STEP), offset))
    return blocks


def _by_minibatch_and_rank(
    rank: Tensor, row: Tensor, value: Tensor, minibatch_rows: int, count: int, num_ranks: int
) -> list[Tensor]:
    """Group ``value`` where ``rank >= 0`` by (minibatch of ``row``, ``rank``), each group in row order."""
    live = (rank >= 0).nonzero().squeeze(1)
    rank, row, value = rank[live].to(torch.int64), row[live], value[live]
    by_row = torch.argsort(row, stable=True)
    group = ((row // minibatch_rows) * num_ranks + rank)[by_row]
    order = torch.argsort(group, stable=True)
    sizes = torch.zeros(count * num_ranks, dtype=torch.int64, device=group.device)
    sizes = sizes.scatter_add(0, group, torch.ones_like(group))
    return list(value[by_row[order]].split(sizes.tolist()))
