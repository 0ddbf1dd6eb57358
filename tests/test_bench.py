"""The benchmarks: floors, routings, checks before timing, turns, records, tables and pictures. All on a CPU."""

from __future__ import annotations

import json
import math
import sys
import time
import types
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from moeloom.bench import measure, records, timing
from moeloom.bench.ceiling import Ceiling
from moeloom.bench.errors_table import ErrorOptions, error_table, summarise
from moeloom.bench.floor import Work, floor
from moeloom.bench.inputs import Point, build
from moeloom.bench.layer import LayerBenchmark, LayerOptions
from moeloom.bench.models import MODELS, ModelShape, find_model
from moeloom.bench.oracle import Error, build_oracle, compare, dense
from moeloom.bench.plots import draw_all
from moeloom.bench.rivals import RIVALS, find_rivals
from moeloom.bench.rivals.base import Contender, Rival, RivalOptions
from moeloom.bench.rivals.moeloom_backend import MoeloomContender
from moeloom.bench.routing import RoutingRequest, draw
from moeloom.cli.app import app
from moeloom.errors import ArgumentError, DataError
from tests import oracle as test_oracle
from tests.cases import Inputs
from tests.ranks import run_ranks, values

CPU = torch.device("cpu")
TINY = ModelShape("tiny", 32, 16, 8, 2, shared=16, shared_gate=True, swiglu_limit=1.0)


def tiny(**changes) -> Point:
    return Point(**(dict(shape=TINY, tokens=20, routing="random", dtype="fp32", ep_slice=1) | changes))


def options(rivals: list[Rival], **changes) -> LayerOptions:
    usual = dict(
        shapes=[TINY],
        tokens=[20],
        routings=["random"],
        shared=[False],
        passes=["fwd", "fwd+bwd"],
        rivals=rivals,
        dtype="fp32",
        ep_slice=1,
        seconds=0.0,
        warmup_s=0.0,
        point_warmup_s=0.0,
    )
    return LayerOptions(**(usual | changes))


@pytest.fixture
def quick(monkeypatch):
    """Do not measure this machine: rates are given, and the cache that is emptied is small."""
    rates = Ceiling(0.1, {"1 x 1 x 1": 0.1}, 10.0)
    monkeypatch.setattr("moeloom.bench.layer.measure_ceiling", lambda *_: rates)
    monkeypatch.setattr("moeloom.bench.timing.CPU_FLUSH_BYTES", 1 << 20)
    monkeypatch.setattr("moeloom.bench.records.commit", lambda: "0123456789ab")


def run_matrix(chosen: LayerOptions) -> list[dict]:
    benchmark = LayerBenchmark(chosen, CPU)
    benchmark.prepare()
    return list(benchmark.run())


# ---------------------------------------------------------------- floor

#: Useful TFLOP/s of the floor at 690 TFLOP/s and 4.3 TB/s, as published for one rank of eight under random routing.
PUBLISHED = {
    (8192, "fwd"): (644, 650, 621, 642),
    (8192, "fwd+bwd"): (654, 660, 638, 651),
    (2048, "fwd"): (597, 610, 548, 543),
    (2048, "fwd+bwd"): (607, 625, 571, 565),
}


@pytest.mark.parametrize("tokens, pass_", PUBLISHED)
def test_floor_reproduces_published_numbers(tokens, pass_):
    for shape, want in zip(MODELS.values(), PUBLISHED[tokens, pass_], strict=True):
        experts = shape.experts // 8
        ids, _ = draw(RoutingRequest("random", tokens, experts, shape.top_k))
        rows = torch.bincount(ids.flatten(), minlength=experts).tolist()
        limit = floor(Work(shape, pass_, tokens, rows), gemm_tflops=690, copy_gb_per_s=4300)
        got = shape.useful_flops(tokens, tokens * shape.top_k, pass_, False) / limit.ms / 1e9
        # Where the mean is a whole number of tiles, half a tile more or less an expert hangs on the draw.
        on_the_edge = tokens * shape.top_k // experts % 128 == 0 and tokens == 2048
        assert got == pytest.approx(want, rel=0.04 if on_the_edge else 0.011), shape.name


