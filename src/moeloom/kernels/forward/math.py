"""The math warps: tiles of 128 x 256, SwiGLU in the epilogue, and the ordered weighted sum."""

from __future__ import annotations

from moeloom.compat import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from moeloom.kernels.forward.order import IS_DOWN, IS_GATE_UP, IS_SUM
from moeloom.kernels.forward.parts import COLUMNS, HALF, PART, ROWS, TOKENS, memory_of, receive, unpack

#: Columns of a sum at a time: 8 tokens x 512 columns x top-8 are 64 KB in flight.
WIDTH: gl.constexpr = gl.constexpr(512)


@gluon.jit
def _multiply(a, b_buffers, step, num_k, layout: gl.constexpr):
    """Return the product of ``num_k`` stages of operands, fp32 [128, 256], and the next step."""
    acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    for k in range(num_k):
        s = step % a.count
        a.wait_full(step)
        b = b_buffers.index(s).permute((1, 0))
        acc = warpgroup_mma(a.buffers.index(s), b, acc, is_async=True, use_acc=k > 0)
        # One product stays in flight, so the stage before is free now.
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(a.empty.index((step + a.count - 1) % a.count), pred=k > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    a.release(step - 1)
    return acc, step


@gluon.jit
def _put(outbox, out, value):
    """Hand 64 columns, bf16 [128, 64], to the store warps."""
    outbox.wait_empty(out)
    outbox.buffers.index(out % outbox.count).store(value)
    # Bulk stores read shared memory through another proxy.
    fence_async_shared()
    mbarrier.arrive(outbox.full.index(out % outbox.count))
    return out + 1


@gluon.jit
def _put_half(outbox, out, value):
    """Hand over 128 columns, bf16 [128, 128]."""
    left, right = value.reshape((ROWS, 2, PART)).permute((0, 2, 1)).split()
    out = _put(outbox, out, left)
    return _put(outbox, out, right)


@gluon.jit
def _swiglu(gate, up, limit, CLAMP: gl.constexpr):
    """Return ``silu(gate) * up``, bf16, from bf16; NaN passes the clamp as it is."""
    gate = gate.to(gl.float32)
    up = up.to(gl.float32)
    if CLAMP:
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, up)
        up = gl.where(up < -limit, -limit, up)
    return (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16)


@gluon.jit
def _sum_slots(tables, number, off, sizes, TOP_K: gl.constexpr):
    """out[t] = start[t] + w[t, 0] * slot[t, 0] + w[t, 1] * slot[t, 1] + ..., fp32, rounded once.

    Without a start it is 0; NaN if rows are missing.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    hidden = gl.multiple_of(sizes.hidden, 16)
    token = number * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    slots = memory_of(tables.slot_pointers, token * 0 + tables.rank)
    is_token = token < sizes.tokens
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    route = token.to(gl.int64) * TOP_K
    has_start = is_token & (tables.has_start != 0) & (off == 0)
    nothing = gl.full([TOKENS, WIDTH], 0.0, gl.float32, layout) + gl.where(off != 0, float("nan"), 0.0)
    for first in range(0, sizes.hidden, WIDTH):
        inside = (first + column < hidden)[None, :]
        at = (token.to(gl.int64) * hidden)[:, None] + (first + column)[None, :]
        total = gl.load(tables.start + at, mask=has_start[:, None] & inside, other=nothing)
        for k in gl.static_range(TOP_K):
            expert = gl.load(tables.topk_ids + route + k, mask=is_token, other=-1)
            # The slot of no route is unwritten memory, and its weight may be anything.
            is_route = (expert >= 0) & (expert < sizes.experts) & (off == 0)
            weight = gl.load(tables.topk_weights + route + k, mask=is_route, other=0.0)
            place = (slots + (route + k) * hidden)[:, None] + (first + column)[None, :]
            value = gl.load(place, mask=is_route[:, None] & inside, other=0.0)
            total = gl.fma(gl.broadcast(weight[:, None], total)[0], value.to(gl.float32), total)
        gl.store(tables.out + at, total.to(gl.bfloat16), mask=is_token[:, None] & inside)


@gluon.jit
def math_warps(
    tables,
    a,
    b_buffers,
    outbox,
    mail,
    sizes,
    limit,
    DEPTH: gl.constexpr,
    TOP_K: gl.constexpr,
    CLAMP: gl.constexpr,
):
    """Compute tile after tile as the load warp hands them over."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])
    step = 0
    turn = 0
    handed = 0
    task = receive(mail, turn)
    while task >= 0:
        kind, block, tile, off = unpack(task)
        if kind == IS_SUM:
            _sum_slots(tables, block, off, sizes, TOP_K)
        elif off == 0:
            num_k = gl.where(kind == IS_DOWN, sizes.inner // DEPTH, sizes.hidden // DEPTH)
            acc, step = _multiply(a, b_buffers, step, num_k, layout)
            left, right = acc.to(gl.bfloat16).reshape((ROWS, 2, HALF)).permute((0, 2, 1)).split()
            if kind == IS_GATE_UP:
                # Left are gate columns, right are up columns. The hidden rows go first: others wait for them.
                handed = _put_half(outbox, handed, _swiglu(left, right, limit, CLAMP))
                if block < sizes.saved:
                    handed = _put_half(outbox, handed, left)
                    handed = _put_half(outbox, handed, right)
            else:
                handed = _put_half(outbox, handed, left)
                handed = _put_half(outbox, handed, right)
        turn += 1
        task = receive(mail, turn)
