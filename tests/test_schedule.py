"""The schedule against a plain loop, its promises about shapes, and the worked example of its module."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from moeloom.config import ROW_BLOCK, capacity_rows
from moeloom.schedule import build_schedule
from tests.cases import ROUTINGS, route


def plain_loop(ids, num_experts: int, rank: int) -> dict:
    """Rows of one rank by a loop that any reader can check."""
    ranks, tokens, top_k = ids.shape
    local = num_experts // ranks
    table, per_expert, row = {}, [], 0
    for expert in range(rank * local, (rank + 1) * local):
        first = row
        for source in range(ranks):
            for token in range(tokens):
                for k in range(top_k):
                    if int(ids[source, token, k]) == expert:
                        table[row] = (source, token * top_k + k)
                        row += 1
        per_expert.append(row - first)
        row = -(-row // ROW_BLOCK) * ROW_BLOCK
    return {"table": table, "rows_per_expert": per_expert, "num_rows": row}


@given(
    ranks=st.sampled_from([1, 2, 4]),
    tokens=st.integers(0, 90),
    top_k=st.integers(1, 4),
    local=st.integers(1, 5),
    routing=st.sampled_from(ROUTINGS),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_equals_a_plain_loop(ranks, tokens, top_k, local, routing, seed):
    g = torch.Generator().manual_seed(seed)
    experts = ranks * local
    ids = torch.stack([route(routing, tokens, experts, top_k, g) for _ in range(ranks)])
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.05, 10**6, ids)
    schedules = [build_schedule(ids, num_experts=experts, rank=r) for r in range(ranks)]
    wanted = [plain_loop(ids, experts, r) for r in range(ranks)]
    for got, want in zip(schedules, wanted, strict=True):
        live = (got.source_rank >= 0).nonzero().squeeze(1).tolist()
        assert {r: (int(got.source_rank[r]), int(got.source_slot[r])) for r in live} == want["table"]
        assert (got.source_slot[got.source_rank < 0] == -1).all()
        assert got.rows_per_expert.tolist() == want["rows_per_expert"]
        assert got.num_rows.tolist() == [w["num_rows"] for w in wanted]
        blocks = [
            (e, min(ROW_BLOCK, n - b)) for e, n in enumerate(want["rows_per_expert"]) for b in range(0, n, ROW_BLOCK)
        ]
        used = len(blocks)
        assert list(zip(got.block_expert.tolist(), got.block_rows.tolist(), strict=True))[:used] == blocks
        assert (got.block_expert[used:] == -1).all() and (got.block_rows[used:] == 0).all()
    for source, got in enumerate(schedules):  # Both directions use one record (report 39).
        for slot, (owner, row) in enumerate(zip(got.route_rank.tolist(), got.route_row.tolist(), strict=True)):
            if owner >= 0:
                assert wanted[owner]["table"][row] == (source, slot)
        assert sum(r >= 0 for r in got.route_rank.tolist()) == sum(
            s == source for w in wanted for s, _ in w["table"].values()
        )


def test_worked_example():
    got = build_schedule(torch.tensor([[[1, 0], [1, -1], [0, 1]]]), num_experts=2, rank=0)
    assert got.source_slot[:3].tolist() == [1, 4, -1]
    assert got.source_slot[128:132].tolist() == [0, 2, 5, -1]
    assert got.route_row.tolist() == [128, 0, 129, -1, 1, 130]
    assert got.num_rows.tolist() == [256]


@pytest.mark.parametrize("ranks,tokens,top_k,experts", [(1, 5, 2, 4), (4, 33, 3, 8), (2, 0, 2, 2), (8, 16, 8, 64)])
def test_no_host_sync_and_no_shape_from_values(ranks, tokens, top_k, experts):
    """On fake tensors every read of a value, and every shape that depends on one, raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        got = build_schedule(torch.empty(ranks, tokens, top_k, dtype=torch.int64), num_experts=experts, rank=ranks - 1)
    rows = capacity_rows(ranks * tokens * top_k, experts // ranks)
    assert got.source_rank.shape == (rows,) and got.block_rows.shape == (rows // ROW_BLOCK,)


def test_fake_tensors_do_notice_a_sync():
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        build_schedule(torch.empty(1, 4, 2, dtype=torch.int64), num_experts=2, rank=0).num_rows.max().item()


@given(routes=st.integers(0, 4000), experts=st.integers(1, 300), seed=st.integers(0, 50))
@settings(max_examples=100, deadline=None)
def test_capacity_holds_any_split(routes, experts, seed):
    g = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, routes + 1, (experts - 1,), generator=g).sort().values
    counts = torch.diff(torch.cat([torch.tensor([0]), cuts, torch.tensor([routes])]))
    assert int(((counts + ROW_BLOCK - 1) // ROW_BLOCK).sum()) * ROW_BLOCK <= capacity_rows(routes, experts)


def test_sizes_beyond_32_bits():
    """Reports 22 and 23: row and slot numbers are 64-bit, so nothing wraps at 2^31 elements."""
    assert capacity_rows(2**33, 512) == 2**33 + 512 * 128
    got = build_schedule(torch.zeros(1, 2, 2, dtype=torch.int64), num_experts=1, rank=0)
    assert got.source_slot.dtype == got.route_row.dtype == got.num_rows.dtype == torch.int64
