"""The load warp: takes tasks, waits for what they need, hands them on, and fills the ring of operands."""

from __future__ import annotations

from moeloom.compat import gl, gluon, mbarrier, tma_load
from moeloom.kernels.forward.order import IS_DOWN, IS_GATE_UP, locate
from moeloom.kernels.forward.parts import COLUMNS, HALF, LOAD_ROLE, ROWS, TOKENS, pack, report, send
from moeloom.kernels.sync import await_, ticket


@gluon.jit
def _load_gate_up(x_ring, gate_up_proj, a, b_halves, step, ring_row, expert, tile, hidden, DEPTH: gl.constexpr):
    """Load the operands of a gate/up tile: 128 gate and 128 up rows of the weight, side by side."""
    for k in range(hidden // DEPTH):
        s = step % a.count
        a.wait_empty(step)
        mbarrier.expect(a.full.index(s), (ROWS + COLUMNS) * DEPTH * 2)
        tma_load(x_ring, [ring_row, k * DEPTH], a.full.index(s), a.buffers.index(s))
        for side in gl.static_range(2):
            # Gate and up lie on an axis of their own: what reaches beyond I reads zeros, not the neighbour's rows.
            part = b_halves.index(2 * s + side).reshape([1, HALF, DEPTH])
            tma_load(gate_up_proj, [2 * expert + side, tile * HALF, k * DEPTH], a.full.index(s), part)
        step += 1
    return step


@gluon.jit
def _load_down(hidden_ring, down_proj, a, b_buffers, step, ring_row, expert, tile, inner, DEPTH: gl.constexpr):
    """Load the operands of a down tile."""
    for k in range(inner // DEPTH):
        s = step % a.count
        a.wait_empty(step)
        mbarrier.expect(a.full.index(s), (ROWS + COLUMNS) * DEPTH * 2)
        tma_load(hidden_ring, [ring_row, k * DEPTH], a.full.index(s), a.buffers.index(s))
        part = b_buffers.index(s).reshape([1, COLUMNS, DEPTH])
        tma_load(down_proj, [expert, tile * COLUMNS, k * DEPTH], a.full.index(s), part)
        step += 1
    return step


@gluon.jit
def load_warp(
    x_ring,
    hidden_ring,
    gate_up_proj,
    down_proj,
    tables,
    a,
    b_buffers,
    b_halves,
    mail,
    sizes,
    counters,
    DEPTH: gl.constexpr,
    PIECES: gl.constexpr,
    SUMS: gl.constexpr,
    SCOPE: gl.constexpr,
):
    """Work through the tasks in the order of their tickets.

    ``PIECES`` of x make a row block. Without ``SUMS`` the sums are left out, for measurements.
    """
    step = 0
    turn = 0
    off = 0
    tiles = sizes.blocks * (sizes.gate_up_tiles + sizes.down_tiles)
    num_tasks = tiles
    if SUMS:
        num_tasks += (sizes.tokens + TOKENS - 1) // TOKENS
    task = ticket(counters.tasks)
    while task < num_tasks:
        kind, block, tile = locate(task, sizes.blocks, sizes.minibatch, sizes.gate_up_tiles, sizes.down_tiles)
        before = off
        if kind == IS_GATE_UP:
            expert = gl.load(tables.block_expert + block)
            off = await_(counters.x_ready + block, PIECES, counters.deadline_ns, off, "gpu", True)
        elif kind == IS_DOWN:
            expert = gl.load(tables.block_expert + block)
            off = await_(counters.h_ready + block, sizes.gate_up_tiles, counters.deadline_ns, off, "gpu", True)
        else:
            expert = 0
            target = sizes.blocks * sizes.down_tiles
            # No bulk copy reads slots; the fence is for the check of the compiled order, which cannot tell kinds apart.
            off = await_(counters.pushed, target, counters.deadline_ns, off, SCOPE, True)
        report(counters, before, off, LOAD_ROLE, block)
        send(mail, turn, pack(kind, block, tile, off))
        turn += 1
        if off == 0:
            ring_row = (block % sizes.ring) * ROWS
            if kind == IS_GATE_UP:
                step = _load_gate_up(
                    x_ring, gate_up_proj, a, b_halves, step, ring_row, expert, tile, sizes.hidden, DEPTH
                )
            elif kind == IS_DOWN:
                step = _load_down(
                    hidden_ring, down_proj, a, b_buffers, step, ring_row, expert, tile, sizes.inner, DEPTH
                )
        task = ticket(counters.tasks)
    send(mail, turn, gl.to_tensor(-1).to(gl.int64))
