"""Expert parallelism over processes: equal bits at every size of the EP group, whatever each rank holds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moeloom import MoE, MoEConfig, sync_gradients
from tests.cases import LAYOUTS, ROUTED, Case, run
from tests.oracle import relative_l2
from tests.ranks import run_ranks, values

SIZES = (1, 2, 4, 8)


def shares(kind: str, tokens: int, ranks: int) -> list[int]:
    """How many tokens each rank has."""
    if kind == "equal":
        base = [tokens // ranks] * ranks
        base[-1] += tokens - sum(base)
    elif kind == "all-on-last":
        base = [0] * (ranks - 1) + [tokens]
    else:  # unequal, with empty ranks
        base = [0 if r % 3 == 1 else r + 1 for r in range(ranks)]
        base[0] += tokens - sum(base)
    return base


def on_ranks(rank: int, world: int, jobs: list) -> list:
    """Run each (case, config, ranks, shares) on the first ``ranks`` ranks; return numpy results of this rank."""
    groups = {n: dist.new_group(list(range(n))) for n in SIZES if n <= world}
    results = []
    for case, config, ranks, counts in jobs:
        if rank >= ranks:
            results.append(None)
            continue
        first = sum(counts[:rank])
        part = case.make().part(first, first + counts[rank], rank, ranks)
        got = run(part, group=groups[ranks], config=config)
        results.append({name: t.float().numpy() for name, t in got.items()})
    return results


def gather(outcomes: list, job: int, name: str) -> torch.Tensor:
    parts = [torch.from_numpy(v[job][name]) for v in outcomes if v[job] is not None]
    return torch.cat(parts)


def check(jobs: list, world: int) -> None:
    outcomes = values(run_ranks(on_ranks, world, jobs))
    for number, (case, _, ranks, counts) in enumerate(jobs):
        want = run(case.make())
        for name in ROUTED:
            got = gather(outcomes, number, name)
            assert torch.equal(got, want[name].float()), f"{name}, {ranks} ranks, {counts}, {case}"
        for name in set(want) - set(ROUTED):  # Replicated: every rank has its own tokens' share.
            total = sum(torch.from_numpy(v[number][name]).double() for v in outcomes if v[number] is not None)
            assert relative_l2(total, want[name]) < (1e-2 if case.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bits_over_ep_sizes_layouts_and_shares(dtype):
    jobs = []
    for routing in ("random", "zipf", "ragged"):
        case = Case(
            tokens=301,
            hidden=40,
            inner=24,
            experts=8,
            top_k=3,
            routing=routing,
            dtype=dtype,
            shared=16,
            shared_gate=True,
            limit=1.0,
        )
        for ranks in SIZES:
            for config, kind in zip(LAYOUTS, ("equal", "unequal", "all-on-last", "unequal"), strict=True):
                jobs.append((case, config, ranks, shares(kind, 301, ranks)))
    check(jobs, 8)


def test_bits_under_extreme_routing():
    jobs = []
    for routing in ("hot-expert", "hot-rank", "empty-ranks", "one-route", "none", "balanced", "duplicates"):
        case = Case(tokens=150, hidden=16, inner=8, experts=8, top_k=2, routing=routing, shared=4)
        for ranks in (2, 4):
            jobs.append((case, LAYOUTS[1], ranks, shares("unequal", 150, ranks)))
    check(jobs, 4)


def test_twelve_tokens_at_once_or_six_and_six():
    """Small GEMMs take other CPU kernels; 12 rows and 6 rows must still give equal bits, with one thread and two."""
    case = Case(tokens=12, hidden=64, inner=48, experts=4, top_k=2, shared=32, shared_gate=True)
    jobs = [(case, MoEConfig(), 2, [6, 6]), (case, MoEConfig(), 2, [11, 1]), (case, MoEConfig(), 2, [12, 0])]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            check(jobs, 2)
    finally:
        torch.set_num_threads(before)


def other_members(rank: int, world: int, case: Case) -> dict | None:
    """EP groups that are not the world and not its first ranks: {0, 2} and {1, 3} at the same time."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    place, group = rank // 2, groups[rank % 2]
    for _ in range(3):  # Calls of the two groups must not mix.
        part = case.make().part(place * 60, (place + 1) * 60, place, 2)
        got = run(part, group=group, config=LAYOUTS[1])
    return {n: t.numpy() for n, t in got.items()}


def test_groups_smaller_than_the_world_and_two_at_once():
    case = Case(tokens=120)
    outcomes = values(run_ranks(other_members, 4, case))
    want = run(case.make())
    for members in ((0, 2), (1, 3)):
        for name in ROUTED:
            assert torch.equal(torch.cat([torch.from_numpy(outcomes[m][name]) for m in members]), want[name])


def train_step(rank: int, world: int, groups: int) -> dict:
    """One backward of a module over all ranks; returns synchronised gradients by global name."""
    group = dist.group.WORLD if world > 1 else None
    torch.manual_seed(3)
    layer = MoE(24, 16, 8, 2, shared_size=8, group=group)
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(5))
    mine = x[rank * 64 // world : (rank + 1) * 64 // world]
    layer(mine).square().mean().backward()
    sync_gradients(layer, group)
    return {name: p.grad.numpy() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("world", [2, 4])
def test_module_gradients_equal_one_process(world):
    """Report 20, 21, 34: router, shared and expert gradients of the mean loss, at every EP size."""
    outcomes = values(run_ranks(train_step, world, 1))
    want = train_step(0, 1, 1)
    for name, gradient in want.items():
        if name in ("gate_up_proj", "down_proj"):
            got = torch.cat([torch.from_numpy(o[name]) for o in outcomes])
        else:
            got = torch.from_numpy(outcomes[0][name])
            assert all((o[name] == outcomes[0][name]).all() for o in outcomes), f"{name} differs between ranks"
        assert torch.allclose(got, torch.from_numpy(gradient), rtol=1e-4, atol=1e-7), name


def random_skew(rank: int, world: int, steps: int) -> int:
    """Report 10: many steps in which random ranks get no row or have no token."""
    g = torch.Generator().manual_seed(11)
    for _ in range(steps):
        counts = torch.randint(0, 3, (world,), generator=g) * torch.randint(0, 9, (world,), generator=g)
        target = int(torch.randint(0, 8, (), generator=g))
        case = Case(tokens=int(counts.sum()), hidden=8, inner=4, experts=8, top_k=1)
        inputs = case.make()
        inputs.ids.fill_(target)
        first = int(counts[:rank].sum())
        run(inputs.part(first, first + int(counts[rank]), rank, world), group=dist.group.WORLD)
    return steps


def test_no_deadlock_when_ranks_have_nothing():
    assert values(run_ranks(random_skew, 4, 40)) == [40] * 4


@pytest.mark.slow
def test_no_deadlock_in_a_thousand_steps():
    assert values(run_ranks(random_skew, 4, 1000, seconds=280)) == [1000] * 4


def ordered_sum(rank: int, world: int) -> tuple:
    from moeloom.runtime.ep_group import resolve_group

    parts = [torch.randn(1001, generator=torch.Generator().manual_seed(r)) * 10.0**r for r in range(world)]
    total = parts[rank].clone()
    resolve_group(dist.group.WORLD).sum_ordered(total, phase="test", seconds=20)
    want = parts[0].clone()
    for part in parts[1:]:
        want += part
    return torch.equal(total, want), total.numpy().tobytes()


def test_sums_over_ranks_are_added_in_rank_order():
    outcomes = values(run_ranks(ordered_sum, 4))
    assert all(right for right, _ in outcomes) and len({bits for _, bits in outcomes}) == 1
