"""A persistent GEMM whose CTAs take output tiles by in-order tickets."""

import torch

from moeloom.compat import (
    bulk_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tests.emulator.harness import Case, blank, box, guarded, normal, rng


@gluon.jit
def fetch(
    a,
    b,
    row,
    col,
    k,
    step,
    a_bufs,
    b_bufs,
    full,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    pred=True,
):
    """Start the loads of step k of a tile; `step` counts the steps of all tiles."""
    s = step % STAGES
    mbarrier.expect(full.index(s), (BM + BN) * BK * 2, pred=pred)
    tma_load(a, [row, k * BK], full.index(s), a_bufs.index(s), pred=pred)
    tma_load(b, [col, k * BK], full.index(s), b_bufs.index(s), pred=pred)


@gluon.jit
def take(counter):
    """Draw the next ticket."""
    return gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")


@gluon.jit
def persistent_gemm(
    a,
    b,
    c,
    counter,
    drawn,
    num_tiles,
    tiles_n,
    num_k,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """C = A . B^T, bf16 by descriptor. counter int32[1] starts at 0; drawn int32[num_tiles] counts how often each tile was made."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    a_bufs = gl.allocate_shared_memory(a.dtype, [STAGES, BM, BK], a.layout)
    b_bufs = gl.allocate_shared_memory(b.dtype, [STAGES, BN, BK], b.layout)
    c_buf = gl.allocate_shared_memory(c.dtype, [BM, BN], c.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
    step = 0
    ticket = take(counter)
    while ticket < num_tiles:
        row = ticket // tiles_n * BM
        col = ticket % tiles_n * BN
        for i in gl.static_range(STAGES - 1):
            fetch(a, b, row, col, i, step + i, a_bufs, b_bufs, full, BM, BN, BK, STAGES)
        acc = gl.zeros((BM, BN), gl.float32, layout)
        for k in range(num_k):
            s = (step + k) % STAGES
            mbarrier.wait(full.index(s), ((step + k) // STAGES) & 1)
            acc = warpgroup_mma(a_bufs.index(s), b_bufs.index(s).permute((1, 0)), acc, is_async=True, use_acc=k > 0)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            ahead = k + STAGES - 1
            fetch(a, b, row, col, ahead, step + ahead, a_bufs, b_bufs, full, BM, BN, BK, STAGES, pred=ahead < num_k)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        step += num_k
        # The store of the tile before may still read the buffer.
        bulk_wait(0)
        c_buf.store(acc.to(c.dtype))
        fence_async_shared()
        tma_store(c, [row, col], c_buf)
        gl.atomic_add(drawn + ticket, 1, sem="relaxed", scope="gpu")
        ticket = take(counter)
    bulk_wait(0)


class Persistent(Case):
    """6 tiles on 2 CTAs."""

    m, n, k = 192, 128, 192

    def __init__(self, **options):
        self.options = options

    def inputs(self):
        generator = rng()
        return {"a": normal(generator, self.m, self.k), "b": normal(generator, self.n, self.k)}

    def build(self, emu):
        a, b = (guarded(t) for t in self.inputs().values())
        c = guarded(blank(self.m, self.n))
        counter, drawn = (guarded(torch.zeros(n, dtype=torch.int32)) for n in (1, 6))
        args = dict(a=box(a, 64, 64), b=box(b, 64, 64), c=box(c, 64, 64), counter=counter, drawn=drawn)
        sizes = dict(num_tiles=6, tiles_n=2, num_k=3, BM=64, BN=64, BK=64, STAGES=3)
        emu.launch(persistent_gemm, 2, args | sizes)
        return {"c": c, "drawn": drawn}

    def expected(self):
        a, b = (t.float() for t in self.inputs().values())
        return {"c": a @ b.T, "drawn": torch.ones(6, dtype=torch.int32)}


CASES = {"all": Persistent(), "one_at_a_time": Persistent(resident=1)}