def test_floor_by_hand():
    shape = ModelShape("one", 1024, 512, 1, 1, shared=256)
    work = Work(shape, "fwd+bwd", tokens=130, rows_per_expert=[130, 0], shared=True)
    limit = floor(work, gemm_tflops=1.0, copy_gb_per_s=1.0)
    unit = 6 * 1024 / 1e9  # ms an inner column and row, at 1 TFLOP/s.
    # 130 rows are 2 tiles in forward and data gradients, 3 steps of 64 in weight gradients; the shared expert likewise.
    assert limit.compute_ms == pytest.approx((512 + 256) * (256 * 2 + 192) * unit)
    assert limit.padding_ms == pytest.approx((512 + 256) * (126 * 2 + 62) * unit)
    per_ms = 1e6
    assert limit.weights_ms == pytest.approx(2 * 3 * 1024 * 768 * 2 / per_ms)  # The expert without rows is not read.
    assert limit.gradients_ms == pytest.approx(3 * 1024 * 768 * 2 / per_ms)
    x, results, saved = 130 * 1024 * 2, 130 * 1024 * 2, 130 * 2 * (512 + 256) * 2
    assert limit.rows_ms == pytest.approx((3 * x + 2 * saved + 2 * results) / per_ms)
    assert limit.sums_ms == pytest.approx(2 * (results + x) / per_ms)
    memory = limit.weights_ms + limit.rows_ms + limit.gradients_ms
    assert limit.ms == max(limit.compute_ms, memory) + limit.sums_ms
    both = [floor(Work(shape, p, 130, [130], True), gemm_tflops=1, copy_gb_per_s=1) for p in ("fwd", "bwd")]
    assert sum(one.compute_ms for one in both) == pytest.approx(limit.compute_ms)
    assert sum(one.bytes for one in both) == limit.bytes


# ---------------------------------------------------------------- models and routings


def test_models():
    assert find_model("glm-5.2").useful_flops(1, 8, "fwd", False) == 6 * 8 * 6144 * 2048
    small = find_model("deepseek-v4-pro-scaled")
    assert small.is_scaled and small.hidden == 112 and small.experts == 384 and small.scaled() is small
    assert all(w % 16 == 0 for s in MODELS.values() for w in (s.scaled().hidden, s.scaled().inner, s.scaled().shared))
    with pytest.raises(ArgumentError, match="--model must be one of kimi-k2.7-code, .*got 'kimi'"):
        find_model("kimi")


def counts(name: str, tokens: int = 1200, experts: int = 48, top_k: int = 8, **where) -> torch.Tensor:
    ids, weights = draw(RoutingRequest(name, tokens, experts, top_k, **where))
    assert ids.shape == weights.shape == (tokens, top_k) and ids.dtype == torch.int64
    assert all(len(set(row)) == top_k for row in ids.tolist()), "an expert twice for one token"
    assert torch.allclose(weights.sum(1), torch.ones(tokens))
    return torch.bincount(ids.flatten(), minlength=experts)


def test_routings():
    assert counts("balanced").unique().tolist() == [200]
    assert counts("balanced", tokens=7).float().std() < 0.5, "uneven by more than one"
    even = counts("random")
    assert even.min() > 150 and even.max() < 250
    zipf = counts("zipf").sort(descending=True).values
    assert zipf[0] > 0.9 * 1200 and zipf[24:].sum() < 0.25 * zipf.sum()
    # Without replacement, the second most popular one keeps about its share of what is left.
    single = counts("zipf", top_k=1, tokens=20000).sort(descending=True).values / 20000
    harmonic = sum(1 / r for r in range(1, 49))
    assert torch.allclose(single[:4], torch.tensor([1.0, 1 / 2, 1 / 3, 1 / 4]) / harmonic, atol=0.02)
    hot = counts("hot-expert")
    assert hot[0] == 1200 and hot[1:].max() < 1.3 * hot[1:].float().mean()
    virtual = counts("hot-rank")  # 8 virtual ranks of 6 experts; half of 8 routes go to the first.
    assert virtual[:6].sum() == 1200 * 4
    real = counts("hot-rank", rank=1, ranks=2)
    assert real[:24].sum() == 1200 * 4 and real.min() > 0
    assert counts("hot-rank", experts=8, top_k=8).unique().tolist() == [1200]


