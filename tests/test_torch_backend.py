"""The torch backend: against fp64 and the reference, with both kinds of GEMM, over ranks, without a read by the host."""

from __future__ import annotations

import ast
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from moeloom import MoEConfig, PeerLost, PeerMismatch, SharedExperts, backends, moe
from moeloom.backends import call as calls
from moeloom.backends.torch import activation, backward, exchange, forward, gemm
from moeloom.backends.torch.routing import ordered_sum, sort_routes
from moeloom.ops import _deliver
from moeloom.runtime.ep_group import EPGroup, resolve_group
from tests.cases import LAYOUTS, ROUTED, ROUTINGS, Case, Inputs, run
from tests.oracle import dense, relative_l2
from tests.ranks import run_ranks, values
from tests.test_structure import SOURCE

TORCH = MoEConfig(backend="torch")
RECOMPUTE = MoEConfig(backend="torch", saved_rows=0)
FULL = dict(shared=16, shared_gate=True, limit=0.7, signed_weights=True)
#: A clamp that few values meet: at its edge gradients jump, so that one rounding shows.
BF16 = Case(tokens=200, hidden=64, inner=48, experts=8, top_k=3, dtype=torch.bfloat16, **(FULL | dict(limit=3.0)))


def fits(x: torch.Tensor, num_experts: int, *widths: int) -> bool:
    """Stands in for the check of the device, so that the grouped GEMM runs on a CPU."""
    return x.dtype == torch.bfloat16 and all(width % 8 == 0 for width in widths)


@pytest.fixture
def grouped(monkeypatch):
    """Use torch's grouped GEMM, which on a CPU is slow but does the same."""
    monkeypatch.setattr(exchange, "grouped_mm_is_native", fits)


@pytest.fixture(params=["loop", "grouped"])
def way(request, monkeypatch):
    if request.param == "grouped":
        monkeypatch.setattr(exchange, "grouped_mm_is_native", fits)
    return request.param


def assert_close(got: dict, want: dict, limit: float) -> None:
    assert set(got) == set(want)
    for name in want:
        assert torch.isfinite(got[name]).all(), name
        assert relative_l2(got[name], want[name]) <= limit, name


def assert_equal(got: dict, want: dict) -> None:
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("config", [TORCH, RECOMPUTE], ids=["saved", "recomputed"])
def test_fp64_equals_dense_loop(routing, config, poison):
    inputs = Case(tokens=90, routing=routing, dtype=torch.float64, **FULL).make()
    assert_close(run(inputs, config=config), dense(inputs), 1e-12)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("config", [TORCH, RECOMPUTE], ids=["saved", "recomputed"])
