"""C = A . B^T by wgmma in one partition, bulk loads some steps ahead: A from shared memory or from registers, bf16 or fp8."""

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
    a, b, row, col, k, a_bufs, b_bufs, full, BYTES: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, pred=True
):
    """Start the loads of step k into its stage."""
    s = k % STAGES
    mbarrier.expect(full.index(s), BYTES, pred=pred)
    tma_load(a, [row, k * BK], full.index(s), a_bufs.index(s), pred=pred)
    tma_load(b, [col, k * BK], full.index(s), b_bufs.index(s), pred=pred)


@gluon.jit
def multiply(a_buf, b_buf, acc, use_acc, REGISTERS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Start acc += A . B^T for one stage."""
    if REGISTERS:
        a = a_buf.load(gl.DotOperandLayout(0, LAYOUT, WIDTH))
        out = warpgroup_mma(a, b_buf.permute((1, 0)), acc, is_async=True, use_acc=use_acc)
    else:
        out = warpgroup_mma(a_buf, b_buf.permute((1, 0)), acc, is_async=True, use_acc=use_acc)
    return out


@gluon.jit
def gemm(
    a,
    b,
    c,
    tiles_n,
    num_k,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """One tile of C a CTA. a [M, K], b [N, K] (bf16 or fp8), c bf16 [M, N], all by descriptor; num_k >= STAGES."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 256 // a.dtype.primitive_bitwidth])
    width: gl.constexpr = 32 // a.dtype.primitive_bitwidth
    # A wgmma in flight still reads its registers, which the next step's operand would overwrite.
    pending: gl.constexpr = 0 if REGISTERS else 1
    stage_bytes: gl.constexpr = (BM + BN) * BK * a.dtype.primitive_bitwidth // 8
    a_bufs = gl.allocate_shared_memory(a.dtype, [STAGES, BM, BK], a.layout)
    b_bufs = gl.allocate_shared_memory(b.dtype, [STAGES, BN, BK], b.layout)
    c_buf = gl.allocate_shared_memory(c.dtype, [BM, BN], c.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
    row = gl.program_id(0) // tiles_n * BM
    col = gl.program_id(0) % tiles_n * BN
    for i in gl.static_range(STAGES - 1):
        fetch(a, b, row, col, i, a_bufs, b_bufs, full, stage_bytes, BK, STAGES)
    acc = gl.zeros((BM, BN), gl.float32, layout)
    for k in range(num_k):
        s = k % STAGES
        mbarrier.wait(full.index(s), (k // STAGES) & 1)
        acc = multiply(a_bufs.index(s), b_bufs.index(s), acc, k > 0, REGISTERS, width, layout)
        # One wgmma stays in flight; the one before it has read the stage that is loaded next.
        acc = warpgroup_mma_wait(pending, deps=(acc,))
        ahead = k + STAGES - 1
        fetch(a, b, row, col, ahead, a_bufs, b_bufs, full, stage_bytes, BK, STAGES, pred=ahead < num_k)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    c_buf.store(acc.to(c.dtype))
    fence_async_shared()
    tma_store(c, [row, col], c_buf)
    bulk_wait(0)


class Gemm(Case):
    """`gemm` of 128 x 128 x 256 in 4 tiles."""

    m, n, k = 128, 128, 256

    def __init__(self, dtype=torch.bfloat16, registers=False):
        self.dtype, self.registers = dtype, registers

    def inputs(self):
        generator = rng()
        return {
            name: normal(generator, rows, self.k, dtype=self.dtype) for name, rows in (("a", self.m), ("b", self.n))
        }

    def build(self, emu):
        a, b = (guarded(t) for t in self.inputs().values())
        c = guarded(blank(self.m, self.n))
        sizes = dict(BM=64, BN=64, BK=64, STAGES=3, REGISTERS=self.registers)
        args = dict(a=box(a, 64, 64), b=box(b, 64, 64), c=box(c, 64, 64), tiles_n=self.n // 64, num_k=self.k // 64)
        emu.launch(gemm, 4, args | sizes)
        return {"c": c}

    def expected(self):
        a, b = (t.float() for t in self.inputs().values())
        return {"c": a @ b.T}


CASES = {
    "shared": Gemm(),
    "registers": Gemm(registers=True),
    "fp8": Gemm(torch.float8_e4m3fn),
    "fp8_registers": Gemm(torch.float8_e4m3fn, registers=True),
}
