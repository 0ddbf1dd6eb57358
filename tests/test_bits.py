"""Equal bits on one rank: over rings, minibatches, saved rows, threads, addresses, repeats, batch position."""

from __future__ import annotations

import pytest
import torch

from moeloom import MoEConfig, SharedExperts, moe
from tests.cases import LAYOUTS, ROUTINGS, Case, run

DTYPES = (torch.float32, torch.bfloat16)


def assert_equal(got: dict, want: dict, names=None) -> None:
    for name in names or want:
        assert torch.equal(got[name], want[name]), (
            f"{name}: first difference at {(got[name] != want[name]).nonzero()[:1].tolist()}"
        )


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_layouts(routing, dtype, poison):
    case = Case(
        tokens=310,
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
    want = run(case.make())
    for config in LAYOUTS[1:]:
        assert_equal(run(case.make(), config=config), want)


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=600, hidden=200, inner=136, experts=5, top_k=2, shared=72, shared_gate=True, limit=2.0),
        Case(tokens=300, hidden=1536, inner=1100, experts=3, top_k=2, shared=40),
        Case(tokens=500, hidden=33, inner=17, experts=7, top_k=2, dtype=torch.bfloat16, shared=9),
    ],
    ids=["medium", "long-K", "odd"],
)
def test_threads(case):
    results = []
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(case.make()))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_equal(other, results[0])


def test_repeats_and_addresses(threads):
    case = Case(tokens=130, hidden=48, inner=40, experts=6, top_k=2, shared=8)
    want, kept = run(case.make()), []
    for times in range(20):
        kept.append(torch.empty(1 + 37 * times))  # Moves what is allocated next to other addresses.
        assert_equal(run(case.make()), want)


def test_forward_twice_and_with_or_without_gradients():
    inputs = Case(tokens=70, shared=8).make()

    def out(**grad):
        gate_up = inputs.gate_up.clone().requires_grad_(bool(grad))
        shared = SharedExperts(inputs.shared_gate_up, inputs.shared_down)
        return moe(inputs.x, inputs.ids, inputs.topk_weights, gate_up, inputs.down, shared=shared).detach()

    assert torch.equal(out(), out()) and torch.equal(out(), out(grad=True))


def test_a_token_does_not_see_how_many_others_there_are(threads):
    """With experts' rows unchanged, the shared expert, the gate and the final sum act token by token."""
    case = Case(tokens=300, hidden=72, inner=40, shared=24, shared_gate=True, routing="none")
    whole = run(case.make())
    for first, end in ((0, 1), (7, 13), (100, 299), (299, 300)):
        part = run(case.make().part(first, end, 0, 1))
        assert torch.equal(part["out"], whole["out"][first:end])
        assert torch.equal(part["d_x"], whole["d_x"][first:end])


def test_strided_weights_give_the_same_bits():
    inputs = Case(tokens=64, hidden=30, inner=22, experts=3).make()
    want = run(inputs)
    padded = torch.full((3, 44, 31), float("nan"))
    padded[..., :30] = inputs.gate_up
    inputs.gate_up = padded[..., :30]
    assert_equal(run(inputs), want)


def test_default_saved_rows_do_not_show():
    case = Case(tokens=200, routing="hot-expert", experts=4)
    want = run(case.make(), config=MoEConfig(saved_rows=0))
    assert_equal(run(case.make(), config=MoEConfig(saved_rows=1024)), want)
    assert_equal(run(case.make(), config=MoEConfig()), want)


@pytest.mark.parametrize(
    "saved_rows,heights", [(0, 0), (128, 128), (256, 256), (384, 256 + 48), (1 << 20, 256 + 48 + 16)]
)
def test_saved_rows_bound_what_is_kept(saved_rows, heights, monkeypatch):
    """300 and 5 rows of two experts: row blocks of 128, 128, 44 and 5 live rows, at heights 128, 128, 48 and 16."""
    from moeloom import backends

    kept, original = [], backends.reference.forward

    def forward(call, *, save):
        out, saved = original(call, save=save)
        kept.append(saved.gate_up.shape[0])
        return out, saved

    monkeypatch.setattr(backends.reference, "forward", forward)
    inputs = Case(tokens=305, experts=2, top_k=1).make()
    inputs.ids[:300], inputs.ids[300:] = 0, 1
    run(inputs, config=MoEConfig(saved_rows=saved_rows))
    assert kept == [heights]


def test_a_bit_test_can_fail():
    """A layout that changes the order of the last sum is caught by the comparison used here."""
    inputs = Case(tokens=64, top_k=3, experts=8).make()
    want = run(inputs)
    inputs.ids, inputs.topk_weights = inputs.ids.flip(1), inputs.topk_weights.flip(1)
    with pytest.raises(AssertionError, match="out"):
        assert_equal(run(inputs), want, ["out"])
