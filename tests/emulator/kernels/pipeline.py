"""A copy whose place in the ring of buffers is kept in an aggregate: index and phase instead of a running number."""

from moeloom.compat import (
    aggregate,
    alloc_mbarriers,
    bulk_wait,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    warp_specialize,
)
from tests.emulator.harness import Case, blank, box, guarded, normal, rng


@aggregate
class Place:
    """Where a partition is in a ring of `size` buffers, and the phase of that buffer's barriers."""

    index: gl.tensor
    phase: gl.tensor
    size: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, index, phase, size):
        self.index = index
        self.phase = phase
        self.size = gl.constexpr(size)

    @gluon.jit
    def next(self):
        """The place after this one."""
        last = self.index + 1 == self.size
        return Place(gl.where(last, 0, self.index + 1), gl.where(last, self.phase ^ 1, self.phase), self.size)


@gluon.jit
def first_place(phase, SIZE: gl.constexpr):
    """The first buffer, with the phase to wait for there."""
    return Place(gl.to_tensor(0), gl.to_tensor(phase), SIZE)


@gluon.jit
def load_warp(src, bufs, full, empty, num_tiles, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr):
    """Fill the ring."""
    # The buffers are empty at the start: a wait for the phase before the first returns at once.
    place = first_place(1, STAGES)
    for i in range(num_tiles):
        mbarrier.wait(empty.index(place.index), place.phase)
        mbarrier.expect(full.index(place.index), ROWS * COLS * 2)
        tma_load(src, [i * ROWS, 0], full.index(place.index), bufs.index(place.index))
        place = place.next()


@gluon.jit
def store_warps(dst, bufs, full, empty, num_tiles, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Empty the ring."""
    place = first_place(0, STAGES)
    for i in range(num_tiles):
        mbarrier.wait(full.index(place.index), place.phase)
        tma_store(dst, [i * ROWS, 0], bufs.index(place.index))
        bulk_wait(0)
        mbarrier.arrive(empty.index(place.index))
        place = place.next()


@gluon.jit
def copy_tiles(src, dst, num_tiles, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr):
    """dst = src, bf16 [num_tiles * ROWS, COLS] by descriptor. One CTA."""
    bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, COLS], src.layout)
    full = alloc_mbarriers(STAGES)
    empty = alloc_mbarriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 1)
    warp_specialize(
        [
            (store_warps, (dst, bufs, full, empty, num_tiles, ROWS, STAGES)),
            (load_warp, (src, bufs, full, empty, num_tiles, ROWS, COLS, STAGES)),
        ],
        [1],
        [40],
    )


class Tiles(Case):
    """8 tiles through 3 buffers."""

    tiles, rows, cols = 8, 16, 64

    def inputs(self):
        return {"src": normal(rng(), self.tiles * self.rows, self.cols)}

    def build(self, emu):
        src = guarded(self.inputs()["src"])
        dst = guarded(blank(*src.shape))
        args = dict(src=box(src, self.rows, self.cols), dst=box(dst, self.rows, self.cols), num_tiles=self.tiles)
        emu.launch(copy_tiles, 1, args | dict(ROWS=self.rows, COLS=self.cols, STAGES=3))
        return {"dst": dst}

    def expected(self):
        return {"dst": self.inputs()["src"]}


CASES = {"tiles": Tiles()}
