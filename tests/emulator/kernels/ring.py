"""A ring in global memory with laps: publish and await in one direction, back-pressure in the other."""

import torch

from moeloom.compat import (
    alloc_mbarriers,
    bulk_wait,
    bulk_wait_writes,
    fence_acq_rel,
    fence_proxy_async,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma_load,
    tma_store,
    warp_specialize,
)
from tests.emulator.harness import Case, blank, box, guarded, normal, rng


@gluon.jit
def until(flag, want):
    """Poll until the flag has reached a value. Orders nothing."""
    while gl.atomic_add(flag, 0, sem="relaxed", scope="gpu") < want:
        pass


@gluon.jit
def produce(src, ring, made, used, num_blocks, buf, full, SLOTS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Put the blocks of src into the ring by bulk stores, each once its slot has been used SLOTS blocks earlier."""
    for i in range(num_blocks):
        mbarrier.expect(full, ROWS * COLS * 2)
        tma_load(src, [i * ROWS, 0], full, buf)
        mbarrier.wait(full, i & 1)
        until(used, i - SLOTS + 1)
        fence_acq_rel("gpu")
        thread_barrier()
        fence_proxy_async()
        tma_store(ring, [i % SLOTS * ROWS, 0], buf)
        # Publish: the store is complete, the proxies agree, all threads are here; then the release.
        bulk_wait_writes(0)
        fence_proxy_async()
        thread_barrier()
        gl.atomic_add(made, 1, sem="release", scope="gpu")


@gluon.jit
def write(src, ring, made, used, num_blocks, SLOTS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """The same by ordinary loads and stores; src and ring are pointers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    col = gl.arange(0, COLS, gl.SliceLayout(0, layout))
    for i in range(num_blocks):
        value = gl.load(src + (i * ROWS + row)[:, None] * COLS + col[None, :])
        until(used, i - SLOTS + 1)
        fence_acq_rel("gpu")
        thread_barrier()
        gl.store(ring + (i % SLOTS * ROWS + row)[:, None] * COLS + col[None, :], value)
        thread_barrier()
        gl.atomic_add(made, 1, sem="release", scope="gpu")


@gluon.jit
def consume(
    ring,
    dst,
    made,
    used,
    num_blocks,
    inbox,
    outbox,
    full,
    SLOTS: gl.constexpr,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Write twice what comes through the ring to dst."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    for i in range(num_blocks):
        until(made, i + 1)
        fence_acq_rel("gpu")
        thread_barrier()
        fence_proxy_async()
        mbarrier.expect(full, ROWS * COLS * 2)
        tma_load(ring, [i % SLOTS * ROWS, 0], full, inbox)
        mbarrier.wait(full, i & 1)
        thread_barrier()
        gl.atomic_add(used, 1, sem="release", scope="gpu")
        value = inbox.load(layout)
        bulk_wait(0)
        outbox.store(value + value)
        fence_proxy_async()
        tma_store(dst, [i * ROWS, 0], outbox)
    bulk_wait(0)


@gluon.jit
def two_ctas(src, ring, dst, made, used, num_blocks, SLOTS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """dst = 2 src: CTA 0 produces, CTA 1 consumes, so both must be resident. bf16 [num_blocks * ROWS, COLS]."""
    buf = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], src.layout)
    full = alloc_mbarriers(1)
    mbarrier.init(full.index(0), 1)
    if gl.program_id(0) == 0:
        produce(src, ring, made, used, num_blocks, buf, full.index(0), SLOTS, ROWS, COLS)
    else:
        outbox = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], dst.layout)
        consume(ring, dst, made, used, num_blocks, buf, outbox, full.index(0), SLOTS, ROWS, COLS, gl.num_warps())


@gluon.jit
def two_proxies(
    src, ring, ring_box, dst, made, used, num_blocks, SLOTS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr
):
    """As `two_ctas`, with a producer that writes by ordinary stores what the consumer reads by bulk loads."""
    if gl.program_id(0) == 0:
        write(src, ring, made, used, num_blocks, SLOTS, ROWS, COLS)
    else:
        inbox = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], ring_box.layout)
        outbox = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], dst.layout)
        full = alloc_mbarriers(1)
        mbarrier.init(full.index(0), 1)
        consume(ring_box, dst, made, used, num_blocks, inbox, outbox, full.index(0), SLOTS, ROWS, COLS, gl.num_warps())


@gluon.jit
def two_partitions(src, ring, dst, made, used, num_blocks, SLOTS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """The same in one CTA, whose two partitions meet in global memory only."""
    buf = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], src.layout)
    inbox = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], ring.layout)
    outbox = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLS], dst.layout)
    full = alloc_mbarriers(2)
    mbarrier.init(full.index(0), 1)
    mbarrier.init(full.index(1), 1)
    warp_specialize(
        [
            (consume, (ring, dst, made, used, num_blocks, inbox, outbox, full.index(0), SLOTS, ROWS, COLS, 4)),
            (produce, (src, ring, made, used, num_blocks, buf, full.index(1), SLOTS, ROWS, COLS)),
        ],
        [1],
        [40],
    )


class Ring(Case):
    """10 blocks through a ring of 2 or 3."""

    blocks, rows, cols = 10, 16, 64

    def __init__(self, kernel, ctas, slots, **options):
        self.kernel, self.ctas, self.slots, self.options = kernel, ctas, slots, options

    def inputs(self):
        return {"src": normal(rng(), self.blocks * self.rows, self.cols)}

    def build(self, emu):
        src = guarded(self.inputs()["src"])
        ring, dst = guarded(blank(self.slots * self.rows, self.cols)), guarded(blank(*src.shape))
        made, used = (guarded(torch.zeros(1, dtype=torch.int32)) for _ in range(2))
        tensors = {"src": src, "ring": ring}
        args = {name: box(t, self.rows, self.cols) for name, t in (tensors | {"dst": dst}).items()}
        if self.kernel is two_proxies:
            args |= tensors | {"ring_box": args["ring"]}
        args |= dict(made=made, used=used, num_blocks=self.blocks)
        emu.launch(self.kernel, self.ctas, args | dict(SLOTS=self.slots, ROWS=self.rows, COLS=self.cols))
        return {"dst": dst}

    def expected(self):
        return {"dst": self.inputs()["src"] * 2}


CASES = {
    "two_ctas": Ring(two_ctas, 2, 3),
    "two_proxies": Ring(two_proxies, 2, 3),
    "one_cta": Ring(two_partitions, 1, 2, resident=1),
}
