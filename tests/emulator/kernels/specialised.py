"""A warp-specialised GEMM: a loader warp, math warps and a store warp, joined by rings of buffers in shared memory."""

from moeloom.compat import (
    bulk_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tests.emulator.harness import Case, blank, box, guarded, normal, rng


@gluon.jit
def my_share(num_tiles):
    """How many tiles this CTA makes."""
    return (num_tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def load_warp(
    a,
    b,
    a_bufs,
    b_bufs,
    full,
    empty,
    num_tiles,
    tiles_n,
    num_k,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fill the operand ring, tile after tile."""
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        for k in range(num_k):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), (BM + BN) * BK * 2)
            tma_load(a, [tile // tiles_n * BM, k * BK], full.index(s), a_bufs.index(s))
            tma_load(b, [tile % tiles_n * BN, k * BK], full.index(s), b_bufs.index(s))
            step += 1


@gluon.jit
def math_warps(
    a_bufs,
    b_bufs,
    c_bufs,
    full,
    empty,
    c_full,
    c_empty,
    num_tiles,
    num_k,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply what the operand ring holds and put tiles into the result ring."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    step = 0
    for turn in range(my_share(num_tiles)):
        acc = gl.zeros((BM, BN), gl.float32, layout)
        for k in range(num_k):
            s = step % STAGES
            mbarrier.wait(full.index(s), (step // STAGES) & 1)
            acc = warpgroup_mma(a_bufs.index(s), b_bufs.index(s).permute((1, 0)), acc, is_async=True, use_acc=k > 0)
            # All but the newest wgmma are done: the stage before this one is free.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        mbarrier.wait(c_empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
        c_bufs.index(turn % 2).store(acc.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(c_full.index(turn % 2))


@gluon.jit
def store_warp(c, c_bufs, c_full, c_empty, num_tiles, tiles_n, BM: gl.constexpr, BN: gl.constexpr):
    """Write the tiles of the result ring to memory."""
    for turn in range(my_share(num_tiles)):
        tile = gl.program_id(0) + turn * gl.num_programs(0)
        mbarrier.wait(c_full.index(turn % 2), (turn // 2) & 1)
        tma_store(c, [tile // tiles_n * BM, tile % tiles_n * BN], c_bufs.index(turn % 2))
        bulk_wait(0)
        mbarrier.arrive(c_empty.index(turn % 2))


@gluon.jit
def specialised_gemm(
    a, b, c, num_tiles, tiles_n, num_k, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr
):
    """C = A . B^T, bf16 by descriptor, num_k >= 1; tiles are dealt out round-robin."""
    a_bufs = gl.allocate_shared_memory(a.dtype, [STAGES, BM, BK], a.layout)
    b_bufs = gl.allocate_shared_memory(b.dtype, [STAGES, BN, BK], b.layout)
    c_bufs = gl.allocate_shared_memory(c.dtype, [2, BM, BN], c.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 1)
    for i in gl.static_range(2):
        mbarrier.init(c_full.index(i), 1)
        mbarrier.init(c_empty.index(i), 1)
    warp_specialize(
        [
            (math_warps, (a_bufs, b_bufs, c_bufs, full, empty, c_full, c_empty, num_tiles, num_k, BM, BN, STAGES)),
            (load_warp, (a, b, a_bufs, b_bufs, full, empty, num_tiles, tiles_n, num_k, BM, BN, BK, STAGES)),
            (store_warp, (c, c_bufs, c_full, c_empty, num_tiles, tiles_n, BM, BN)),
        ],
        [1, 1],
        [40, 40],
    )


class Specialised(Case):
    """6 tiles on 2 CTAs, each with 3 tiles of 3 steps through a ring of 2 stages."""

    m, n, k = 192, 128, 192

    def inputs(self):
        generator = rng()
        return {"a": normal(generator, self.m, self.k), "b": normal(generator, self.n, self.k)}

    def build(self, emu):
        a, b = (guarded(t) for t in self.inputs().values())
        c = guarded(blank(self.m, self.n))
        sizes = dict(num_tiles=6, tiles_n=2, num_k=3, BM=64, BN=64, BK=64, STAGES=2)
        emu.launch(specialised_gemm, 2, dict(a=box(a, 64, 64), b=box(b, 64, 64), c=box(c, 64, 64)) | sizes)
        return {"c": c}

    def expected(self):
        a, b = (t.float() for t in self.inputs().values())
        return {"c": a @ b.T}


CASES = {"gemm": Specialised()}
