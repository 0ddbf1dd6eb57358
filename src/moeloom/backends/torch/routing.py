"""Routes of this rank's tokens sorted by expert, and the way back: slots and their ordered sum.

``R`` = T * K routes become ``R + 1`` sorted rows: those of expert 0 in the order (token, k), those of expert 1, ...,
then what is no route, and one spare row. No result ever lies in the spare row; where a token has no route it reads
zeros there, so that it needs no branch and never sees unwritten memory.

Example: 2 experts, ``topk_ids = [[1, 0], [1, -1]]``. The slots are 0..3, slot 3 is no route. Sorted by expert the rows
hold the slots 1, 0, 2, 3, and 4 for the spare row: ``order = [1, 0, 2, 3, 4]``, ``ends = [1, 3]`` and
``place = [[1, 2], [0, 4]]`` (one line for each k).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moeloom.numerics import accumulate_dtype


@dataclass(frozen=True)
class Routes:
    """Where the routes of this rank lie among its sorted rows.

    Attributes:
        order: int64 [R + 1], slot (token * K + k) of each sorted row; R for the spare row, which is the last.
        place: int64 [K, T], sorted row of each route; R, the spare row, where there is no route.
        ends: int32 [num_experts], row after the last one of each expert.
    """

    order: Tensor
    place: Tensor
    ends: Tensor

    def take(self, tokens: Tensor) -> Tensor:
        """Return the token of each sorted row, [R + 1, W], from [T, W]; rows past the last route hold any token."""
        top_k, num_tokens = self.place.shape
        if not num_tokens:
            return tokens.new_zeros(1, tokens.shape[1])
        return tokens.index_select(0, (self.order // top_k).clamp_(max=num_tokens - 1))

    def take_weights(self, topk_weights: Tensor) -> Tensor:
        """Return the router weight of each sorted row, [R + 1, 1], from [T, K]; past the last route any number."""
        return F.pad(topk_weights.reshape(-1), (0, 1)).index_select(0, self.order)[:, None]

    def slots(self, column: Tensor) -> Tensor:
        """Return [T, K] from a column of the sorted rows, [R + 1, 1], that holds 0 in the spare row."""
        return column.view(-1).index_select(0, self.place.view(-1)).view(self.place.shape).t().contiguous()


def sort_routes(topk_ids: Tensor, num_experts: int) -> Routes:
    """Sort the routes of one rank by expert, keeping the order (token, k) inside an expert.

    Shapes depend on sizes alone and nothing is read by the host.

    Args:
        topk_ids: int64 [T, K]; outside [0, num_experts) = no route.
        num_experts: experts of the EP group.
    """
    num_tokens, top_k = topk_ids.shape
    spare = num_tokens * top_k
    # -1 modulo (E + 1) is E: after the clamp every id that is no expert becomes the largest key, and sorts last.
    keys = F.pad(topk_ids.reshape(-1), (0, 1), value=-1).clamp_(-1, num_experts).remainder_(num_experts + 1)
    # Radix sorts take time by the bytes of a key.
    keys = keys.to(torch.int16 if num_experts < 2**15 else torch.int32)
    ordered, order = keys.sort(stable=True)
    experts = torch.arange(num_experts, dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(ordered, experts, right=True, out_int32=True)
    place = torch.where(keys < num_experts, _inverse(order), spare)[:spare]
    return Routes(order, place.view(num_tokens, top_k).t().contiguous(), ends)


def ordered_sum(start: Tensor | None, rows: Tensor, routes: Routes, topk_weights: Tensor | None = None) -> Tensor:
    """Add the results of every token's routes to ``start`` in the order k = 0 .. K-1, in the accumulation dtype.

    Args:
        start: [T, H] accumulation dtype, overwritten; None for zero.
        rows: [R + 1, H] operand dtype, results in sorted order; zeros in the spare row.
        routes: where they lie.
        topk_weights: [T, K] accumulation dtype, factors; None for plain sums.

    Returns:
        [T, H] accumulation dtype.
    """
    top_k, num_tokens = routes.place.shape
    if start is None:
        start = torch.zeros(num_tokens, rows.shape[1], dtype=accumulate_dtype(rows.dtype), device=rows.device)
    weights = None
    if topk_weights is not None:
        # The weight of no route may be anything, also NaN.
        weights = torch.where(routes.place < rows.shape[0] - 1, topk_weights.t(), 0)[..., None]
    for k in range(top_k):
        term = rows.index_select(0, routes.place[k])
        # Operands of two dtypes: the sum is formed in the wider one, and no widened copy of the rows is made.
        start.add_(term) if weights is None else start.addcmul_(term, weights[k])
    return start


def _inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    if order.is_cuda and torch.are_deterministic_algorithms_enabled():
        # In that mode scatter_ sorts as well, and makes the host read its index to check it.
        return order.argsort(stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