def test_routings_of_ranks_differ_but_share_what_is_common():
    def popular(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, _ = draw(RoutingRequest("zipf", 500, 16, 1, seed=3, rank=rank, ranks=2))
        return ids, torch.bincount(ids.flatten(), minlength=16).argmax()

    (a, first), (b, second) = popular(0), popular(1)
    assert not torch.equal(a, b) and first == second
    assert torch.equal(a, popular(0)[0])
    both = sum(counts("balanced", tokens=9, top_k=3, experts=6, rank=r, ranks=2) for r in range(2))
    assert both.unique().tolist() == [9]
    with pytest.raises(ArgumentError, match="--ep-slice must leave at least top-k = 8 experts"):
        draw(RoutingRequest("random", 4, 6, 8))
    with pytest.raises(ArgumentError, match="--routing must be one of balanced, .*got 'even'"):
        draw(RoutingRequest("even", 4, 6, 2))


def test_replay(tmp_path):
    path = tmp_path / "routes.safetensors"
    name = f"replay:{path}"
    ids, weights = torch.tensor([[0, 3], [2, -1], [1, 0], [3, 2]]), torch.rand(4, 2)
    save_file({"topk_ids": ids.int(), "topk_weights": weights}, path)
    got, w = draw(RoutingRequest(name, 2, 4, 2, rank=1, ranks=2))
    assert torch.equal(got, ids[2:]) and torch.equal(w, weights[2:])
    problem = build(tiny(routing=name, tokens=4), CPU)
    assert problem.has_empty_routes and sum(problem.rows_per_expert) == 7
    for request, words in (
        (RoutingRequest(name, 5, 4, 2), r"shape \[>= 5, 2\]; got \[4, 2\]"),
        (RoutingRequest(name, 4, 4, 3), r"shape \[>= 4, 3\]"),
        (RoutingRequest(name, 4, 3, 2), r"ids in \[-1, 3\); got 3"),
    ):
        with pytest.raises(DataError, match=words):
            draw(request)
    with pytest.raises(ArgumentError, match="--routing must name a file after replay:"):
        draw(RoutingRequest("replay:nowhere", 4, 4, 2))
    save_file({"topk_ids": ids}, path)
    with pytest.raises(DataError, match="Add topk_weights"):
        draw(RoutingRequest(name, 4, 4, 2))
    save_file({"topk_ids": ids, "topk_weights": weights.log() * math.inf}, path)
    with pytest.raises(DataError, match="finite topk_weights"):
        draw(RoutingRequest(name, 4, 4, 2))
    path.write_text("no tensors")
    with pytest.raises(DataError, match="be a safetensors file"):
        draw(RoutingRequest(name, 4, 4, 2))


# ---------------------------------------------------------------- right results


@pytest.mark.parametrize("shared", [False, True])
def test_oracle_equals_the_one_of_the_tests(shared):
    problem = build(tiny(shared=shared), CPU)
    inputs = Inputs(
        problem.x, problem.ids, problem.weights, problem.gate_up, problem.down, problem.d_out, limit=TINY.swiglu_limit
    )
    if shared:
        inputs.shared_gate_up, inputs.shared_down = problem.shared.gate_up_proj, problem.shared.down_proj
        inputs.shared_gate = problem.shared.gate
    want = test_oracle.dense(inputs)
    got = dense(problem, torch.float64, backward=True)
    assert got.keys() == want.keys()
    assert all(test_oracle.relative_l2(got[name], want[name]) < 1e-14 for name in want)
    limits = build_oracle(problem).limits
    assert all(1e-8 < limit < 2e-6 for limit in limits.values())


@pytest.mark.parametrize("name", ["reference", "torch", "transformers"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rivals_that_run_here_are_right(name, dtype):
    point = tiny(dtype=dtype, shared=True, shape=ModelShape("tiny", 32, 16, 8, 2, shared=16))
    problem = build(point, CPU)
    [rival] = find_rivals([name])
    if rival.missing(place := types.SimpleNamespace(device=CPU, dtype=problem.x.dtype, ranks=1)):
        pytest.skip(rival.missing(place))
    right = build_oracle(problem)
    contender = rival.prepare(problem, RivalOptions())
    contender.backward(contender.forward())  # Gradients that are there already must not be added to.
    errors = compare(contender.results(backward=True), right.want)
    assert errors.keys() == right.want.keys()
    assert all(error.relative_l2 <= right.limits[n] for n, error in errors.items()), (errors, right.limits)


def fake_sonicmoe(monkeypatch) -> list[str]:
    """Put a torch version of SonicMoE's interface in place: interleaved gate and up, weights with the expert last."""
    loaded: list[str] = []

    def layer(x, scores, token, expert, w1, b1, w2, b2, count, stream, activation, inference):
        out = torch.zeros_like(x)
        for e in range(count):
            mine = (expert == e).nonzero().squeeze(1)
            both = x[token[mine].long()] @ w1[:, :, e].t()
            y = (torch.nn.functional.silu(both[:, ::2]) * both[:, 1::2]) @ w2[:, :, e].t()
            out = out.index_add(0, token[mine].long(), y * scores[mine, None])
        return out, None

    class GemmConfig:
        def __init__(self, **fields):
            loaded.append(f"{fields['tile_m']}x{fields['tile_n']}")

    modules = {
        "quack": {},
        "quack.gemm_config": {"GemmConfig": GemmConfig},
        "sonicmoe": {"moe_general_routing_inputs": layer},
        "sonicmoe.enums": {"ActivationType": types.SimpleNamespace(SWIGLU="swiglu")},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            monkeypatch.setattr(sys.modules[name.split(".")[0]], name.split(".")[1], module, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr("moeloom.bench.rivals.sonicmoe._TILES", [])
    return loaded


def test_sonicmoe_adapter_speaks_its_layout(monkeypatch):
    loaded = fake_sonicmoe(monkeypatch)
    problem = build(tiny(shared=True, shape=ModelShape("tiny", 32, 16, 8, 2, shared=16, shared_gate=True)), CPU)
    contender = RIVALS["sonicmoe"].prepare(problem, RivalOptions())
    right = build_oracle(problem)
    errors = compare(contender.results(backward=True), right.want)
    assert errors.keys() == right.want.keys() and all(e.relative_l2 < 1e-5 for e in errors.values()), errors
    assert loaded == ["128x192"] and "pinned" in contender.note
    # The whole result must be in our layout: without putting gate rows first again it is not.
    contender.backward(contender.forward())
    raw = Contender.gradients(contender)["d_gate_up_proj"]
    assert not compare({"d_gate_up_proj": raw}, right.want)["d_gate_up_proj"].relative_l2 < 0.5


# ---------------------------------------------------------------- check, then time


@dataclass
class Log:
    """What planted rivals were asked to do."""

    forwards: int = 0
    backwards: int = 0


class Planted(Rival):
    """Our reference with a fault."""

    def __init__(self, fault: str = "", log: Log | None = None) -> None:
        self.name = self.backend = f"planted-{fault or 'right'}"
        self.fault, self.log = fault, log or Log()

    def missing(self, place):
        return "its wheel is not here: pip install it" if self.fault == "missing" else None

    def prepare(self, problem, rival_options):
        if self.fault == "prepare":
            raise RuntimeError("no such kernel")
        return PlantedContender(problem, self)


class PlantedContender(MoeloomContender):
    def __init__(self, problem, rival: Planted) -> None:
        super().__init__(problem, "reference")
        self.rival = rival

    def forward(self):
        self.rival.log.forwards += 1
        out, fault = super().forward(), self.rival.fault
        if fault == "late" and self.rival.log.forwards > 1:
            raise RuntimeError("second call fails")
        if fault == "slow":
            time.sleep(0.05 * self.problem.group.rank)
        return out * {"one percent": 1.01, "nan": math.nan}.get(fault, 1.0)

    def backward(self, out):
        self.rival.log.backwards += 1
        if self.rival.fault == "interrupt" and self.rival.log.backwards > 1:
            raise KeyboardInterrupt
        super().backward(out)

    def gradients(self):
        found = super().gradients()
        if self.rival.fault == "no gradient":
            del found["d_x"]
        if self.rival.fault == "bad gradient":
            found["d_down_proj"] = found["d_down_proj"].flip(0)
        return found


FAULTS = {
    "one percent": "wrong result: out is off by 1.0",
    "nan": "wrong result: out is off by nan",
    "no gradient": "wrong result: no d_x",
    "bad gradient": "wrong result: d_down_proj is off by",
    "prepare": "RuntimeError: no such kernel",
}


def test_wrong_rivals_are_never_timed_and_the_others_go_on(quick):
    planted = [Planted(fault) for fault in FAULTS]
    found = run_matrix(options([*planted, Planted()]))
    for one in planted:
        wrong = [r for r in found if r["backend"] == one.backend]
        assert len(wrong) == 2 and all(r["error"].startswith(f"failed: {FAULTS[one.fault]}") for r in wrong), wrong
        assert all(r["ms_median"] is None and r["runs"] == 0 for r in wrong)
        assert one.log.forwards <= 1, "it was called again after its check"
    right = [r for r in found if r["backend"] == "planted-right"]
    assert len(right) == 2 and all(r["error"] is None and r["ms_median"] > 0 and r["runs"] >= 5 for r in right)


def test_missing_and_late_failures_are_records(quick):
    found = run_matrix(options([Planted("missing"), Planted("late"), Planted()]))
    errors = {r["backend"]: r["error"] for r in found}
    assert errors["planted-missing"] == "missing: its wheel is not here: pip install it"
    assert errors["planted-late"] == "failed: RuntimeError: second call fails" and errors["planted-right"] is None
    assert len(found) == 6 and all(r.keys() == records.FIELDS.keys() for r in found)


def test_rows_of_one_point_share_a_run_and_state_what_they_are(quick):
    found = run_matrix(
        options([Planted(), RIVALS["cublas-dense"]], tokens=[20, 30], l2=["cold", "warm"], shared=[True])
    )
    assert len({r["run"] for r in found}) == 2 and len(found) == 2 * 2 * 2 * 2
    everything = set(dense(build(tiny(shared=True), CPU), torch.float32, backward=True))
    for r in found:
        layer = r["backend"] != "cublas-dense"
        assert r["is_layer"] == layer and (r["rel_l2_error"] is not None) == layer
        assert r["l2"] in ("cold", "warm") and "scaled: not a GPU speed" in r["device"]
        routed, beside = r["tokens"] * 2 * 16, r["tokens"] * 16
        flops = 6 * 32 * (routed + beside) * (3 if r["pass"] == "fwd+bwd" else 1)
        assert r["useful_tflops"] == pytest.approx(flops / r["ms_median"] / 1e9, rel=1e-4)
        assert r["floor_share"] == pytest.approx(r["floor_ms"] / r["ms_median"], rel=1e-3)
        if layer:
            assert set(r["errors"]) == ({"out"} if r["pass"] == "fwd" else everything)


# ---------------------------------------------------------------- turns and clocks


def test_contenders_take_turns_and_results_do_not_pile_up(quick):
    order, alive = [], []

    class Result:
        def __init__(self, name):
            order.append(name)
            alive.append(name)

        def __del__(self):
            alive.remove(order[-1])

    def step(name):
        return timing.Step(name, lambda: None, lambda _: Result(name), lambda: order.append("clear"))

    times = timing.interleave([step(n) for n in "abc"], 4, CPU, cold=True)
    assert [n for n in order if n != "clear"] == list("abcbcacababc") and order.count("clear") == 12
    assert not alive
    assert {name: len(t) for name, t in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_time_is_that_of_the_timed_part_alone():
    nap = timing.Step("nap", lambda: time.sleep(0.03), lambda _: time.sleep(0.01), lambda: time.sleep(0.03))
    [times] = timing.interleave([nap], 3, CPU, cold=True).values()
    assert all(9 < ms < 29 for ms in times)


def test_small_arithmetic():
    draws = [{"out": Error(0.2, 3.0)}, {"out": Error(0.4, 5.0)}], [{"out": Error(0.1, 3.0)}, {"out": Error(0.4, 10.0)}]
    assert summarise(*draws) == {"out": {"relative_l2": 0.3, "largest": 5.0, "ratio": 1.5, "largest_ratio": 1.0}}
    assert timing.slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5]
    assert timing.summary([3.0, 1.0, 2.0]) == {"ms_median": 2.0, "ms_min": 1.0, "ms_max": 3.0, "runs": 3}
    assert measure._quantile([1, 2, 3, 4], 0.5) == 2 and measure._quantile(list(range(100)), 0.99) == 98
    assert measure.host_bound_tokens(500.0, 10.0, 8192, 0.1) == math.ceil(8192 * 0.05)
    assert measure.host_bound_tokens(500.0, 10.0, 8192, 0.6) == 0


# ---------------------------------------------------------------- ranks


def two_ranks(rank: int, world: int) -> list[dict]:
    # With seconds to fill, ranks must agree on rounds, or one of them waits for the other's next call.
    times = dict(seconds=0.3, point_warmup_s=0.1)
    measured = timing.round_seconds
    timing.round_seconds = lambda *arguments: measured(*arguments) * (0.02, 1.0)[rank]
    chosen = options([Planted("slow"), RIVALS["reference"]], shared=[True], routings=["hot-rank"], **times)
    benchmark = LayerBenchmark(chosen, CPU, torch.distributed.group.WORLD)
    benchmark.prepare()
    return list(benchmark.run())


def test_two_ranks_take_the_slowest_rank_of_every_iteration():
    first, second = values(run_ranks(two_ranks, 2))
    assert len(first) == 4 and all(r["error"] is None and r["ep_size"] == 2 for r in first), first
    for mine, theirs in zip(first, second, strict=True):
        assert all(mine[n] == theirs[n] for n in ("ms_median", "ms_min", "ms_max", "runs", "floor_ms", "useful_tflops"))
    # Rank 1 sleeps 50 ms after each forward, behind all exchanges: rank 0 alone would know nothing of it.
    slow = [r for r in first if r["backend"] == "planted-slow"]
    assert all(r["ms_min"] >= 50 for r in slow)


class FakeDeepEP:
    """Its documented interface over gloo: a token goes once to every rank that owns one of its experts."""

    def __init__(self, group, num_max_tokens_per_rank, hidden, num_topk):
        self.group, self.rank, self.ranks = group, torch.distributed.get_rank(group), group.size()

    def _all(self, tensor):
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts)

    def dispatch(self, x, topk_idx=None, topk_weights=None, handle=None, *, num_experts):
        if handle is not None:
            return self._all(x)[handle], None, None, handle, None
        ids, local = self._all(topk_idx), num_experts // self.ranks
        mine = torch.where(ids // local == self.rank, ids % local, -1)
        rows = (mine >= 0).any(1).nonzero().squeeze(1)
        weights = torch.where(mine[rows] >= 0, self._all(topk_weights)[rows], 0.0)
        return self._all(x)[rows], mine[rows], weights, rows, None

    def combine(self, x, handle, topk_weights=None):
        def add(tensor):
            tokens = int(self._all(handle.max()[None]).max()) // self.ranks + 1
            total = torch.zeros(tokens * self.ranks, tensor.shape[1]).index_add(0, handle, tensor)
            torch.distributed.all_reduce(total, group=self.group)
            return total[self.rank * tokens : (self.rank + 1) * tokens]

        return add(x), None if topk_weights is None else add(topk_weights), None


def fake_hybridep() -> types.ModuleType:
    """Megatron-Core's documented functions over gloo: rows arrive once for each local expert, in expert order."""

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, chosen, chance, group, local):
            ctx.buffer = buffer = FakeDeepEP(group, 0, 0, 0)
            first = buffer.rank * local
            expert, ctx.token = buffer._all(chosen.long())[:, first : first + local].t().nonzero(as_tuple=True)
            ctx.column, ctx.experts = first + expert, chosen.shape[1]
            weights = buffer._all(chance)[ctx.token, ctx.column]
            counts = torch.bincount(expert, minlength=local)
            return buffer._all(x)[ctx.token], weights, None, counts, (buffer, ctx.token)

        @staticmethod
        def backward(ctx, d_x, d_weights, *_):
            spread = torch.zeros(len(ctx.token), ctx.experts).scatter(1, ctx.column[:, None], d_weights[:, None])
            d_x, d_chance, _ = ctx.buffer.combine(d_x, ctx.token, spread)
            return d_x, None, d_chance, None, None

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, handle, *_):
            ctx.handle = handle
            return handle[0].combine(y, handle[1])[0]

        @staticmethod
        def backward(ctx, d_out):
            buffer, token = ctx.handle
            return buffer._all(d_out)[token], None, None, None

    module = types.ModuleType("fused_a2a")
    module.hybrid_ep_dispatch, module.hybrid_ep_combine = Dispatch.apply, Combine.apply
    module.reset_hybrid_ep_buffer = lambda: None
    return module


def transports(rank: int, world: int) -> dict[str, dict[str, float]]:
    names = "megatron", "megatron.core", "megatron.core.transformer", "megatron.core.transformer.moe"
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[-1]].fused_a2a = fake_hybridep()
    sys.modules["deep_ep"] = types.ModuleType("deep_ep")
    sys.modules["deep_ep"].ElasticBuffer = FakeDeepEP
    problem = build(tiny(shared=True), CPU, torch.distributed.group.WORLD)
    right, found = build_oracle(problem), {}
    for name in ("deepep", "hybridep"):
        errors = compare(RIVALS[name].prepare(problem, RivalOptions()).results(backward=True), right.want)
        found[name] = {n: e.relative_l2 / right.limits[n] for n, e in errors.items()}
        assert errors.keys() == right.want.keys()
    return found


@pytest.mark.slow
def test_transport_adapters_speak_the_documented_interfaces():
    for found in values(run_ranks(transports, 2)):
        assert all(share <= 1 for errors in found.values() for share in errors.values()), found


# ---------------------------------------------------------------- errors


def test_error_table(quick):
    point = tiny(dtype="bf16")
    chosen = ErrorOptions([point], [RIVALS["reference"], Planted("prepare"), RIVALS["cublas-dense"]], seeds=3)
    loop, ours, broken, dense_gemm = error_table(chosen, CPU)
    assert loop["backend"] == "torch-loop" and ours["backend"] == "moeloom-reference" and ours["runs"] == 3
    assert all(e["ratio"] == 1.0 for e in loop["errors"].values()), "without our torch backend, the loop is the base"
    assert all(0.2 < e["ratio"] < 1.5 for e in ours["errors"].values()), ours["errors"]
    assert broken["error"].startswith("failed: RuntimeError") and "no layer" in dense_gemm["error"]
    assert all(r.keys() == records.FIELDS.keys() and r["kind"] == "errors" for r in (loop, ours, broken))


# ---------------------------------------------------------------- command line, records, pictures

ARGUMENTS = ["--model", "qwen3.5-397b-a17b", "--tokens", "32", "--seconds", "0", "--warmup", "0"]


def bench(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_bench_layer_from_the_command_line_to_pictures(tmp_path):
    path, out = tmp_path / "deep" / "a.jsonl", tmp_path / "plots"
    arguments = [*ARGUMENTS, "--against", "reference,sonicmoe", "--pass", "fwd", "--json", path, "--device", "cpu"]
    code, text = bench("layer", *arguments, "--routing", "random,zipf")
    assert code == 0 and "CPU, scaled: not a GPU speed" in text.splitlines()[-1]
    assert "widths / 64" in text and "moeloom-reference" in text and "sonicmoe: missing: needs a CUDA device" in text
    for word in ("% GEMM", "% floor", "max(compute", "of it padding", "weights", "gradients", "sums"):
        assert word in text
    found = records.read([path])
    assert [r["backend"] for r in found] == ["sonicmoe", "moeloom-reference"] * 2
    assert {r["model"] for r in found} == {"qwen3.5-397b-a17b-scaled"} and found[0]["ep_slice"] == 8
    assert str(tmp_path) not in path.read_text(), "records do not say where they were made"
    code, text = bench("layer", *arguments, "--tokens", "48")
    assert code == 0 and len(records.read([path])) == 6, "a second run appends"
    assert bench("table", path)[0] == 0
    code, text = bench("plot", path, "--out", out)
    names = sorted(p.name for p in out.iterdir())
    pictures = ["bars", "imbalance", "roofline", "scaling"]
    assert code == 0 and names == sorted(f"{n}.{kind}" for n in pictures for kind in ("png", "svg"))
    assert all(p.stat().st_size > 5000 for p in out.iterdir())
    assert all("not a GPU speed" in (out / f"{name}.svg").read_text() for name in pictures)


def test_ctrl_c_keeps_what_was_measured(quick, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    monkeypatch.setitem(RIVALS, "reference", Planted("interrupt"))
    monkeypatch.setattr("moeloom.cli.bench.find_model", lambda name: TINY)
    monkeypatch.setattr(ModelShape, "scaled", lambda self: self)
    code, text = bench("layer", *ARGUMENTS, "--against", "reference", "--json", path, "--ep-slice", "1")
    assert code == 130 and [r["pass"] for r in records.read([path])] == ["fwd"]
    assert "interrupted; 1 of 2 records kept" in text


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "gpt"], "--model must be one of kimi-k2.7-code, glm-5.2"),
        (["--tokens", "8k"], "--tokens must be numbers >= 1 with commas between; got '8k'"),
        (["--routing", "even"], "--routing must be one of balanced, random, zipf, hot-rank, hot-expert, replay:FILE"),
        (["--pass", "train"], r"--pass must be among fwd, bwd, fwd\+bwd; got 'train'"),
        (["--dtype", "fp8"], "--dtype must be one of bf16, fp32; got 'fp8'"),
        (["--shared", "yes"], "--shared must be among 0, 1; got 'yes'"),
        (
            ["--against", "torch,megablocks"],
            "--against must be among hopper, torch, reference, sonicmoe, .*'megablocks'",
        ),
        (["--against", "torch,torch"], "--against must be a list of different words"),
        (["--l2", "hot"], "--l2 must be among cold, warm; got 'hot'"),
        (["--sonicmoe-tiles", "best"], "--sonicmoe-tiles must be one of default, all; got 'best'"),
        (["--ep-slice", "7"], "--ep-slice must divide the 384 experts of kimi-k2.7-code-scaled"),
        (["--json", "/proc/nowhere/a.jsonl"], "--json must name a file that can be written"),
    ],
)
def test_wrong_input_is_told_what_is_right(words, message):
    with pytest.raises(ArgumentError, match=message):
        bench("layer", "--warmup", "0", "--device", "cpu", *words)


