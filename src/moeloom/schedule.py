"""The schedule: which route becomes which row, and where every row block lies. Pure torch, the specification.

No host synchronisation and no shape that depends on the routing: every tensor is sized for the worst case (all routes
of all ranks on one rank), so the same code runs under ``torch.compile``, in a CUDA graph, or on fake tensors.

Rows of an expert are ordered by global token index, that is by (source rank, token, k). Where a row lies therefore
depends on the global batch alone, not on how many ranks hold it.

Example: 2 experts on one rank, ``topk_ids = [[1, 0], [1, -1], [0, 1]]`` (3 tokens, top-2). Expert 0 has the routes
(0,1) and (2,0), that is slots 1 and 4; expert 1 has slots 0, 2 and 5. So rows 0, 1 hold slots 1, 4; rows 128, 129, 130
hold slots 0, 2, 5; every other row is padding (-1). Slot 3 is no route: ``route_row[3] == -1``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeloom.config import ROW_BLOCK, capacity_rows


@dataclass(frozen=True)
class Schedule:
    """Where the rows of one rank come from, and where the routes of this rank go. All on one device.

    ``C`` = ``capacity_rows(ranks * T * K, experts of this rank)`` rows, ``B`` = C / 128 row blocks, ``T`` tokens.

    Attributes:
        source_rank: int32 [C], group rank that holds the token of this row; -1 = padding.
        source_slot: int64 [C], token * K + k on that rank; -1 = padding.
        rows_per_expert: int64 [experts of this rank], live rows.
        block_expert: int32 [B], local expert of a row block; -1 past the last one.
        block_rows: int32 [B], live rows of a row block, 0..128.
        num_rows: int64 [ranks], rows of each rank up to the end of its last row block (padding included).
        route_rank: int32 [T * K], group rank that owns the expert of a route of this rank; -1 = no route.
        route_row: int64 [T * K], the row it becomes there; -1 = no route.
    """

    source_rank: Tensor
    source_slot: Tensor
    rows_per_expert: Tensor
    block_expert: Tensor
    block_rows: Tensor
    num_rows: Tensor
    route_rank: Tensor
    route_row: Tensor


def build_schedule(topk_ids: Tensor, *, num_experts: int, rank: int) -> Schedule:
    """Build the schedule of one rank from the routes of all ranks.

    Args:
        topk_ids: int64 [ranks, T, K], expert ids of every rank of the EP group in rank order; ranks with fewer than
            T tokens are filled with -1. Ids outside [0, num_experts) are no routes.
        num_experts: experts of the whole group, a multiple of ``ranks``.
        rank: this rank's place in the EP group.

    Returns:
        The schedule of ``rank``.

    Determinism: integers only; the result depends on the arguments alone.
    """
    num_ranks, num_tokens, top_k = topk_ids.shape
    num_local = num_experts // num_ranks
    slots = num_tokens * top_k
    routes = num_ranks * slots
    capacity = capacity_rows(routes, num_local)
    device = topk_ids.device

    # One extra expert, last in the sort, collects what is no route.
    expert = topk_ids.reshape(routes).to(torch.int64)
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    count = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    count = count.scatter_add(0, expert, torch.ones_like(expert))
    live, blocks = count[:num_experts], (count[:num_experts] + ROW_BLOCK - 1) // ROW_BLOCK
    # The first row of every expert, counted from the first row of its own rank.
    blocks_by_rank = blocks.view(num_ranks, num_local)
    first_block = (blocks_by_rank.cumsum(1) - blocks_by_rank).reshape(num_experts)

    # A stable sort keeps (source rank, token, k) order inside an expert.
    order = torch.argsort(expert, stable=True)
    sorted_expert = expert[order]
    first_sorted = count.cumsum(0) - count
    place = torch.arange(routes, device=device) - first_sorted[sorted_expert]
    is_route = sorted_expert < num_experts
    safe_expert = sorted_expert.clamp(max=num_experts - 1)
    row = first_block[safe_expert] * ROW_BLOCK + place
    owner = safe_expert // num_local

    # What is not ours is written to one spare row behind the table, which is cut off.
    target = torch.where(is_route & (owner == rank), row, capacity)
    source_rank = torch.full((capacity + 1,), -1, dtype=torch.int32, device=device)
    source_slot = torch.full((capacity + 1,), -1, dtype=torch.int64, device=device)
    source_rank = source_rank.scatter(0, target, (order // max(slots, 1)).to(torch.int32))[:capacity]
    source_slot = source_slot.scatter(0, target, order % max(slots, 1))[:capacity]

    # Back from sorted order to route order; this rank keeps its own part.
    minus = torch.full((routes,), -1, dtype=torch.int64, device=device)
    route_row = minus.scatter(0, order, torch.where(is_route, row, -1)).view(num_ranks, slots)[rank]
    route_rank = minus.scatter(0, order, torch.where(is_route, owner, -1)).view(num_ranks, slots)[rank]

    block_expert, block_rows = _row_blocks(live.view(num_ranks, num_local)[rank], capacity // ROW_BLOCK)
    return Schedule(
        source_rank=source_rank,
        source_slot=source_slot,
        rows_per_expert=live.view(num_ranks, num_local)[rank],
        block_expert=block_expert,
        block_rows=block_rows,
        num_rows=blocks_by_rank.sum(1) * ROW_BLOCK,
        route_rank=route_rank.to(torch.int32),
        route_row=route_row,
    )


def _row_blocks(rows_per_expert: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Return (local expert, live rows) of each of ``num_blocks`` row blocks, int32; -1 and 0 past the end."""
    blocks = (rows_per_expert + ROW_BLOCK - 1) // ROW_BLOCK
    end = blocks.cumsum(0)
    index = torch.arange(num_blocks, device=rows_per_expert.device)
    expert = torch.searchsorted(end, index, right=True)
    used = expert < rows_per_expert.shape[0]
    safe = expert.clamp(max=rows_per_expert.shape[0] - 1)
    inside = index - (end - blocks)[safe]
    rows = (rows_per_expert[safe] - inside * ROW_BLOCK).clamp(0, ROW_BLOCK)
    return torch.where(used, expert, -1).to(torch.int32), torch.where(used, rows, 0).to(torch.int32)
