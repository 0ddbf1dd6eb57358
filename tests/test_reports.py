"""Failures that users reported publicly against comparable software, as tests of the layer on a CPU.

Numbers follow ``docs/public-reports.md``, which says for each where it was reported and where it is tested. Each test says
what it would look like when broken.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from moeloom import MoE, MoEConfig, SharedExperts, moe
from tests.cases import ROUTED, Case, run
from tests.oracle import dense, relative_l2
from tests.ranks import run_ranks, values


def assert_right(inputs, **kwargs):
    got, want = run(inputs, **kwargs), dense(inputs)
    for name in want:
        assert torch.isfinite(got[name]).all(), name
        assert relative_l2(got[name], want[name]) < 1e-5, name
    return got


def test_report_1_second_backward_on_poisoned_memory(poison):
    """Broken: rows past the last one are uninitialised, and 0 * NaN poisons gradients."""
    inputs = Case(tokens=40, experts=8).make()
    inputs.ids %= 7
    first = assert_right(inputs)
    second = assert_right(inputs)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_report_2_no_undefined_row_reaches_token_0(poison):
    """Broken: padding rows carry index 0 and add garbage to token 0."""
    inputs = Case(tokens=5, experts=4).make()
    inputs.ids[0] = -1
    out = run(inputs)["out"]
    assert (out[0] == 0).all()


@pytest.mark.parametrize("routing", ["random", "none"])
def test_report_3_weight_gradient_of_experts_without_tokens(routing, poison):
    """Broken: allocated, never written: NaN."""
    inputs = Case(tokens=16, experts=256, routing=routing).make()
    got = assert_right(inputs)
    empty = torch.ones(256, dtype=torch.bool)
    empty[inputs.ids[inputs.ids >= 0]] = False
    assert empty.any()
    for name in ("d_gate_up_proj", "d_down_proj"):
        assert (got[name][empty] == 0).all()


@pytest.mark.parametrize("tokens", [1, 15, 17, 127, 129, 130])
def test_report_4_and_5_tokens_not_a_multiple_of_anything(tokens, poison):
    """Broken: inf in padded rows, a hang or NaN with an empty expert or with a single expert."""
    inputs = Case(tokens=tokens, experts=4).make()
    inputs.ids %= 3
    assert_right(inputs)
    assert_right(Case(tokens=tokens, experts=1, top_k=1).make())


def two_ranks_half_remote(rank: int, world: int) -> dict:
    case = Case(tokens=64, experts=4, shared=8)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    got = run(case.make().part(rank * 32, rank * 32 + 32, rank, 2), group=dist.group.WORLD)
    return {n: t.numpy() for n, t in got.items()}


def test_report_6_rows_of_remote_routes():
    """Broken: rows of routes that another rank owns are NaN; gradients lack the other ranks' share."""
    outcomes = values(run_ranks(two_ranks_half_remote, 2))
    want = run(Case(tokens=64, experts=4, shared=8).make())
    for name in ROUTED:
        assert torch.equal(torch.cat([torch.from_numpy(o[name]) for o in outcomes]), want[name])


def test_report_7_no_tokens():
    """Broken: a launch error for zero work."""
    got = run(Case(tokens=0, shared=4).make())
    assert got["out"].shape == (0, 24) and got["d_x"].shape == (0, 24)
    assert all((t == 0).all() for t in got.values())
    layer = MoE(8, 4, 4, 2)
    layer(torch.zeros(2, 0, 8)).sum().backward()
    assert (layer.gate_up_proj.grad == 0).all()


def unequal(rank: int, world: int, counts: list) -> list:
    shapes = []
    for share in counts:
        first = sum(share[:rank])
        part = Case(tokens=sum(share), experts=4).make().part(first, first + share[rank], rank, world)
        got = run(part, group=dist.group.WORLD, config=MoEConfig(minibatch_rows=128, ring_rows=256))
        shapes.append(tuple(got["d_x"].shape))
    return shapes


def test_report_11_and_12_unequal_and_zero_tokens():
    """Broken: ranks issue different numbers of collectives and hang."""
    counts = [[64, 17], [64, 0], [1000, 0], [0, 1], [0, 0], [1, 300]]
    outcomes = values(run_ranks(unequal, 2, counts))
    assert [[s[0] for s in o] for o in outcomes] == [[c[r] for c in counts] for r in range(2)]


def subgroup_sweep(rank: int, world: int) -> bool:
    group = dist.new_group([0, 2])
    if rank == 1:
        return True
    place = rank // 2
    for tokens in (1, 2, 3, 7, 31, 64, 127, 128, 129, 255, 257, 1000, 4096):
        case = Case(tokens=2 * tokens, hidden=8, inner=4, experts=4)
        got = run(case.make().part(place * tokens, (place + 1) * tokens, place, 2), group=group)
        assert torch.isfinite(got["out"]).all()
    return True


def test_report_13_a_subgroup_at_many_sizes():
    """Broken: time-outs when the group is not the world, or at one token count."""
    assert all(values(run_ranks(subgroup_sweep, 3)))


