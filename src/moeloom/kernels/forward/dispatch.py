"""The dispatch warps: pull token rows from the ranks that hold them into the ring."""

from __future__ import annotations

from moeloom.compat import gl, gluon
from moeloom.kernels.forward.parts import DISPATCH_ROLE, ROWS, memory_of, report
from moeloom.kernels.sync import await_, publish, ticket

#: Columns at a time of what is left of a row behind the last whole chunk.
REST: gl.constexpr = gl.constexpr(256)


@gluon.jit
def _sources(tables, row, hidden, TOP_K: gl.constexpr, RANKS: gl.constexpr):
    """Return pointers to the tokens of rows, and whether they are rows at all."""
    slot = gl.load(tables.row_slot + row)
    rank = row * 0
    if RANKS > 1:
        rank = gl.maximum(gl.load(tables.row_rank + row), 0)
    base = memory_of(tables.x_pointers, rank)
    token = gl.maximum(slot, 0) // TOP_K
    return base + token.to(gl.int64) * hidden, slot >= 0


@gluon.jit
def _copy(source, out, is_row, first, hidden, COLUMNS: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr):
    """Copy columns of some rows; zeros where there is no row. Without MASKED all columns must exist."""
    column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    if MASKED:
        inside = (column < hidden)[None, :]
        value = gl.load(source[:, None] + column[None, :], mask=is_row[:, None] & inside, other=0.0)
        gl.store(out[:, None] + column[None, :], value, mask=(is_row | True)[:, None] & inside)
    else:
        value = gl.load(source[:, None] + column[None, :], mask=is_row[:, None] & (column >= 0)[None, :], other=0.0)
        gl.store(out[:, None] + column[None, :], value)


@gluon.jit
def dispatch_warps(
    tables,
    sizes,
    counters,
    TOP_K: gl.constexpr,
    RANKS: gl.constexpr,
    PIECE: gl.constexpr,
    HEIGHT: gl.constexpr,
    WIDTH: gl.constexpr,
    DISPATCH: gl.constexpr,
):
    """Pull rows in pieces of ``PIECE``; padding rows become zeros.

    ``HEIGHT`` rows times ``WIDTH`` columns are in flight at a time. Without ``DISPATCH`` nothing is pulled, for
    measurements.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, gl.num_warps()], [1, 0])
    pieces: gl.constexpr = ROWS // PIECE
    which = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    hidden = gl.multiple_of(sizes.hidden, 16)
    whole = sizes.hidden // WIDTH * WIDTH
    off = 0
    num_pieces = sizes.blocks * pieces
    if not DISPATCH:
        num_pieces = 0
    piece = ticket(counters.pieces)
    while piece < num_pieces:
        block = piece // pieces
        row = piece * PIECE + which
        # Before the wait, because it does not depend on it.
        source, is_row = _sources(tables, row, hidden, TOP_K, RANKS)
        if block >= sizes.ring:
            before = off
            flag = counters.h_ready + (block - sizes.ring)
            off = await_(flag, sizes.gate_up_tiles, counters.deadline_ns, off, "gpu", False)
            report(counters, before, off, DISPATCH_ROLE, block)
        if off == 0:
            at = (block % sizes.ring) * ROWS + (piece % pieces) * PIECE + which
            out = tables.x_ring + at.to(gl.int64) * hidden
            for i in range(1, PIECE // HEIGHT + 1):
                now, is_row_now = source, is_row
                # The next rows' places are looked up while these are copied; behind the last there is nothing to see.
                ahead = piece * PIECE + gl.minimum(i, PIECE // HEIGHT - 1) * HEIGHT + which
                source, is_row = _sources(tables, ahead, hidden, TOP_K, RANKS)
                for first in range(0, whole, WIDTH):
                    _copy(now, out, is_row_now, first, hidden, WIDTH, False, layout)
                for first in range(whole, hidden, REST):
                    _copy(now, out, is_row_now, first, hidden, REST, True, layout)
                out += HEIGHT * hidden
            publish(counters.x_ready + block, 1, "gpu", False)
        piece = ticket(counters.pieces)
