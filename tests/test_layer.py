"""The layer against a dense loop in fp64: every output, every gradient, every kind of routing."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from moeloom import MoE, MoEConfig, RouterConfig, SharedExperts, moe
from tests.cases import LAYOUTS, ROUTINGS, Case, run
from tests.oracle import dense, relative_l2

TIGHT = 1e-12


def assert_close(got: dict, want: dict, limit: float) -> None:
    assert set(got) == set(want)
    for name in want:
        assert torch.isfinite(got[name]).all(), name
        assert relative_l2(got[name], want[name]) <= limit, name


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("config", LAYOUTS, ids=["one-lap", "laps-none-saved", "laps-some-saved", "two-blocks"])
def test_fp64_equals_dense_loop(routing, config, poison):
    inputs = Case(
        tokens=150, routing=routing, dtype=torch.float64, shared=12, shared_gate=True, limit=0.7, signed_weights=True
    ).make()
    assert_close(run(inputs, config=config), dense(inputs), TIGHT)


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=0, dtype=torch.float64),
        Case(tokens=1, top_k=1, experts=1, hidden=1, inner=1, dtype=torch.float64),
        Case(tokens=3, top_k=16, experts=4, dtype=torch.float64),
        Case(tokens=130, experts=1, top_k=1, dtype=torch.float64),
        Case(tokens=129, hidden=7, inner=5, dtype=torch.float64, shared=3),
        Case(tokens=16, experts=256, top_k=2, dtype=torch.float64),
        Case(tokens=40, hidden=1100, inner=520, dtype=torch.float64),
    ],
    ids=lambda case: f"T{case.tokens}-H{case.hidden}-I{case.inner}-E{case.experts}-K{case.top_k}",
)
def test_odd_sizes(case, poison):
    inputs = case.make()
    assert_close(run(inputs), dense(inputs), TIGHT)


@given(
    tokens=st.integers(0, 300),
    hidden=st.integers(1, 40),
    inner=st.integers(1, 24),
    experts=st.integers(1, 40),
    top_k=st.integers(1, 6),
    routing=st.sampled_from(ROUTINGS),
    shared=st.sampled_from([0, 0, 5]),
    layout=st.integers(0, len(LAYOUTS) - 1),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_and_routing(tokens, hidden, inner, experts, top_k, routing, shared, layout, seed, dtype):
    inputs = Case(
        tokens, hidden, inner, experts, top_k, routing, dtype, shared, seed=seed, signed_weights=seed % 2 == 1
    ).make()
    limit = {torch.float64: TIGHT, torch.float32: 3e-6, torch.bfloat16: 3e-2}[dtype]
    got, want = run(inputs, config=LAYOUTS[layout]), dense(inputs)
    # Sums that cancel keep the error of their terms; the same layer on absolute values tells how large those are.
    terms = dense(replace(inputs, d_out=inputs.d_out.abs(), **{n: t.abs() for n, t in inputs.floats().items()}))
    for name in want:
        error = (got[name].double() - want[name]).norm()
        assert error <= limit * (want[name].norm() + 0.05 * terms[name].norm()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_no_larger_than_torch_in_the_same_dtype(dtype):
    ours, theirs = [], []
    for seed in range(5):
        inputs = Case(tokens=256, hidden=128, inner=96, experts=8, dtype=dtype, seed=seed).make()
        want, same_dtype, got = dense(inputs), dense_in_steps(inputs, dtype), run(inputs)
        for name in want:
            ours.append(relative_l2(got[name], want[name]))
            theirs.append(relative_l2(same_dtype[name], want[name]))
    # In fp32 both errors are the rounding of sums, which BLAS orders by shape: 2 % apart on AVX2, less on AVX-512.
    slack = 1.02 if dtype == torch.bfloat16 else 1.05
    assert sum(ours) / len(ours) <= slack * sum(theirs) / len(theirs)
    assert max(ours) <= 1.5 * max(theirs)


def dense_in_steps(inputs, dtype):
    """The dense loop in ``dtype`` as a torch user would write it: router weights and their sum in fp32."""
    return dense(replace(inputs, topk_weights=inputs.topk_weights.to(dtype)), dtype)


def test_gradcheck():
    inputs = Case(
        tokens=5, hidden=4, inner=3, experts=3, routing="ragged", dtype=torch.float64, shared=2, shared_gate=True
    ).make()
    leaves = [t.clone().requires_grad_() for t in inputs.floats().values()]

    def call(x, w, gate_up, down, shared_gate_up, shared_down, shared_gate):
        shared = SharedExperts(shared_gate_up, shared_down, shared_gate)
        return moe(x, inputs.ids, w, gate_up, down, shared=shared)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=False)


def test_leading_shapes_strides_and_id_dtypes():
    inputs = Case(tokens=24).make()
    want = moe(inputs.x, inputs.ids, inputs.topk_weights, inputs.gate_up, inputs.down)
    for dtype in (torch.int32, torch.int64):
        x = inputs.x.view(2, 3, 4, -1)
        got = moe(
            x,
            inputs.ids.view(2, 3, 4, -1).to(dtype),
            inputs.topk_weights.view(2, 3, 4, -1),
            inputs.gate_up,
            inputs.down,
        )
        assert torch.equal(got.view_as(want), want)
    strided = inputs.x.t().contiguous().t()
    wide_ids = torch.stack([inputs.ids, inputs.ids], dim=-1)[..., 0]
    assert not strided.is_contiguous() and not wide_ids.is_contiguous()
    got = moe(
        strided,
        wide_ids,
        inputs.topk_weights.expand(24, 2),
        inputs.gate_up.transpose(1, 2).contiguous().transpose(1, 2),
        inputs.down,
    )
    assert torch.equal(got, want)
    one = moe(inputs.x[3], inputs.ids[3], inputs.topk_weights[3], inputs.gate_up, inputs.down)
    assert one.shape == inputs.x[3].shape


def test_expanded_output_gradient():
    inputs = Case(tokens=9).make()
    x = inputs.x.clone().requires_grad_()
    moe(x, inputs.ids, inputs.topk_weights, inputs.gate_up, inputs.down).sum().backward()
    inputs.d_out = torch.ones_like(inputs.x)
    assert relative_l2(x.grad, dense(inputs)["d_x"]) < 3e-6


def test_repeated_id_counts_twice():
    inputs = Case(tokens=6, top_k=3, routing="duplicates", dtype=torch.float64).make()
    out = moe(inputs.x, inputs.ids, inputs.topk_weights, inputs.gate_up, inputs.down)
    once = moe(inputs.x, inputs.ids[:, :1], inputs.topk_weights.sum(-1, keepdim=True), inputs.gate_up, inputs.down)
    assert relative_l2(out, once) < TIGHT


def test_routes_without_expert_cost_nothing_and_get_zero_gradient():
    inputs = Case(tokens=20, routing="ragged").make()
    inputs.topk_weights[inputs.ids < 0] = float("nan")
    got = run(inputs)
    assert all(torch.isfinite(t).all() for t in got.values())
    assert (got["d_topk_weights"][inputs.ids < 0] == 0).all()


@pytest.mark.parametrize("bad", [-2, 8, 2**31, 2**40, -(2**62)])
def test_ids_out_of_range_touch_nothing(bad, poison):
    inputs = Case(tokens=10).make()
    masked, odd = inputs.ids.clone(), inputs.ids.clone()
    masked[::2, 0], odd[::2, 0] = -1, bad
    inputs.ids = masked
    want = run(inputs)
    inputs.ids = odd
    got = run(inputs)
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_accumulates_with_one_rounding(dtype, main_dtype):
    inputs = Case(tokens=50, experts=5, routing="hot-rank", dtype=dtype, shared=8, shared_gate=True).make()
    # The exact sums that go into main_grad: fp32 weights under bf16 autocast get fp32 gradients of the same products.
    weights = [inputs.gate_up, inputs.down, inputs.shared_gate_up, inputs.shared_down, inputs.shared_gate]
    leaves = [w.clone().float().requires_grad_() for w in weights]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = moe(inputs.x, inputs.ids, inputs.topk_weights, *leaves[:2], shared=SharedExperts(*leaves[2:]))
    out.backward(inputs.d_out)
    exact = [leaf.grad for leaf in leaves]

    leaves = [w.clone().requires_grad_() for w in weights]
    before = [torch.randn_like(w, dtype=main_dtype) for w in weights]
    before[0][4] = float("nan")  # An expert without rows must not be touched, not even to add zero:
    before[0][3] = -0.0  # -0 + 0 would be +0.
    for leaf, start in zip(leaves, before, strict=True):
        leaf.main_grad = start.clone()
    for times in (1, 2):
        moe(inputs.x, inputs.ids, inputs.topk_weights, *leaves[:2], shared=SharedExperts(*leaves[2:])).backward(
            inputs.d_out
        )
        for leaf, start, gradient in zip(leaves, before, exact, strict=True):
            total = start
            for _ in range(times):
                total = (total.float() + gradient).to(main_dtype)
            assert leaf.grad is None and leaf.grad_added_to_main_grad is True
            assert torch.equal(leaf.main_grad.nan_to_num(7.0), total.nan_to_num(7.0))
            if leaf is leaves[0]:
                assert torch.signbit(leaf.main_grad[3]).all()
            assert not torch.equal(leaf.main_grad.nan_to_num(7.0), start.nan_to_num(7.0))


def test_grad_accumulates_over_calls():
    inputs = Case(tokens=30).make()
    gate_up = inputs.gate_up.clone().requires_grad_()
    for _ in range(2):
        moe(inputs.x, inputs.ids, inputs.topk_weights, gate_up, inputs.down).backward(inputs.d_out)
    once = run(inputs)["d_gate_up_proj"]
    assert torch.equal(gate_up.grad, once + once)


def test_autocast_keeps_fp32_weights_and_gradients():
    inputs = Case(tokens=30, dtype=torch.float32).make()
    x, gate_up, down = (t.clone().requires_grad_() for t in (inputs.x, inputs.gate_up, inputs.down))
    with torch.autocast("cpu", torch.bfloat16):
        out = moe(x, inputs.ids, inputs.topk_weights, gate_up, down)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert x.grad.dtype == gate_up.grad.dtype == down.grad.dtype == torch.float32
    low = moe(inputs.x.bfloat16(), inputs.ids, inputs.topk_weights, inputs.gate_up.bfloat16(), inputs.down.bfloat16())
    assert torch.equal(out, low)


def test_only_asked_gradients_are_computed():
    inputs = Case(tokens=30, shared=8).make()
    for name in ("x", "topk_weights", "gate_up", "down", "shared_gate_up", "shared_down"):
        leaf = inputs.floats()[name].clone().requires_grad_()
        given = inputs.floats() | {name: leaf}
        shared = SharedExperts(given["shared_gate_up"], given["shared_down"])
        moe(given["x"], inputs.ids, given["topk_weights"], given["gate_up"], given["down"], shared=shared).backward(
            inputs.d_out
        )
        key = {"x": "d_x", "topk_weights": "d_topk_weights", "gate_up": "d_gate_up_proj", "down": "d_down_proj"}.get(
            name, f"d_{name}"
        )
        assert torch.equal(leaf.grad, run(inputs)[key]), name


def test_nothing_is_saved_without_gradients():
    inputs = Case(tokens=30).make()
    with torch.no_grad():
        out = moe(inputs.x, inputs.ids, inputs.topk_weights, inputs.gate_up.requires_grad_(), inputs.down)
    assert not out.requires_grad


def test_weights_changed_before_backward_are_noticed():
    inputs = Case(tokens=30).make()
    gate_up = inputs.gate_up.clone().requires_grad_()
    out = moe(inputs.x, inputs.ids, inputs.topk_weights, gate_up, inputs.down)
    with torch.no_grad():
        gate_up += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_shared_experts_of_several_widths_are_one():
    inputs = Case(tokens=20, shared=6, dtype=torch.float64, routing="none").make()
    gate, up = inputs.shared_gate_up.chunk(2)
    first = moe(
        inputs.x,
        inputs.ids,
        inputs.topk_weights,
        inputs.gate_up,
        inputs.down,
        shared=SharedExperts(torch.cat([gate[:2], up[:2]]), inputs.shared_down[:, :2]),
    )
    second = moe(
        inputs.x,
        inputs.ids,
        inputs.topk_weights,
        inputs.gate_up,
        inputs.down,
        shared=SharedExperts(torch.cat([gate[2:], up[2:]]), inputs.shared_down[:, 2:]),
    )
    both = moe(
        inputs.x,
        inputs.ids,
        inputs.topk_weights,
        inputs.gate_up,
        inputs.down,
        shared=SharedExperts(inputs.shared_gate_up, inputs.shared_down),
    )
    assert relative_l2(first + second, both) < TIGHT


@pytest.mark.parametrize(
    "router", [RouterConfig(), RouterConfig("softmax", False), RouterConfig("sigmoid", True, 2.5, True)]
)
def test_module_trains_every_parameter(router):
    torch.manual_seed(1)
    layer = MoE(16, 12, 6, 2, router=router, shared_size=8, shared_gate=True, config=MoEConfig(minibatch_rows=128))
    out, routing = layer(torch.randn(3, 50, 16, requires_grad=True), return_routing=True)
    (out.square().sum() + routing.aux_loss).backward()
    assert out.shape == (3, 50, 16) and routing.topk_ids.shape == (3, 50, 2)
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_module_copies_and_saves(tmp_path):
    import copy

    layer = MoE(16, 12, 6, 2)
    other = copy.deepcopy(layer)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(5, 16)
    assert torch.equal(layer(x), other(x))
    assert "num_experts=6" in repr(layer)
