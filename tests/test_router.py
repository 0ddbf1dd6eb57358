"""Routers: hand-worked numbers, ties, NaN, gradients, counters under recomputation, balancing."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils.checkpoint import checkpoint

from moeloom import ArgumentError, MoE, Router, RouterConfig, load_balance_loss
from moeloom.router import select_experts

CONFIGS = [
    RouterConfig(),
    RouterConfig(renormalize=False),
    RouterConfig("sigmoid", True, 2.5, True),
    RouterConfig("sigmoid", False),
]


def router_with_logits(logits: torch.Tensor, top_k: int, config: RouterConfig) -> tuple[Router, torch.Tensor]:
    """A router that gives these logits for the rows of an identity matrix."""
    tokens, experts = logits.shape
    router = Router(tokens, experts, top_k, config)
    with torch.no_grad():
        router.weight.copy_(logits.t())
    return router, torch.eye(tokens)


def test_softmax_by_hand():
    router, x = router_with_logits(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), 2, RouterConfig())
    got = router(x)
    total = math.e + 2 * math.e**3 + 1
    assert got.topk_ids.tolist() == [[1, 2]] and got.topk_ids.dtype == torch.int64
    assert torch.allclose(got.topk_weights, torch.tensor([[0.5, 0.5]]))
    assert torch.allclose(got.scores, torch.tensor([[math.e, math.e**3, math.e**3, 1]]) / total)
    router.config = RouterConfig(renormalize=False, scale=3.0)
    assert torch.allclose(router(x).topk_weights, torch.tensor([[3 * math.e**3 / total] * 2]))


def test_sigmoid_with_selection_bias_by_hand():
    """The bias moves the choice from expert 0 to expert 2, the weights stay those of the scores."""
    router, x = router_with_logits(torch.tensor([[2.0, 1.0, 0.0]]), 2, RouterConfig("sigmoid", True, 2.0, True))
    router.selection_bias.copy_(torch.tensor([-1.0, 0.0, 0.125]))
    got = router(x)
    one, half = 1 / (1 + math.exp(-1)), 0.5
    assert got.topk_ids.tolist() == [[1, 2]]
    assert torch.allclose(got.topk_weights, 2 * torch.tensor([[one, half]]) / (one + half))


@pytest.mark.parametrize("config", CONFIGS)
def test_ties_go_to_the_lower_index(config):
    for experts in (8, 512):
        router, x = router_with_logits(torch.zeros(3, experts), 5, config)
        assert router(x).topk_ids.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_nan_comes_last():
    scores = torch.tensor([[math.nan, 1.0, 2.0, -math.inf]])
    assert select_experts(scores, 4).tolist() == [[2, 1, 0, 3]]


@given(
    st.lists(st.sampled_from([0.0, 1.0, -1.0, math.inf, -math.inf, math.nan]), min_size=4, max_size=4),
    st.integers(1, 4),
)
@settings(max_examples=80, deadline=None)
def test_ids_are_distinct_and_in_range_for_any_scores(scores, top_k):
    """Report 18."""
    ids = select_experts(torch.tensor([scores]), top_k)[0].tolist()
    assert len(set(ids)) == top_k and all(0 <= i < 4 for i in ids)


@pytest.mark.parametrize("config", CONFIGS)
def test_nan_rows_give_ids_by_index_order(config):
    torch.manual_seed(0)
    layer = MoE(8, 4, 6, 3, router=config)
    x = torch.randn(4, 8)
    clean = layer(x)
    x[1] = float("nan")
    out, routing = layer(x, return_routing=True)
    assert routing.topk_ids[1].tolist() == [0, 1, 2]
    assert out[1].isnan().all(), "a NaN token must show"
    assert torch.isfinite(out[[0, 2, 3]]).all()
    assert torch.equal(out[0], clean[0])


@pytest.mark.parametrize("config", CONFIGS)
def test_gradients(config):
    g = torch.Generator().manual_seed(0)
    router = Router(6, 5, 2, config).double()
    x = torch.randn(7, 6, generator=g, dtype=torch.float64, requires_grad=True)

    def call(x, weight):
        routing = torch.func.functional_call(router, {"weight": weight}, (x,))
        return routing.topk_weights, routing.aux_loss

    assert torch.autograd.gradcheck(call, (x, router.weight.detach().clone().requires_grad_()))


@pytest.mark.parametrize("config", CONFIGS)
def test_a_token_is_routed_alike_in_any_batch(config):
    """Report 27: tokens routed again in other batches, or with another number of threads, take the same experts."""
    router = Router(96, 16, 4, config)
    x = torch.randn(301, 96)
    whole = router(x)
    for first, end in ((0, 1), (5, 11), (64, 192), (300, 301)):
        part = router(x[first:end])
        assert torch.equal(part.topk_ids, whole.topk_ids[first:end])
        assert torch.equal(part.topk_weights, whole.topk_weights[first:end])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_recomputation_counts_load_once_and_repeats_the_bits(config, use_reentrant):
    """Reports 27 and 30, with exact ties: all rows equal."""
    torch.manual_seed(0)
    layer = MoE(16, 8, 6, 2, router=config, shared_size=4)
    results = []
    for recompute in (False, True):
        layer.zero_grad()
        layer.router.take_load()
        x = torch.ones(40, 16, requires_grad=True)
        out = checkpoint(layer, x, use_reentrant=use_reentrant) if recompute else layer(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in layer.parameters())])
        assert layer.router.take_load().sum() == 80
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_load_counts_training_only():
    layer = MoE(8, 4, 4, 2)
    layer(torch.randn(10, 8))
    with torch.no_grad():
        layer(torch.randn(5, 8))
    layer.eval()
    layer(torch.randn(99, 8))
    assert layer.router.take_load().sum() == 30
    assert layer.router.take_load().sum() == 0


def test_load_balance_loss():
    balanced = torch.full((8, 4), 0.25)
    ids = (torch.arange(16) % 4).view(8, 2)
    assert torch.isclose(load_balance_loss(balanced, ids), torch.tensor(1.0))
    collapsed = torch.zeros(8, 4)
    collapsed[:, 1] = 1
    assert torch.isclose(load_balance_loss(collapsed, torch.ones(8, 1, dtype=torch.int64)), torch.tensor(4.0))
    assert load_balance_loss(torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int64)) == 0


def test_selection_bias_moves_towards_balance():
    torch.manual_seed(0)
    router = Router(16, 8, 2, RouterConfig("sigmoid", selection_bias=True))
    with torch.no_grad():
        router.weight[0] += 0.3  # Makes expert 0 too popular for positive inputs.
    x = torch.rand(512, 16)
    spread = []
    for _ in range(200):
        router(x)
        load = router.take_load()
        spread.append(int(load.max() - load.min()))
        router.update_selection_bias(load, 0.01)
    assert spread[-1] < spread[0] / 4
    assert "selection_bias" in router.state_dict()


def test_selection_bias_needs_the_option():
    with pytest.raises(ArgumentError, match="selection bias"):
        Router(4, 4, 1).update_selection_bias(torch.zeros(4), 0.1)


@pytest.mark.parametrize("top_k", [0, 5])
def test_top_k_out_of_range(top_k):
    with pytest.raises(ArgumentError, match="top_k must lie in 1..4"):
        Router(8, 4, top_k)


def test_no_tokens():
    layer = MoE(8, 4, 4, 2)
    out, routing = layer(torch.zeros(0, 8), return_routing=True)
    assert out.shape == (0, 8) and routing.topk_ids.shape == (0, 2) and routing.aux_loss == 0
