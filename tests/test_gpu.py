"""The reference backend on a CUDA device: same results, same bits over layouts and repeats, training that repeats itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from moeloom import MoEConfig
from tests import cases
from tests.cases import LAYOUTS, ROUTED, ROUTINGS, Case, Inputs
from tests.oracle import dense, relative_l2
from tests.ranks import run_ranks, values

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16)


def run(inputs: Inputs, group=None, config: MoEConfig | None = None) -> dict[str, torch.Tensor]:
    """Run the reference; on a GPU ``auto`` would take another backend."""
    return cases.run(inputs, group, replace(config or MoEConfig(), backend="reference"))


def on_gpu(inputs: Inputs) -> Inputs:
    moved = {n: v.cuda() for n, v in vars(inputs).items() if isinstance(v, torch.Tensor)}
    return replace(inputs, **moved)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_dense_loop(routing, poison):
    case = Case(
        tokens=150, routing=routing, dtype=torch.float64, shared=12, shared_gate=True, limit=0.7, signed_weights=True
    )
    got, want = run(on_gpu(case.make())), dense(case.make())
    for name in want:
        assert relative_l2(got[name].cpu(), want[name]) < 1e-12, name


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_error_against_fp64(dtype):
    case = Case(tokens=1000, hidden=256, inner=192, experts=8, dtype=dtype, shared=64)
    got, want = run(on_gpu(case.make())), dense(case.make())
    for name in want:
        assert relative_l2(got[name].cpu(), want[name]) < (2e-2 if dtype == torch.bfloat16 else 2e-6), name


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_equal_bits_over_layouts_and_repeats(dtype, poison):
    case = Case(tokens=1500, hidden=256, inner=192, experts=8, top_k=3, routing="zipf", dtype=dtype, shared=64)
    want = run(on_gpu(case.make()))
    for config in (*LAYOUTS, *LAYOUTS):
        got = run(on_gpu(case.make()), config=config)
        assert all(torch.equal(got[n], want[n]) for n in ROUTED)


def two_ranks(rank: int, world: int, case: Case) -> dict:
    share = case.tokens // 2
    part = on_gpu(case.make().part(rank * share, rank * share + share, rank, 2))
    got = run(part, group=dist.group.WORLD, config=LAYOUTS[1])
    return {n: t.float().cpu().numpy() for n, t in got.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_two_processes_that_share_the_gpu(dtype):
    case = Case(tokens=600, hidden=64, inner=48, experts=8, top_k=3, dtype=dtype)
    outcomes = values(run_ranks(two_ranks, 2, case))
    want = run(on_gpu(case.make()))
    for name in ROUTED:
        got = torch.cat([torch.from_numpy(o[name]) for o in outcomes])
        assert torch.equal(got, want[name].float().cpu()), name


def test_training_repeats_its_bits(tmp_path):
    from moeloom.train.data import load_text
    from moeloom.train.loop import Trainer
    from moeloom.train.report import Reporter
    from tests.test_training import SMOKE, tensors

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    runs = []
    for name in ("a", "b"):
        device = torch.device("cuda")
        options = replace(SMOKE, steps=30)
        corpus = load_text(None)
        trainer = Trainer(
            options, corpus, tmp_path / name, group=None, device=device, resume=None, reporter=Reporter(True)
        )
        trainer.run()
        runs.append(tensors(tmp_path / name))
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])
