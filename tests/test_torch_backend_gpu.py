"""The torch backend on CUDA devices: right, repeatable, without a wait, in CUDA graphs, over ranks by gloo and by NCCL."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from moeloom import MoEConfig, PeerLost, SharedExperts, moe
from moeloom.backends.torch import forward
from tests.cases import ROUTED, ROUTINGS, Case, Inputs, run
from tests.oracle import dense, relative_l2
from tests.ranks import run_ranks, values
from tests.test_torch_backend import BF16, RECOMPUTE, TORCH, assert_close, assert_equal, layer_call

pytestmark = pytest.mark.gpu
CASE = replace(BF16, tokens=1000, hidden=256, inner=192, experts=16)
BOTH = pytest.mark.parametrize("config", [TORCH, RECOMPUTE], ids=["saved", "recomputed"])


def on_gpu(inputs: Inputs) -> Inputs:
    moved = {n: v.cuda() for n, v in vars(inputs).items() if isinstance(v, torch.Tensor)}
    return replace(inputs, **moved)


def on_cpu(results: dict) -> dict:
    return {name: value.cpu() for name, value in results.items()}


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_dense_loop_and_itself(routing, dtype, config, poison):
    inputs = replace(CASE, routing=routing, dtype=dtype).make()
    got = on_cpu(run(on_gpu(inputs), config=config))
    assert_close(got, dense(inputs), 1e-12 if dtype == torch.float64 else 3e-2)
    assert_equal(on_cpu(run(on_gpu(inputs), config=config)), got)


def test_saved_or_recomputed_auto_or_named_gives_the_same_bits():
    case = replace(CASE, routing="zipf")
    assert_equal(run(on_gpu(case.make()), config=RECOMPUTE), run(on_gpu(case.make()), config=TORCH))
    case = replace(case, dtype=torch.float32)  # No kernel of ours takes it, on any GPU.
    assert_equal(run(on_gpu(case.make())), run(on_gpu(case.make()), config=TORCH))


def test_error_is_no_larger_than_torch_in_the_same_dtype():
    ours, theirs = [], []
    for seed in range(3):
        inputs = Case(tokens=512, hidden=256, inner=192, experts=8, dtype=torch.bfloat16, shared=64, seed=seed).make()
        want, got = dense(inputs), on_cpu(run(on_gpu(inputs), config=TORCH))
        low = dense(replace(inputs, topk_weights=inputs.topk_weights.bfloat16()), torch.bfloat16)
        for name in want:
            ours.append(relative_l2(got[name], want[name]))
            theirs.append(relative_l2(low[name], want[name]))
    assert sum(ours) / len(ours) <= 1.02 * sum(theirs) / len(theirs)
    assert max(ours) <= 1.5 * max(theirs)


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=129, hidden=7, inner=5, shared=3),
        Case(tokens=0, hidden=64, inner=32),
        Case(tokens=1),
        Case(tokens=300, experts=1500),
    ],
    ids=["loop-odd-widths", "no-token", "one-token", "loop-many-experts"],
)
def test_sizes_at_the_edges(case, poison):
    inputs = replace(case, dtype=torch.bfloat16).make()
    assert_close(on_cpu(run(on_gpu(inputs), config=TORCH)), dense(inputs), 3e-2)


class Step:
    """Forward and backward over tensors that stay where they are; what is in them may change."""

    def __init__(self, inputs: Inputs, config: MoEConfig) -> None:
        self.inputs, self.config = inputs, config
        self.leaves = {name: t.requires_grad_() for name, t in inputs.floats().items()}

    def __call__(self) -> dict[str, torch.Tensor]:
        out = self.forward()
        gradients = torch.autograd.grad(out, list(self.leaves.values()), self.inputs.d_out)
        return {"out": out.detach()} | dict(zip(self.leaves, gradients, strict=True))

    def forward(self) -> torch.Tensor:
        x, weights, gate_up, down, *shared = self.leaves.values()
        limit, ids = self.inputs.limit, self.inputs.ids
        shared = SharedExperts(*shared)
        return moe(x, ids, weights, gate_up, down, shared=shared, swiglu_limit=limit, config=self.config)


@BOTH
def test_the_host_never_waits(config):
    step = Step(on_gpu(CASE.make()), config)
    step()
    down = step.leaves["down"]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        down.main_grad = torch.zeros(down.shape, device="cuda")
        step.forward().backward(step.inputs.d_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert down.grad_added_to_main_grad and down.main_grad.abs().sum() > 0


@BOTH
def test_a_graph_replays_with_other_routes(config):
    step = Step(on_gpu(CASE.make()), config)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed, routing in enumerate(("random", "hot-expert", "none", "ragged", "one-route", "zipf")):
        fresh = on_gpu(replace(CASE, routing=routing, seed=seed + 1).make())
        with torch.no_grad():
            for name in ("x", "ids", "topk_weights", "d_out", "gate_up", "down"):
                getattr(step.inputs, name).copy_(getattr(fresh, name))
        for value in captured.values():
            value.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(captured, step())


def test_memory_at_the_peak():
    tokens, hidden, inner, experts, top_k = 4096, 1024, 512, 8, 8
    call = layer_call(on_gpu(Case(tokens, hidden, inner, experts, top_k, dtype=torch.bfloat16).make()))
    forward(call, save=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward(call, save=True)
    rows = tokens * top_k
    # All of SwiGLU is one piece here: an fp32 copy of [rows, I] beside the pre-activations and the hidden rows.
    most = 2 * rows * max(hidden + 3 * inner, 5 * inner) + 8 * tokens * hidden + 100 * rows + (16 << 20)
    assert torch.cuda.max_memory_allocated() - before <= most


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    """T * K * H = 2.4e9: the first and last tokens' results must be those of these tokens alone."""
    tokens, hidden, inner, top_k = 33000, 7168, 256, 10
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    ids, weights = torch.rand(tokens, 16, device="cuda").argsort(1)[:, :top_k], torch.rand(tokens, top_k, device="cuda")
    gate_up = torch.randn(16, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
    down = torch.randn(16, hidden, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5
    whole = x.clone().requires_grad_()
    out = moe(whole, ids, weights, gate_up, down, config=TORCH)
    out.backward(torch.ones_like(out))
    for part in (slice(0, 64), slice(tokens - 64, tokens)):
        few = x[part].clone().requires_grad_()
        want = moe(few, ids[part], weights[part], gate_up, down, config=TORCH)
        want.backward(torch.ones_like(want))
        assert relative_l2(out[part], want) < 5e-3 and relative_l2(whole.grad[part], few.grad) < 5e-3


def on_ranks(rank: int, world: int, jobs: list, nccl: bool) -> list:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group(backend="cpu:gloo,cuda:nccl") if nccl else dist.group.WORLD
    results = []
    for case, counts, saved_rows in jobs:
        config = MoEConfig(backend="torch", saved_rows=saved_rows[rank])
        first = sum(counts[:rank])
        part = case.make().part(first, first + counts[rank], rank, world)
        both = [on_cpu(run(on_gpu(part), group=group, config=config)) for _ in range(2)]
        assert_equal(*both)
        results.append({name: t.float().numpy() for name, t in both[0].items()})
    return results


def needs_two_gpus(nccl: bool) -> None:
    if nccl and torch.cuda.device_count() < 2:
        pytest.skip("marker gpu: NCCL needs two GPUs")


@pytest.mark.parametrize("nccl", [False, True], ids=["gloo", "nccl"])
def test_two_ranks_give_what_one_gives(nccl):
    needs_two_gpus(nccl)
    jobs = [
        (CASE, [600, 400], [None, None]),
        (replace(CASE, routing="zipf"), [999, 1], [0, None]),
        (replace(CASE, routing="ragged"), [0, 1000], [0, 0]),
        (replace(CASE, routing="none"), [500, 500], [None, None]),
    ]
    outcomes = values(run_ranks(on_ranks, 2, jobs, nccl))
    for number, (case, *_) in enumerate(jobs):
        want = on_cpu(run(on_gpu(case.make()), config=TORCH))
        for name in want:
            mine = [torch.from_numpy(v[number][name]) for v in outcomes]
            assert relative_l2(torch.cat(mine) if name in ROUTED else sum(mine), want[name]) < 2e-2, name


def dies_in_a_collective(rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    config = MoEConfig(backend="torch", timeout_s=3.0)
    part = on_gpu(CASE.make().part(rank * 500, rank * 500 + 500, rank, world))
    run(part, group=group, config=config)
    if rank == 1:
        dist.all_to_all_single = lambda *args, **kwargs: os._exit(9)
    run(part, group=group, config=config)


def test_rank_that_dies_before_a_collective_is_named():
    needs_two_gpus(True)
    first, _ = run_ranks(dies_in_a_collective, 2, seconds=60)
    assert isinstance(first.error, PeerLost) and first.error.rank == 1, f"{first.error!r}\n{first.trace}"
