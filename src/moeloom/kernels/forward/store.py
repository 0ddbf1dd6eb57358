"""The store warps: hidden rows and saved pre-activations by bulk stores, result rows into the slots of their ranks."""

from __future__ import annotations

from moeloom.compat import bulk_wait, bulk_wait_writes, fence_proxy_async, gl, gluon, thread_barrier, tma_store
from moeloom.kernels.forward.order import IS_DOWN, IS_GATE_UP
from moeloom.kernels.forward.parts import COLUMNS, HALF, PART, ROWS, STORE_ROLE, memory_of, receive, report, unpack
from moeloom.kernels.sync import await_, publish

#: Rows that are pushed at a time, so that their data fits the registers of few warps.
STRIP: gl.constexpr = gl.constexpr(64)


@gluon.jit
def _write_hidden(hidden_ring, outbox, out, ring_row, tile, off):
    """Write the hidden columns of a gate/up tile."""
    for part in gl.static_range(HALF // PART):
        outbox.wait_full(out)
        if off == 0:
            tma_store(hidden_ring, [ring_row, tile * HALF + part * PART], outbox.buffers.index(out % outbox.count))
        bulk_wait(0)
        outbox.release(out)
        out += 1
    return out


@gluon.jit
def _write_saved(gate_up, outbox, out, block, tile, off):
    """Write the pre-activations of a gate/up tile."""
    for side in gl.static_range(2):
        for part in gl.static_range(HALF // PART):
            outbox.wait_full(out)
            if off == 0:
                buffer = outbox.buffers.index(out % outbox.count).reshape([ROWS, 1, PART])
                tma_store(gate_up, [block * ROWS, side, tile * HALF + part * PART], buffer)
            bulk_wait(0)
            outbox.release(out)
            out += 1
    return out


@gluon.jit
def _slots(tables, row, off, hidden, RANKS: gl.constexpr):
    """Return pointers to the slots of rows, and whether they are rows that are to be pushed."""
    slot = gl.load(tables.row_slot + row)
    rank = row * 0
    if RANKS > 1:
        rank = gl.maximum(gl.load(tables.row_rank + row), 0)
    base = memory_of(tables.slot_pointers, rank)
    return base + gl.maximum(slot, 0).to(gl.int64) * hidden, (slot >= 0) & (off == 0)


@gluon.jit
def _push(tables, outbox, out, block, tile, off, hidden, RANKS: gl.constexpr, PUSH: gl.constexpr):
    """Push the rows of a down tile, each into its own slot (token, k) on the rank that it came from."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = block * ROWS + gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    column = gl.arange(0, PART, gl.SliceLayout(0, layout))
    hidden = gl.multiple_of(hidden, 16)
    # Looked up while the math warps are still busy with the tile.
    upper, upper_live = _slots(tables, row, off, hidden, RANKS)
    lower, lower_live = _slots(tables, row + STRIP, off, hidden, RANKS)
    for part in gl.static_range(COLUMNS // PART):
        first = tile * COLUMNS + part * PART
        there = (column >= 0) & (first < hidden)
        outbox.wait_full(out)
        buffer = outbox.buffers.index(out % outbox.count)
        value = buffer.slice(0, STRIP, 0).load(layout)
        if PUSH:
            gl.store(upper[:, None] + (first + column)[None, :], value, mask=upper_live[:, None] & there[None, :])
        value = buffer.slice(STRIP, STRIP, 0).load(layout)
        outbox.release(out)
        if PUSH:
            gl.store(lower[:, None] + (first + column)[None, :], value, mask=lower_live[:, None] & there[None, :])
        out += 1
    return out


@gluon.jit
def store_warps(
    hidden_ring,
    gate_up,
    tables,
    outbox,
    mail,
    sizes,
    counters,
    RANKS: gl.constexpr,
    PUSH: gl.constexpr,
    SCOPE: gl.constexpr,
):
    """Write what the math warps made, and tell other CTAs. Without ``PUSH`` rows go nowhere, for measurements."""
    turn = 0
    out = 0
    lost = 0
    task = receive(mail, turn)
    while task >= 0:
        kind, block, tile, off = unpack(task)
        if off == 0:
            if kind == IS_GATE_UP:
                if block >= sizes.ring:
                    before = lost
                    flag = counters.d_done + (block - sizes.ring)
                    lost = await_(flag, sizes.down_tiles, counters.deadline_ns, lost, "gpu", True)
                    report(counters, before, lost, STORE_ROLE, block)
                out = _write_hidden(hidden_ring, outbox, out, (block % sizes.ring) * ROWS, tile, lost)
                if block < sizes.saved:
                    out = _write_saved(gate_up, outbox, out, block, tile, lost)
                if lost == 0:
                    publish(counters.h_ready + block, 1, "gpu", True)
            elif kind == IS_DOWN:
                out = _push(tables, outbox, out, block, tile, lost, sizes.hidden, RANKS, PUSH)
                if lost == 0:
                    # Rows go by ordinary stores; as above, the check of the compiled order cannot tell kinds apart.
                    publish(counters.d_done + block, 1, "gpu", True)
                    publish(counters.pushed, 1, SCOPE, False)
        turn += 1
        task = receive(mail, turn)
    # Stores that a role which has given up did not publish must not outlive it.
    bulk_wait_writes(0)
    fence_proxy_async()
    thread_barrier()