def test_the_recorded_command_has_no_folders(monkeypatch):
    words = ["x", "bench", "layer", "--json", "/home/me/a.jsonl", "--routing", "replay:/home/me/b", "--model=glm-5.2"]
    monkeypatch.setattr(sys, "argv", words)
    assert records.command() == "moeloom bench layer --json a.jsonl --routing replay:b --model=glm-5.2"


def good_record(**changes) -> dict:
    values = {
        "date": "2026-12-01T00:00:00Z",
        "device": "GPU A",
        "torch": "2",
        "command": "moeloom",
        "model": "glm-5.2",
        "ep_size": 1,
        "virtual": False,
        "ep_slice": 8,
        "tokens": 8192,
        "routing": "random",
        "shared": False,
        "dtype": "bf16",
        "wgrad_dtype": "bf16",
        "pass": "fwd",
        "backend": "sonicmoe",
        "run": "r",
        "runs": 5,
        "kind": "layer",
        "is_layer": True,
        "seed": 0,
        "l2": "cold",
        "ms_median": 10.0,
        "ms_min": 9.0,
        "ms_max": 12,
        "useful_tflops": 512.0,
        "floor_ms": 8.0,
        "floor_terms": {"bytes": 10**9},
        "gemm_ceiling_tflops": 690.0,
        "copy_gb_per_s": 4300.0,
    }
    return records.complete(values | changes)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "a.jsonl:3 must be a JSON object"),
        ("[1]", "a.jsonl:3 must be a JSON object; got list"),
        ('{"tokens": 1}', "a.jsonl:3 must have all fields of a record; got no commit, date"),
        (json.dumps(good_record(tokens="many")), "a.jsonl:3 must have a int in field 'tokens'; got 'many'"),
        (json.dumps(good_record(tokens=True)), "a.jsonl:3 must have a int in field 'tokens'; got True"),
        (json.dumps(good_record(kind="song")), "a.jsonl:3 must be of kind layer or errors; got 'song'"),
    ],
)
def test_malformed_lines_are_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(good_record()) + "\n\n" + line + "\n")
    with pytest.raises(DataError, match=message):
        bench("plot", path, "--out", tmp_path)


