"""Copies by bulk loads and stores: a pipeline over a 1-D tensor, and boxes of tensors with 1 to 5 axes."""

import torch

from moeloom.compat import bulk_wait, fence_async_shared, gl, gluon, mbarrier, tma_load, tma_store
from tests.emulator.harness import Case, blank, box, guarded, normal, rng


@gluon.jit
def fetch(src, bufs, full, tile, j, BLOCK: gl.constexpr, STAGES: gl.constexpr, pred=True):
    """Start the load of a tile into the buffer of turn j."""
    s = j % STAGES
    mbarrier.expect(full.index(s), BLOCK * 2, pred=pred)
    tma_load(src, [tile * BLOCK], full.index(s), bufs.index(s), pred=pred)


@gluon.jit
def copy_line(src, dst, num_tiles, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Copy a 1-D tensor tile by tile; tile j + 1 is loaded while tile j is stored. bf16[num_tiles * BLOCK], grid: any."""
    bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK], src.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    count = (num_tiles - first + step - 1) // step
    fetch(src, bufs, full, first, 0, BLOCK, STAGES)
    for j in range(count):
        s = j % STAGES
        mbarrier.wait(full.index(s), (j // STAGES) & 1)
        tma_store(dst, [(first + j * step) * BLOCK], bufs.index(s))
        # The next load overwrites the buffer of store j + 1 - STAGES.
        bulk_wait(STAGES - 1)
        fetch(src, bufs, full, first + (j + 1) * step, j + 1, BLOCK, STAGES, pred=j + 1 < count)
    bulk_wait(0)


@gluon.jit
def load_box(src, c0, c1, c2, c3, c4, bar, buf, AXES: gl.constexpr):
    """Start the load of the box at (c0, c1, ...), of which the first AXES count."""
    if AXES == 1:
        tma_load(src, [c0], bar, buf)
    elif AXES == 2:
        tma_load(src, [c0, c1], bar, buf)
    elif AXES == 3:
        tma_load(src, [c0, c1, c2], bar, buf)
    elif AXES == 4:
        tma_load(src, [c0, c1, c2, c3], bar, buf)
    else:
        tma_load(src, [c0, c1, c2, c3, c4], bar, buf)


@gluon.jit
def store_box(dst, c0, c1, c2, c3, c4, buf, AXES: gl.constexpr):
    """Start the store of the box at (c0, c1, ...)."""
    if AXES == 1:
        tma_store(dst, [c0], buf)
    elif AXES == 2:
        tma_store(dst, [c0, c1], buf)
    elif AXES == 3:
        tma_store(dst, [c0, c1, c2], buf)
    elif AXES == 4:
        tma_store(dst, [c0, c1, c2, c3], buf)
    else:
        tma_store(dst, [c0, c1, c2, c3, c4], buf)


@gluon.jit
def copy_boxes(
    src,
    dst,
    n1,
    n2,
    n3,
    n4,
    AXES: gl.constexpr,
    B0: gl.constexpr,
    B1: gl.constexpr,
    B2: gl.constexpr,
    B3: gl.constexpr,
    B4: gl.constexpr,
    SHAPE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Write ``src + 1``, one box a CTA; n1..n4 count the boxes along axes 1..4. What lies outside is not written."""
    inbox = gl.allocate_shared_memory(gl.bfloat16, SHAPE, src.layout)
    outbox = gl.allocate_shared_memory(gl.bfloat16, SHAPE, dst.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, 1)
    pid = gl.program_id(0)
    c4 = pid % n4 * B4
    c3 = pid // n4 % n3 * B3
    c2 = pid // n4 // n3 % n2 * B2
    c1 = pid // n4 // n3 // n2 % n1 * B1
    c0 = pid // n4 // n3 // n2 // n1 * B0
    mbarrier.expect(full, B0 * B1 * B2 * B3 * B4 * 2)
    load_box(src, c0, c1, c2, c3, c4, full, inbox, AXES)
    mbarrier.wait(full, 0)
    outbox.store((inbox.load(LAYOUT).to(gl.float32) + 1.0).to(gl.bfloat16))
    fence_async_shared()
    store_box(dst, c0, c1, c2, c3, c4, outbox, AXES)
    bulk_wait(0)


class Line(Case):
    """`copy_line` of 7 tiles on 2 CTAs."""

    tiles, block = 7, 256

    def inputs(self):
        return {"src": normal(rng(), self.tiles * self.block)}

    def build(self, emu):
        src, dst = guarded(self.inputs()["src"]), guarded(blank(self.tiles * self.block))
        args = dict(src=box(src, self.block), dst=box(dst, self.block), num_tiles=self.tiles)
        emu.launch(copy_line, 2, args | dict(BLOCK=self.block, STAGES=2))
        return {"dst": dst}

    def expected(self):
        return {"dst": self.inputs()["src"]}


class Boxes(Case):
    """`copy_boxes` of a tensor that is no whole number of boxes."""

    def __init__(self, shape, block):
        self.shape, self.block = shape, block

    def inputs(self):
        return {"src": torch.randint(-8, 8, self.shape, generator=rng()).to(torch.bfloat16)}

    def build(self, emu):
        axes = len(self.shape)
        src, dst = guarded(self.inputs()["src"]), guarded(blank(*self.shape))
        boxes = [-(-n // b) for n, b in zip(self.shape, self.block, strict=True)]
        grid = torch.Size(boxes).numel()
        counts, sizes = boxes + [1] * (5 - axes), self.block + [1] * (5 - axes)
        args = {"src": box(src, *self.block), "dst": box(dst, *self.block)}
        args |= {f"n{i}": counts[i] for i in range(1, 5)} | {f"B{i}": sizes[i] for i in range(5)}
        layout = gl.BlockedLayout(
            [1] * axes, [1] * (axes - 1) + [32], [4] + [1] * (axes - 1), list(range(axes - 1, -1, -1))
        )
        emu.launch(copy_boxes, grid, args | dict(AXES=axes, SHAPE=self.block, LAYOUT=layout))
        return {"dst": dst}

    def expected(self):
        return {"dst": self.inputs()["src"] + 1}


CASES = {
    "line": Line(),
    "boxes1": Boxes([152], [64]),
    "boxes2": Boxes([10, 40], [4, 16]),
    "boxes3": Boxes([5, 6, 24], [2, 4, 16]),
    "boxes4": Boxes([3, 3, 5, 24], [2, 2, 4, 16]),
    "boxes5": Boxes([3, 2, 3, 5, 24], [2, 1, 2, 4, 16]),
}
