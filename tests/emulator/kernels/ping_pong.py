"""Ping-pong: two math partitions take tiles in turn; one multiplies while the other writes its result out."""

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
def load_warp(
    a,
    b,
    a_bufs,
    b_bufs,
    full,
    empty,
    num_tiles,
    num_k,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fill the operand ring, tile after tile."""
    for step in range(num_tiles * num_k):
        s = step % STAGES
        mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), (BM + BN) * BK * 2)
        tma_load(a, [step // num_k * BM, step % num_k * BK], full.index(s), a_bufs.index(s))
        tma_load(b, [0, step % num_k * BK], full.index(s), b_bufs.index(s))


@gluon.jit
def math_warps(
    c,
    a_bufs,
    b_bufs,
    c_buf,
    full,
    empty,
    may_multiply,
    may_write,
    num_tiles,
    num_k,
    WHO: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Every second tile, beginning with WHO. The operand ring and the result buffer pass from turn to turn."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    for tile in range(WHO, num_tiles, 2):
        phase = (tile // 2) & 1
        acc = gl.zeros((BM, BN), gl.float32, layout)
        # Partition 0 begins: its first wait asks for the phase before the first, which is over.
        mbarrier.wait(may_multiply.index(WHO), phase ^ (1 - WHO))
        for k in range(num_k):
            step = tile * num_k + k
            s = step % STAGES
            mbarrier.wait(full.index(s), (step // STAGES) & 1)
            acc = warpgroup_mma(a_bufs.index(s), b_bufs.index(s).permute((1, 0)), acc, is_async=True, use_acc=k > 0)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(s))
        mbarrier.arrive(may_multiply.index(1 - WHO))
        mbarrier.wait(may_write.index(WHO), phase ^ (1 - WHO))
        c_buf.store(acc.to(gl.bfloat16))
        fence_async_shared()
        tma_store(c, [tile * BM, 0], c_buf)
        bulk_wait(0)
        mbarrier.arrive(may_write.index(1 - WHO))


@gluon.jit
def ping_pong_gemm(
    a, b, c, num_tiles, num_k, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr
):
    """C = A . B^T with one tile along N, bf16 by descriptor. One CTA, 4 + 4 math warps."""
    a_bufs = gl.allocate_shared_memory(a.dtype, [STAGES, BM, BK], a.layout)
    b_bufs = gl.allocate_shared_memory(b.dtype, [STAGES, BN, BK], b.layout)
    c_buf = gl.allocate_shared_memory(c.dtype, [BM, BN], c.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    may_multiply = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    may_write = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 1)
    for i in gl.static_range(2):
        mbarrier.init(may_multiply.index(i), 1)
        mbarrier.init(may_write.index(i), 1)
    warp_specialize(
        [
            (
                math_warps,
                (c, a_bufs, b_bufs, c_buf, full, empty, may_multiply, may_write, num_tiles, num_k, 0, BM, BN, STAGES),
            ),
            (
                math_warps,
                (c, a_bufs, b_bufs, c_buf, full, empty, may_multiply, may_write, num_tiles, num_k, 1, BM, BN, STAGES),
            ),
            (load_warp, (a, b, a_bufs, b_bufs, full, empty, num_tiles, num_k, BM, BN, BK, STAGES)),
        ],
        [4, 1],
        [160, 40],
    )


class PingPong(Case):
    """5 tiles of 2 steps."""

    m, n, k = 320, 64, 128

    def inputs(self):
        generator = rng()
        return {"a": normal(generator, self.m, self.k), "b": normal(generator, self.n, self.k)}

    def build(self, emu):
        a, b = (guarded(t) for t in self.inputs().values())
        c = guarded(blank(self.m, self.n))
        sizes = dict(num_tiles=5, num_k=2, BM=64, BN=64, BK=64, STAGES=3)
        emu.launch(ping_pong_gemm, 1, dict(a=box(a, 64, 64), b=box(b, 64, 64), c=box(c, 64, 64)) | sizes)
        return {"c": c}

    def expected(self):
        a, b = (t.float() for t in self.inputs().values())
        return {"c": a @ b.T}


CASES = {"gemm": PingPong()}
