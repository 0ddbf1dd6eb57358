"""A check that a GPU hands memory between CTAs as :mod:`moeloom.kernels.sync` promises; ``moeloom doctor`` runs it.

Producer partitions fill the slots of a small ring with row blocks of 128 x 32 numbers, consumer partitions of any CTA
read them, every number is compared. Row block ``b`` lies in slot ``b % slots``; it is written by bulk stores if ``b``
is even, else by ordinary ones, and read by bulk loads if ``b // 2`` is even, so all four pairs occur. Work is handed
out by tickets and every wait points to an earlier ticket, so one resident CTA is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeloom.compat import (
    TensorDescriptor,
    alloc_mbarriers,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma_load,
    tma_store,
    warp_specialize,
)
from moeloom.kernels.sync import await_, publish, ticket

ROWS: gl.constexpr = gl.constexpr(128)
COLUMNS: gl.constexpr = gl.constexpr(32)
#: Of both partitions.
WARPS: gl.constexpr = gl.constexpr(4)
LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _places(slot):
    """Offsets of a slot's elements in the ring."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return (slot * ROWS + rows)[:, None] * COLUMNS + columns[None, :]


@gluon.jit
def _produce(ring_desc, ring, buffer, tickets, ready, taken, trouble, blocks, deadline_ns, SLOTS: gl.constexpr):
    off = 0
    block = ticket(tickets)
    while block < blocks:
        if block >= SLOTS:
            off = await_(taken + block - SLOTS, 1, deadline_ns, off, "gpu", True)
        if off == 0:
            slot = block % SLOTS
            # As if the ring had no end: each number occurs once.
            numbers = _places(block)
            if block % 2 == 0:
                buffer.store(numbers)
                # The bulk store reads shared memory through another proxy than the lines above wrote it.
                fence_async_shared()
                thread_barrier()
                tma_store(ring_desc, [slot * ROWS, 0], buffer)
                publish(ready + block, 1, "gpu", True)
            else:
                gl.store(ring + _places(slot), numbers)
                publish(ready + block, 1, "gpu", False)
        block = ticket(tickets)
    gl.atomic_add(trouble + 1, off, sem="relaxed", scope="gpu")


@gluon.jit
def _consume(ring_desc, ring, buffer, full, tickets, ready, taken, trouble, blocks, deadline_ns, SLOTS: gl.constexpr):
    off = 0
    parity = 0
    wrong = 0
    block = ticket(tickets)
    while block < blocks:
        off = await_(ready + block, 1, deadline_ns, off, "gpu", True)
        if off == 0:
            slot = block % SLOTS
            expected = _places(block)
            numbers = expected
            if (block // 2) % 2 == 0:
                mbarrier.expect(full.index(0), ROWS * COLUMNS * 4)
                tma_load(ring_desc, [slot * ROWS, 0], full.index(0), buffer)
                mbarrier.wait(full.index(0), parity)
                parity ^= 1
                numbers = buffer.load(LAYOUT)
            else:
                numbers = gl.load(ring + _places(slot))
            wrong += gl.sum(gl.sum((numbers != expected).to(gl.int32), 1), 0)
            # Nothing was stored, but the slot must not be written over before all threads have read it.
            publish(taken + block, 1, "gpu", False)
        block = ticket(tickets)
    gl.atomic_add(trouble, wrong, sem="relaxed", scope="gpu")
    gl.atomic_add(trouble + 1, off, sem="relaxed", scope="gpu")


@gluon.jit
def handshake(ring_desc, ring, tickets, ready, taken, trouble, blocks, deadline_ns, SLOTS: gl.constexpr):
    """Pass ``blocks`` row blocks through a ring of ``SLOTS``.

    Args:
        ring_desc, ring: descriptor of, and pointer to, int32 [SLOTS * 128, 32].
        tickets, ready, taken: int32 [2], [blocks], [blocks], zero: next block to write and to read; flags.
        trouble: int32 [2], zero; counts wrong elements, and partitions that gave up.
        blocks, deadline_ns: int32; int64, of each wait, 0 for none.
    """
    out = gl.allocate_shared_memory(gl.int32, [ROWS, COLUMNS], ring_desc.layout)
    into = gl.allocate_shared_memory(gl.int32, [ROWS, COLUMNS], ring_desc.layout)
    full = alloc_mbarriers(1)
    mbarrier.init(full.index(0), 1)
    # Bulk loads signal the mbarrier, which ordinary stores have initialised.
    fence_async_shared()
    thread_barrier()
    warp_specialize(
        [
            (_produce, (ring_desc, ring, out, tickets, ready, taken, trouble, blocks, deadline_ns, SLOTS)),
            (_consume, (ring_desc, ring, into, full, tickets + 1, ready, taken, trouble, blocks, deadline_ns, SLOTS)),
        ],
        [WARPS],
        [96],
    )


@dataclass(frozen=True)
class Outcome:
    """What a check found: wrong elements of ``elements``, and partitions that waited for longer than the deadline."""

    wrong: int
    gave_up: int
    elements: int


def arguments(blocks: int, slots: int, deadline_s: float, device: object) -> dict:
    """Make the arguments of :func:`handshake` for up to 2**19 blocks; the ring holds -1, which never occurs."""
    import torch

    def ints(value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    box = [ROWS.value, COLUMNS.value]
    ring = ints(-1, slots * box[0], box[1])
    ring_desc = TensorDescriptor.from_tensor(ring, box, gl.NVMMASharedLayout.get_default_for(box, gl.int32))
    flags = dict(tickets=ints(0, 2), ready=ints(0, blocks), taken=ints(0, blocks), trouble=ints(0, 2))
    rest = dict(blocks=blocks, deadline_ns=int(deadline_s * 1e9), SLOTS=slots)
    return dict(ring_desc=ring_desc, ring=ring) | flags | rest


def check(device: object, *, slots: int = 64, deadline_s: float = 5.0) -> Outcome:
    """Pass 2**15 row blocks through a ring of ``slots`` on all SMs of a CUDA device; each wait may last ``deadline_s``.

    The device needs compute capability 9.0 or newer and an index. With few slots producers wait, too.
    """
    import torch

    given = arguments(1 << 15, slots, deadline_s, device)
    with torch.cuda.device(device):
        programs = torch.cuda.get_device_properties(device).multi_processor_count
        handshake[(programs,)](**given, num_warps=WARPS.value)
        wrong, gave_up = given["trouble"].tolist()
    return Outcome(wrong, gave_up, given["blocks"] * ROWS.value * COLUMNS.value)