def test_report_15_and_16_minus_one_costs_nothing(poison):
    """Broken: -1 is used as an index, or sent to rank 0 as work."""
    inputs = Case(tokens=64, experts=4, top_k=4).make()
    inputs.ids[:, 2:] = -1
    got = assert_right(inputs)
    assert (got["d_topk_weights"][:, 2:] == 0).all()
    inputs.ids, inputs.topk_weights = inputs.ids[:, :2], inputs.topk_weights[:, :2]
    assert torch.equal(run(inputs)["out"], got["out"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_report_17_id_dtypes(dtype):
    """Broken: only one of the two integer dtypes works. Others are refused in test_arguments.py."""
    inputs = Case(tokens=20).make()
    want = run(inputs)
    inputs.ids = inputs.ids.to(dtype)
    got = run(inputs)
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_report_19_duplicate_ids_in_a_token():
    """Broken: code that assumes distinct ids loses or doubles a route."""
    inputs = Case(tokens=1, experts=4, top_k=3, dtype=torch.float64).make()
    inputs.ids = torch.tensor([[3, 3, 1]])
    assert_right(inputs)


def test_report_24_all_tokens_to_one_rank():
    """Broken: a buffer sized for the mean overflows. The smallest ring takes any imbalance."""
    outcomes = values(run_ranks(all_to_one, 2))
    want = run(Case(tokens=600, experts=4, routing="hot-expert").make())
    for name in ROUTED:
        assert torch.equal(torch.cat([torch.from_numpy(o[name]) for o in outcomes]), want[name])


def all_to_one(rank: int, world: int) -> dict:
    case = Case(tokens=600, experts=4, routing="hot-expert")
    config = MoEConfig(minibatch_rows=128, ring_rows=256, saved_rows=0)
    got = run(case.make().part(rank * 300, rank * 300 + 300, rank, 2), group=dist.group.WORLD, config=config)
    return {n: t.numpy() for n, t in got.items()}


def live_tensor_bytes() -> int:
    gc.collect()
    return sum(o.numel() * o.element_size() for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))


def test_report_26_nothing_is_kept_after_backward():
    """Broken: something keeps tensors of earlier steps alive, and memory grows with random skew."""
    torch.manual_seed(0)
    layer = MoE(32, 16, 8, 2, shared_size=8)
    sizes = []
    for step in range(50):
        layer.zero_grad()
        layer(torch.randn(1 + step * 37 % 200, 32)).sum().backward()
        if step in (9, 29, 49):
            sizes.append(live_tensor_bytes())
    assert max(sizes[1:]) <= sizes[0]


def test_report_28_and_29_forward_and_backward_repeat_their_bits():
    """Broken: sums in the order of arrival."""
    inputs = Case(tokens=200, experts=8, shared=16).make()
    want = run(inputs)
    for _ in range(20):
        got = run(inputs)
        assert all(torch.equal(got[n], want[n]) for n in want)


def test_report_33_both_ways_of_weight_gradients_are_not_zero():
    """Broken: one of .grad and main_grad silently receives nothing."""
    inputs = Case(tokens=50, shared=8).make()
    plain, fused = ([t.clone().requires_grad_() for t in (inputs.gate_up, inputs.down)] for _ in range(2))
    for weight in fused:
        weight.main_grad = torch.zeros_like(weight)
        weight.grad_added_to_main_grad = False
    for gate_up, down in (plain, fused):
        moe(inputs.x, inputs.ids, inputs.topk_weights, gate_up, down).backward(inputs.d_out)
    for a, b in zip(plain, fused, strict=True):
        assert a.grad.abs().sum() > 0 and torch.equal(a.grad, b.main_grad)
        assert b.grad is None and b.grad_added_to_main_grad


def test_report_36_every_gradient_is_compared_not_only_run():
    """Broken: dx wrong by half, and nothing looks at it. The comparison used here notices 1 % in any tensor."""
    inputs = Case(tokens=50, shared=8, shared_gate=True).make()
    got, want = assert_right(inputs), dense(inputs)
    for name in want:
        assert relative_l2(got[name] * 1.01, want[name]) > 1e-5


def test_report_46_layers_made_and_dropped_a_hundred_times():
    """Broken: a workspace for each use leaks."""
    before = live_tensor_bytes()
    for _ in range(100):
        MoE(16, 8, 4, 2)(torch.randn(10, 16)).sum().backward()
    assert live_tensor_bytes() <= before + 4096


@pytest.mark.parametrize("sign", [0.0, -1.0])
def test_router_weights_of_any_sign(sign):
    """Broken: backward divides by the router weight."""
    inputs = Case(tokens=30, dtype=torch.float64).make()
    inputs.topk_weights *= sign
    got = assert_right(inputs)
    assert got["d_topk_weights"].abs().sum() > 0


def test_shared_experts_alone():
    """No route at all: the shared experts still run, and get their gradients."""
    inputs = Case(tokens=30, routing="none", shared=8, dtype=torch.float64).make()
    got = assert_right(inputs)
    assert got["d_shared_down"].abs().sum() > 0
    assert SharedExperts(inputs.shared_gate_up, inputs.shared_down).gate is None
