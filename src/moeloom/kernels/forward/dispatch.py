"""The dispatch warp: pulls token rows from the ranks that hold them into the ring."""

from __future__ import annotations

from moeloom.compat import gl, gluon
from moeloom.kernels.forward.parts import DISPATCH_ROLE, ROWS, report
from moeloom.kernels.sync import await_, publish, ticket


@gluon.jit
def _source(pointers, row_rank, row_slot, row, hidden, TOP_K: gl.constexpr, RANKS: gl.constexpr):
    """Where a row's token lies, and whether it is a row at all."""
    slot = gl.load(row_slot + row)
    rank = gl.to_tensor(0)
    if RANKS > 1:
        rank = gl.maximum(gl.load(row_rank + row), 0)
    base = gl.multiple_of(gl.load(pointers + rank), 16).to(gl.pointer_type(gl.bfloat16))
    token = gl.maximum(slot, 0) // TOP_K
    return base + token.to(gl.int64) * gl.multiple_of(hidden, 16), slot >= 0


@gluon.jit
def dispatch_warp(
    x_pointers,
    row_rank,
    row_slot,
    x_ring,
    sizes,
    counters,
    TOP_K: gl.constexpr,
    RANKS: gl.constexpr,
    PIECE: gl.constexpr,
    WIDTH: gl.constexpr,
    DISPATCH: gl.constexpr,
):
    """Pull rows in pieces of ``PIECE``, ``WIDTH`` columns at a time; padding rows become zeros.

    Without ``DISPATCH`` nothing is pulled, for measurements.
    """
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    pieces: gl.constexpr = ROWS // PIECE
    column = gl.arange(0, WIDTH, layout)
    hidden = sizes.hidden
    off = 0
    piece = ticket(counters.pieces)
    num_pieces = sizes.blocks * pieces
    if not DISPATCH:
        num_pieces = 0
    while piece < num_pieces:
        block = piece // pieces
        row = piece * PIECE
        # Before the wait, because it does not depend on it.
        source, live = _source(x_pointers, row_rank, row_slot, row, hidden, TOP_K, RANKS)
        if block >= sizes.ring:
            before = off
            flag = counters.h_ready + (block - sizes.ring)
            off = await_(flag, sizes.gate_up_tiles, counters.deadline_ns, off, "gpu", False)
            report(counters, before, off, DISPATCH_ROLE, block)
        if off == 0:
            at = (block % sizes.ring) * ROWS + (piece % pieces) * PIECE
            out = x_ring + at.to(gl.int64) * gl.multiple_of(hidden, 16)
            for i in range(PIECE):
                now, is_row = source, live
                # The next row's place is looked up while this one is copied.
                source, live = _source(
                    x_pointers, row_rank, row_slot, gl.minimum(row + i + 1, row + PIECE - 1), hidden, TOP_K, RANKS
                )
                for first in range(0, hidden, WIDTH):
                    inside = first + column < hidden
                    value = gl.load(now + first + column, mask=inside & is_row, other=0.0)
                    gl.store(out + first + column, value, mask=inside)
                out += gl.multiple_of(hidden, 16)
            publish(counters.x_ready + block, 1, "gpu", False)
        piece = ticket(counters.pieces)