def test_plots_keep_machines_apart_and_take_the_last_record(tmp_path):
    found = [good_record(useful_tflops=1.0), good_record(), good_record(device="GPU B"), good_record(ms_median=None)]
    found.append(good_record(l2="warm", useful_tflops=600.0))  # Where there are cold ones, they are drawn.
    names = sorted(p.name for p in draw_all(found, tmp_path))
    assert names == sorted(
        f"{n}-gpu-{d}-bf16-ep1.{kind}" for n in ("bars", "roofline") for d in "ab" for kind in ("png", "svg")
    )
    drawn = (tmp_path / "bars-gpu-a-bf16-ep1.svg").read_text()
    assert ">512<" in drawn and ">1<" not in drawn and "not a GPU speed" not in drawn
    with pytest.raises(DataError, match="hold a timing that succeeded"):
        draw_all([good_record(ms_median=None)], tmp_path)
    with pytest.raises(DataError, match="hold at least one record"):
        records.read([])
    with pytest.raises(DataError, match="be a readable text file"):
        records.read([tmp_path / "none.jsonl"])


@pytest.mark.gpu
def test_on_a_gpu_everything_is_measured(tmp_path):
    path = tmp_path / "a.jsonl"
    arguments = ["--model", "glm-5.2-scaled", "--tokens", "512", "--against", "torch,reference,cublas-dense"]
    code, text = bench("layer", *arguments, "--seconds", "0.3", "--warmup", "0.5", "--l2", "both", "--json", path)
    found = records.read([path])
    assert code == 0 and len(found) == 2 * 2 * 3 and "not a GPU speed" not in text
    for r in found:
        assert r["error"] is None and r["ms_median"] > 0 and (r["sm_clock_mhz"] is None or r["sm_clock_mhz"] > 0)
        if r["is_layer"]:
            assert r["launches"] > 2 and r["peak_bytes"] > 0 and 0 < r["host_us"] <= r["host_us_p99"]
            assert r["host_bound_tokens"] > 0 and r["host_samples"] >= 5