def test_bf16_grouped_equals_dense_loop(routing, config, grouped, poison):
    inputs = replace(BF16, routing=routing).make()
    assert_close(run(inputs, config=config), dense(inputs), 3e-2)


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=0, shared=3),
        Case(tokens=1, top_k=1, experts=1, hidden=1, inner=1),
        Case(tokens=3, top_k=16, experts=4),
        Case(tokens=129, hidden=7, inner=5, shared=3),
        Case(tokens=16, experts=256, top_k=2),
        Case(tokens=1500, hidden=24, inner=200, experts=3),
    ],
    ids=lambda case: f"T{case.tokens}-H{case.hidden}-I{case.inner}-E{case.experts}-K{case.top_k}",
)
def test_odd_sizes(case, way, poison):
    inputs = replace(case, dtype=torch.float64).make()
    assert_close(run(inputs, config=TORCH), dense(inputs), 1e-12)
    low = replace(case, dtype=torch.bfloat16).make()
    assert_close(run(low, config=TORCH), dense(low), 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_no_larger_than_torch_in_the_same_dtype(dtype, way):
    ours, theirs = [], []
    for seed in range(3):
        inputs = Case(tokens=128, hidden=96, inner=64, experts=4, dtype=dtype, shared=32, seed=seed).make()
        want, got = dense(inputs), run(inputs, config=TORCH)
        low = dense(replace(inputs, topk_weights=inputs.topk_weights.to(dtype)), dtype)
        for name in want:
            ours.append(relative_l2(got[name], want[name]))
            theirs.append(relative_l2(low[name], want[name]))
    assert sum(ours) / len(ours) <= 1.02 * sum(theirs) / len(theirs)
    assert max(ours) <= 1.5 * max(theirs)


def test_error_against_the_reference_backend(way):
    """Both round at the same places; the grouped GEMM rounds once more, the gradient of the activations."""
    inputs = BF16.make()
    want = dense(inputs)
    specification, got = run(inputs, config=MoEConfig(backend="reference")), run(inputs, config=TORCH)
    for name in want:
        most = 1.3 if way == "grouped" and name not in ("out", "d_down_proj") else 1.05
        assert relative_l2(got[name], want[name]) <= most * relative_l2(specification[name], want[name]), name


def test_gradcheck():
    inputs = Case(
        tokens=5, hidden=4, inner=3, experts=3, routing="ragged", dtype=torch.float64, shared=2, shared_gate=True
    ).make()
    leaves = [t.clone().requires_grad_() for t in inputs.floats().values()]

    def layer(x, w, gate_up, down, *shared):
        return moe(x, inputs.ids, w, gate_up, down, shared=SharedExperts(*shared), swiglu_limit=0.8, config=TORCH)

    assert torch.autograd.gradcheck(layer, leaves, fast_mode=False)


def test_equal_bits_over_repeats_saved_rows_and_rings(way, poison):
    case = replace(BF16, routing="zipf")
    want = run(case.make(), config=TORCH)
    for config in (TORCH, RECOMPUTE, *LAYOUTS, replace(TORCH, saved_rows=1 << 20)):
        assert_equal(run(case.make(), config=replace(config, backend="torch")), want)


@pytest.mark.parametrize("saved_rows,kept", [(None, True), (0, False), (512, False), (640, True)])
def test_saved_rows_keep_all_or_none(saved_rows, kept, monkeypatch):
    """200 tokens with 3 routes each are at most 600 rows."""
    found = []

    def watched(call, *, save):
        out, saved = forward(call, save=save)
        found.append(saved)
        return out, saved

    monkeypatch.setattr(backends.torch_backend, "forward", watched)
    run(BF16.make(), config=MoEConfig(backend="torch", saved_rows=saved_rows))
    assert found[0].x_rows is None and (found[0].gate_up is not None) == kept


def test_routes_are_sorted_as_by_a_plain_loop():
    routes = sort_routes(torch.tensor([[1, 0], [1, -1]]), 2)
    assert (routes.order.tolist(), routes.ends.tolist()) == ([1, 0, 2, 3, 4], [1, 3])
    assert routes.place.tolist() == [[1, 2], [0, 4]]
    for kind in ROUTINGS:
        ids = Case(tokens=60, experts=5, top_k=4, routing=kind).make().ids
        routes, flat = sort_routes(ids, 5), ids.flatten().tolist()
        rows = [slot for expert in range(5) for slot, found in enumerate(flat) if found == expert]
        assert routes.order[: len(rows)].tolist() == rows and sorted(routes.order.tolist()) == list(range(241))
        assert routes.ends.tolist() == [sum(found in range(e + 1) for found in flat) for e in range(5)]
        place = [rows.index(slot) if slot in rows else 240 for slot in range(240)]
        assert routes.place.t().flatten().tolist() == place


def test_arrivals_are_brought_into_the_order_of_the_global_batch():
    """The example of the module's docstring."""
    group = EPGroup(None)
    sizes = dict(grouped=False, device=torch.device("cpu"), seconds=0.0)
    for arrivals, by_expert in (
        ([[1, 3], [2, 0]], [0, 4, 5, 1, 2, 3]),
        ([[2, 1], [0, 1]], [0, 1, 2, 3]),
        ([[1, 1], [1, 2]], [0, 2, 1, 3, 4]),
    ):
        rows = exchange.RemoteRows(group, 9, [0, 0], torch.tensor(arrivals), [True, True], **sizes)
        assert rows._by_expert.tolist() == by_expert
        assert rows._by_arrival[rows._by_expert].tolist() == list(range(len(by_expert)))
        assert rows.experts.rows_per_expert.tolist() == torch.tensor(arrivals).sum(0).tolist()


def test_sums_are_in_the_order_shared_then_k():
    """In fp32, (1 + 2^30) - 2^30 is 0 and (2^30 - 2^30) + 1 is 1."""
    big, one = float(2**30), 1.0
    for start, terms, total in ((0.0, [big, -big, one], 1), (0.0, [one, big, -big], 0), (one, [big, -big, 0.0], 0)):
        routes = sort_routes(torch.tensor([[2, 0, 1]]), 3)
        rows = torch.tensor([terms[1], terms[2], terms[0], 0.0])[:, None]
        assert ordered_sum(torch.full((1, 1), start), rows, routes).item() == total
        halves = torch.full((1, 3), 0.5)
        assert ordered_sum(torch.full((1, 1), start), 2 * rows, routes, halves).item() == total


@pytest.mark.parametrize("bad", [-2, 8, 2**31, 2**40, -(2**62)])
def test_ids_out_of_range_and_their_weights_touch_nothing(bad, way, poison):
    inputs = replace(BF16, tokens=20).make()
    inputs.ids[::2, 1] = -1
    want = run(inputs, config=TORCH)
    inputs.ids[::2, 1], inputs.topk_weights[::2, 1] = bad, float("nan")
    got = run(inputs, config=TORCH)
    assert_equal(got, want)
    assert (got["d_topk_weights"][::2, 1] == 0).all()


def test_a_token_of_nan_stays_alone(way):
    """Broken: sums that multiply rows of other tokens by zero."""
    inputs = replace(BF16, routing="ragged").make()
    want = run(inputs, config=TORCH)["out"]
    inputs.x[3] = float("nan")
    got = run(inputs, config=TORCH)["out"]
    others = torch.arange(len(got)) != 3
    assert got[3].isnan().all() and torch.equal(got[others], want[others])


def test_experts_without_rows_get_exact_zeros(way, poison):
    inputs = replace(BF16, experts=16, routing="hot-rank").make()
    got = run(inputs, config=TORCH)
    for name in ("d_gate_up_proj", "d_down_proj"):
        assert (got[name][4:] == 0).all() and (got[name][:4] != 0).any((1, 2)).all()


def test_main_grad_gets_the_sum_and_leaves_experts_without_rows_alone(way):
    inputs = Case(tokens=200, hidden=64, inner=48, experts=16, routing="hot-rank", dtype=torch.bfloat16).make()
    want = run(inputs, config=TORCH)["d_gate_up_proj"]

    def added_to(start: torch.Tensor) -> torch.Tensor:
        gate_up = inputs.gate_up.clone().requires_grad_()
        gate_up.main_grad = start.clone()
        moe(inputs.x, inputs.ids, inputs.topk_weights, gate_up, inputs.down, config=TORCH).backward(inputs.d_out)
        assert gate_up.grad is None and gate_up.grad_added_to_main_grad
        return gate_up.main_grad

    exact = added_to(torch.zeros(want.shape))
    assert torch.equal(exact.to(torch.bfloat16), want)
    # The loop delivers wide sums, the grouped GEMM sums rounded to bf16.
    assert torch.equal(exact, want.float()) == (way == "grouped")
    for dtype in (torch.float32, torch.bfloat16):
        start = torch.randn(want.shape).to(dtype)
        start[9], start[8] = float("nan"), -0.0
        got = added_to(start)
        assert torch.equal(got[:4], (start[:4].float() + exact[:4]).to(dtype))
        assert torch.equal(got[4:].nan_to_num(7.0), start[4:].nan_to_num(7.0)) and torch.signbit(got[8]).all()


def test_frozen_parts_cost_no_gemm(monkeypatch, way):
    """Forward takes two GEMMs over all rows, backward four; each frozen part saves its own."""
    inputs = BF16.make()
    want = run(inputs, config=TORCH)
    counts = {"products": 0, "outer_sums": 0}
    for name in counts:
        original = getattr(gemm.ExpertRows, name)

        def counted(self, *args, name=name, original=original, **kwargs):
            counts[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(gemm.ExpertRows, name, counted)
    expected = {"x": (4, 0), "topk_weights": (3, 0), "gate_up": (3, 1), "down": (3, 1), "shared_down": (2, 0)}
    for name, (products, outer_sums) in expected.items():
        counts.update(products=0, outer_sums=0)
        leaf = inputs.floats()[name].clone().requires_grad_()
        given = inputs.floats() | {name: leaf}
        shared = SharedExperts(given["shared_gate_up"], given["shared_down"], given["shared_gate"])
        moe(
            given["x"],
            inputs.ids,
            given["topk_weights"],
            given["gate_up"],
            given["down"],
            shared=shared,
            swiglu_limit=inputs.limit,
            config=TORCH,
        ).backward(inputs.d_out)
        key = {"gate_up": "gate_up_proj", "down": "down_proj"}.get(name, name)
        assert torch.equal(leaf.grad, want[f"d_{key}"]), name
        assert counts == {"products": products, "outer_sums": outer_sums}, name


def layer_call(inputs: Inputs, config: MoEConfig = TORCH) -> calls.LayerCall:
    shared = None
    if inputs.shared_gate_up is not None:
        shared = calls.SharedWeights(inputs.shared_gate_up, inputs.shared_down, inputs.shared_gate)
    return calls.LayerCall(
        x=inputs.x,
        topk_ids=inputs.ids,
        topk_weights=inputs.topk_weights,
        gate_up_proj=inputs.gate_up,
        down_proj=inputs.down,
        shared=shared,
        swiglu_limit=inputs.limit,
        group=EPGroup(None),
        config=config,
        tokens_by_rank=[inputs.x.shape[0]],
    )


@pytest.mark.parametrize("config", [TORCH, RECOMPUTE], ids=["saved", "recomputed"])
def test_the_host_reads_nothing(grouped, config):
    """On the meta device every read of a value, every copy to the host and every shape made of values raises."""
    inputs = BF16.make()
    there = {name: value.to("meta") for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    call = layer_call(replace(inputs, **there), config)
    out, saved = forward(call, save=True)
    grads = backward(call, type(saved).from_tensors(saved.tensors(), saved.plan), out, calls.Wanted())
    assert out.shape == call.x.shape and grads.x.shape == call.x.shape
    call.gate_up_proj.main_grad = torch.empty_like(call.gate_up_proj, dtype=torch.float32)
    assert _deliver(call.gate_up_proj, grads.gate_up_proj, saved.rows_per_expert) is None


def test_a_read_by_the_host_would_be_noticed(monkeypatch):
    inputs = BF16.make()
    there = {name: value.to("meta") for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        forward(layer_call(replace(inputs, **there)), save=True)  # The loop over experts reads where their rows end.


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages made inside that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return made


@pytest.mark.parametrize("hidden,inner", [(128, 128), (256, 64)])
@pytest.mark.parametrize("config", [TORCH, RECOMPUTE], ids=["saved", "recomputed"])
def test_memory_at_the_peak(grouped, config, hidden, inner, monkeypatch):
    """Nothing of [T, K, H] or [R, I] is made in fp32, and rows are dropped as soon as they have done their work."""
    monkeypatch.setattr(activation, "_CPU_PIECE", 1 << 12)
    tokens, experts, top_k = 256, 4, 8
    call = layer_call(Case(tokens, hidden, inner, experts, top_k, dtype=torch.bfloat16).make(), config)
    row = 2 * tokens * top_k  # Bytes of one bf16 column over all rows.
    # By token: fp32 sum, one term, result. By row: indices and weights. Pieces of SwiGLU.
    rest = tokens * hidden * (4 + 2 + 2) + 100 * tokens * top_k + 5 * 4 * (1 << 12)
    with LiveBytes() as seen:
        out, saved = forward(call, save=True)
    assert seen.peak <= row * (hidden + 3 * inner) + rest
    kept = sum(t.numel() * t.element_size() for t in saved.tensors() if t is not None)
    assert kept <= row * (2 * inner if config is TORCH else 0) + 40 * tokens * top_k
    with LiveBytes() as seen:
        backward(call, saved, torch.randn_like(out), calls.Wanted())
    # Pre-activations and their gradients, hidden rows and theirs, d_out; and x where it had to be gathered early.
    activations = row * (6 * inner + hidden * (1 if config is TORCH else 2))
    weights = 2 * experts * 3 * inner * hidden
    assert seen.peak <= max(activations, row * (5 * inner + hidden) + weights) + rest


def test_auto_and_explicit_choice(caplog):
    assert backends.automatic("cuda")[0] == "torch" and backends.automatic("cpu")[0] == "reference"
    assert backends.choose("torch", "cpu") is backends.torch_backend
    assert backends.choose("reference", "cuda") is backends.reference
    backends._announce.cache_clear()
    with caplog.at_level("INFO", "moeloom"):
        assert backends.choose("auto", "cuda") is backends.torch_backend
        backends.choose("auto", "cuda")
    assert [r.getMessage() for r in caplog.records] == [
        f"backend auto: taking 'torch' ({backends.automatic('cuda')[1]})"
    ]


def test_backends_do_not_know_each_other():
    for here, there in (("torch", "reference"), ("reference", "torch")):
        for path in (SOURCE / "backends" / here).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert not node.module.startswith(f"moeloom.backends.{there}"), path


def collective_on_cpu(self, device):
    """Makes gloo's own all-to-all move the rows, as NCCL's does on a GPU."""
    return self._group


def one_job(rank: int, ranks: int, group, case: Case, counts: list[int], config: MoEConfig) -> dict:
    first = sum(counts[:rank])
    got = run(case.make().part(first, first + counts[rank], rank, ranks), group=group, config=config)
    return {name: t.float().numpy() for name, t in got.items()}


def on_ranks(rank: int, world: int, jobs: list) -> list:
    """Run every job twice on its first ranks; return numpy results of this rank, or None where it had no part."""
    groups = {n: dist.new_group(list(range(n))) for n in {2, world}}
    exchange.grouped_mm_is_native = fits
    results = []
    for case, counts, saved_rows, collective in jobs:
        ranks = len(counts)
        if rank >= ranks:
            results.append(None)
            continue
        EPGroup.device_transport = collective_on_cpu if collective else original_transport
        config = MoEConfig(backend="torch", saved_rows=saved_rows[rank] if saved_rows else None)
        both = [one_job(rank, ranks, groups[ranks], case, counts, config) for _ in range(2)]
        assert all((both[0][name] == both[1][name]).all() for name in both[0]), "bits differ between two runs"
        results.append(both[0])
    return results


original_transport = EPGroup.device_transport


FP64 = Case(tokens=101, experts=8, top_k=3, dtype=torch.float64, **FULL)
#: Case, tokens of each rank, saved_rows of each rank, whether rows move by a collective.
TWO_RANKS = [
    (replace(FP64, routing="zipf"), [60, 41], None, False),
    (FP64, [100, 1], [0, None], True),
    (replace(BF16, routing="ragged"), [120, 80], [0, 0], False),
]
FOUR_RANKS = [
    *[(replace(FP64, routing=r), [30, 0, 70, 1], None, False) for r in ("hot-rank", "none", "one-route", "ragged")],
    *[(replace(FP64, routing="zipf"), [0, 101], [0, 0], collective) for collective in (False, True)],
    *[(FP64, [50, 1, 0, 50], [0, None, 0, 1 << 20], collective) for collective in (False, True)],
    (FP64, [60, 41], None, True),
    (BF16, [0, 200, 0, 0], [0] * 4, True),
]


@pytest.mark.parametrize("world,jobs", [(2, TWO_RANKS), pytest.param(4, FOUR_RANKS, marks=pytest.mark.slow)])
def test_ranks_give_what_one_rank_gives(world, jobs, monkeypatch):
    outcomes = values(run_ranks(on_ranks, world, jobs))
    monkeypatch.setattr(exchange, "grouped_mm_is_native", fits)
    for number, (case, *rest) in enumerate(jobs):
        parts = [v[number] for v in outcomes if v[number] is not None]
        want = run(case.make(), config=TORCH)
        limit = 2e-2 if case.dtype == torch.bfloat16 else 1e-6  # Results travel in fp32.
        for name in want:
            mine = [torch.from_numpy(p[name]).double() for p in parts]
            got = torch.cat(mine) if name in ROUTED else sum(mine)
            assert relative_l2(got, want[name]) < limit, f"{name}, {case.routing}, {rest}"


def dies(rank: int, world: int, phase: str, collective: bool) -> None:
    """Rank 1 is killed when it enters ``phase``; with ``collective`` in its first all-to-all instead."""
    wanted, original, original_all = phase, EPGroup.exchange, dist.all_to_all_single

    def watched(self, outgoing, incoming, *, phase: str, seconds: float):
        if rank == 1 and phase == wanted and not collective:
            os._exit(9)
        return original(self, outgoing, incoming, phase=phase, seconds=seconds)

    def watched_all(*args, **kwargs):
        if rank == 1:
            os._exit(9)
        return original_all(*args, **kwargs)

    EPGroup.exchange = watched
    if collective:
        EPGroup.device_transport, dist.all_to_all_single = collective_on_cpu, watched_all
    part = Case(tokens=60, experts=6).make().part(rank * 20, rank * 20 + 20, rank, world)
    run(part, group=dist.group.WORLD, config=MoEConfig(backend="torch", timeout_s=3.0))


PHASES = ["forward routes", "forward pull", "forward push", "backward pull", "backward push"]


@pytest.mark.parametrize(
    "phase,collective",
    [pytest.param(phase, False, marks=pytest.mark.slow) for phase in PHASES] + [("forward pull", True)],
)
def test_rank_that_dies(phase, collective):
    for rank, outcome in enumerate(run_ranks(dies, 3, phase, collective, seconds=40)):
        if rank != 1:
            assert isinstance(outcome.error, PeerLost), f"{outcome.error!r}\n{outcome.trace}"
            assert outcome.error.rank == 1 and outcome.error.phase.split()[0] == phase.split()[0]
            assert outcome.seconds < 5


def stuck(rank: int, world: int) -> str:
    """A collective that does not end, although both ranks are alive."""

    class Never:
        def is_completed(self):
            return False

    dist.all_to_all_single = lambda *args, **kwargs: Never()
    EPGroup.device_transport = collective_on_cpu
    group = resolve_group(dist.group.WORLD)
    rows = torch.zeros(2, 3)
    moved = exchange.RemoteRows(
        group,
        3,
        [1, 1],
        torch.ones(2, 1, dtype=torch.int64),
        [True, True],
        grouped=False,
        device=rows.device,
        seconds=0.5,
    )
    moved.pull([rows], phase="forward pull")


@pytest.mark.slow
def test_a_collective_that_never_ends_has_a_deadline():
    for outcome in run_ranks(stuck, 2, seconds=30):
        assert isinstance(outcome.error, PeerLost) and "every rank still answers" in str(outcome.error)
        assert 0.5 <= outcome.seconds < 3


def other_backend(rank: int, world: int) -> None:
    part = Case(tokens=20).make().part(rank * 10, rank * 10 + 10, rank, world)
    run(part, group=dist.group.WORLD, config=MoEConfig(backend=("torch", "reference")[rank], timeout_s=3.0))


def test_ranks_with_other_backends_are_told_so():
    for outcome in run_ranks(other_backend, 2, seconds=30):
        assert isinstance(outcome.error, PeerMismatch) and "the backend (1 reference, 2 torch" in str(outcome.error)
