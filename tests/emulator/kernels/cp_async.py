"""Copies by cp.async: a pipeline of groups, and a gather by one warp whose copies arrive at an mbarrier."""

import torch

from moeloom.compat import (
    cp_async,
    cp_async_arrive,
    cp_async_commit,
    cp_async_wait,
    gl,
    gluon,
    mbarrier,
    warp_specialize,
)
from tests.emulator.harness import Case, blank, guarded, normal, rng


@gluon.jit
def copy_groups(src, dst, n, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Copy bf16[n], one group of copies a block in flight before the block that is stored. One CTA."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK], gl.SwizzledSharedLayout(8, 1, 1, [0]))
    at = gl.arange(0, BLOCK, layout)
    count = gl.cdiv(n, BLOCK)
    for i in gl.static_range(STAGES - 1):
        cp_async(bufs.index(i), src + i * BLOCK + at, mask=i * BLOCK + at < n)
        cp_async_commit()
    for j in range(count):
        ahead = j + STAGES - 1
        where = ahead * BLOCK + at
        cp_async(bufs.index(ahead % STAGES), src + where, mask=where < n)
        cp_async_commit()
        cp_async_wait(STAGES - 1)
        gl.store(dst + j * BLOCK + at, bufs.index(j % STAGES).load(layout), mask=j * BLOCK + at < n)
    cp_async_wait(0)


@gluon.jit
def gather_warp(
    src, index, bufs, full, empty, num_blocks, COLS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr
):
    """Copy rows ``src[index]`` into the buffers, block by block."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    col = gl.arange(0, COLS, gl.SliceLayout(0, layout))
    for j in range(num_blocks):
        s = j % STAGES
        mbarrier.wait(empty.index(s), ((j // STAGES) & 1) ^ 1)
        chosen = gl.load(index + j * ROWS + row)
        where = gl.maximum(chosen, 0)[:, None] * COLS + col[None, :]
        cp_async(bufs.index(s), src + where, mask=(chosen >= 0)[:, None] & (col >= 0)[None, :])
        cp_async_arrive(full.index(s), increment_count=False)


@gluon.jit
def write_warps(dst, bufs, full, empty, num_blocks, COLS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Write the buffers to consecutive rows of dst; rows that were not copied hold zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    col = gl.arange(0, COLS, gl.SliceLayout(0, layout))
    for j in range(num_blocks):
        s = j % STAGES
        mbarrier.wait(full.index(s), (j // STAGES) & 1)
        value = bufs.index(s).load(layout)
        mbarrier.arrive(empty.index(s))
        gl.store(dst + (j * ROWS + row)[:, None] * COLS + col[None, :], value)


@gluon.jit
def gather_rows(src, index, dst, num_blocks, COLS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """dst[i] = src[index[i]], zeros where index[i] < 0. src bf16[any, COLS], index int32[num_blocks * ROWS]."""
    bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, COLS], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # Each of the producer's 32 threads arrives for its own copies.
        mbarrier.init(full.index(i), 32)
        mbarrier.init(empty.index(i), 1)
    warp_specialize(
        [
            (write_warps, (dst, bufs, full, empty, num_blocks, COLS, ROWS, STAGES)),
            (gather_warp, (src, index, bufs, full, empty, num_blocks, COLS, ROWS, STAGES)),
        ],
        [1],
        [40],
    )


class Groups(Case):
    """`copy_groups` with a block that is half outside."""

    n = 5 * 1024 + 512

    def inputs(self):
        return {"src": normal(rng(), self.n)}

    def build(self, emu):
        src, dst = guarded(self.inputs()["src"]), guarded(blank(self.n))
        emu.launch(copy_groups, 1, dict(src=src, dst=dst, n=self.n, BLOCK=1024, STAGES=3))
        return {"dst": dst}

    def expected(self):
        return {"dst": self.inputs()["src"]}


class Gather(Case):
    """`gather_rows` of 5 blocks of 8 rows."""

    rows, cols, blocks = 20, 64, 5

    def inputs(self):
        index = torch.randint(-2, self.rows, (self.blocks * 8,), generator=rng(1), dtype=torch.int32)
        return {"src": normal(rng(), self.rows, self.cols), "index": index}

    def build(self, emu):
        given = {name: guarded(t) for name, t in self.inputs().items()}
        dst = guarded(blank(self.blocks * 8, self.cols))
        emu.launch(gather_rows, 1, given | dict(dst=dst, num_blocks=self.blocks, COLS=self.cols, ROWS=8, STAGES=2))
        return {"dst": dst}

    def expected(self):
        src, index = self.inputs().values()
        return {"dst": torch.where(index[:, None] >= 0, src[index.clamp(min=0).long()], 0)}


CASES = {"groups": Groups(), "gather": Gather()}
