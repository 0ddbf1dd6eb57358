"""The order of tasks: plain integers, shared by the kernel, by tests and by whoever wants to draw it.

Row blocks come in minibatches. Group 0 of the tasks is the gate/up tiles of minibatch 0; group g those of minibatch g
and then the down tiles of minibatch g - 1; the last group only has down tiles. Behind all groups come the sums over
tokens. Inside one kind row blocks change fastest, so that tiles that run together share weights.

Example: 3 row blocks, minibatches of 2, 1 gate/up tile and 2 down tiles a row block, so 9 tiles: gate/up 0 1, gate/up
2, down (0,0) (1,0) (0,1) (1,1), down (2,0) (2,1). Task 4 is (down, block 1, column tile 0), task 9 the first sum.
"""

from __future__ import annotations

from moeloom.compat import gl, gluon

#: Kinds of tasks.
GATE_UP, DOWN, SUM = 0, 1, 2
#: Column tiles of one row block and kind must be fewer than this, see :func:`moeloom.kernels.forward.parts.pack`.
MOST_TILES = 4096


def find_task(task, num_blocks, minibatch, gate_up_tiles, down_tiles):
    """Return (kind, row block or sum, column tile) of a task by its number.

    Works on Python integers, and on int32 scalars inside a kernel as :data:`locate`.

    Args:
        task: its ticket, from 0.
        num_blocks: row blocks of this rank.
        minibatch: row blocks of a minibatch.
        gate_up_tiles, down_tiles: column tiles of one row block.
    """
    minibatches = (num_blocks + minibatch - 1) // minibatch
    last = num_blocks - (minibatches - 1) * minibatch
    first_group = minibatch * gate_up_tiles
    group_tasks = minibatch * (gate_up_tiles + down_tiles)
    last_group = num_blocks * gate_up_tiles + (minibatches - 1) * minibatch * down_tiles
    kind = 2
    group = 0
    size = 1
    local = task - num_blocks * (gate_up_tiles + down_tiles)
    if local < 0:
        if task >= last_group:
            kind = 1
            group = minibatches - 1
            size = last
            local = task - last_group
        else:
            kind = 0
            local = task
            if task >= first_group:
                group = (task - first_group) // group_tasks + 1
                local = (task - first_group) % group_tasks
            size = minibatch
            if group == minibatches - 1:
                size = last
            if local >= size * gate_up_tiles:
                kind = 1
                local = local - size * gate_up_tiles
                group = group - 1
                size = minibatch
        block = group * minibatch + local % size
        tile = local // size
    else:
        block = local
        tile = 0
    return kind, block, tile


#: :func:`find_task` on int32 scalars of a kernel.
locate = gluon.jit(find_task)
IS_GATE_UP, IS_DOWN, IS_SUM = gl.constexpr(GATE_UP), gl.constexpr(DOWN), gl.constexpr(SUM)
