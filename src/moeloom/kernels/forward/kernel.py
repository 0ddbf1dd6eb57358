"""The kernel itself: shared memory, mbarriers, and the four roles side by side."""

from __future__ import annotations

from moeloom.compat import alloc_mbarriers, fence_async_shared, gl, gluon, reinterpret, thread_barrier, warp_specialize
from moeloom.kernels.forward.dispatch import dispatch_warps
from moeloom.kernels.forward.load import load_warp
from moeloom.kernels.forward.math import math_warps
from moeloom.kernels.forward.parts import COLUMNS, HALF, PART, ROWS, TASKS, Counters, Ring, Sizes, Tables, init_ring
from moeloom.kernels.forward.store import store_warps

#: Warps of the launch: two math warpgroups.
MATH_WARPS = 8
#: int32 between two words that CTAs fight over, so that each has a cache line of its own.
LINE = 32
_LINE: gl.constexpr = gl.constexpr(LINE)


def num_counters(capacity_blocks: int) -> int:
    """Return how many int32 counters the kernel has: three lines of single words, then three for each row block."""
    return 3 * LINE + 3 * capacity_blocks


@gluon.jit
def _sizes(facts, capacity, minibatch, ring, saved, H, I, tokens, experts):  # noqa: E741
    blocks = gl.load(facts)
    return Sizes(
        blocks,
        gl.to_tensor(capacity),
        gl.to_tensor(minibatch),
        gl.to_tensor(ring),
        gl.to_tensor(saved),
        (gl.to_tensor(I) + HALF - 1) // HALF,
        (gl.to_tensor(H) + COLUMNS - 1) // COLUMNS,
        gl.to_tensor(H),
        gl.to_tensor(I),
        gl.to_tensor(tokens),
        gl.to_tensor(experts),
    )


@gluon.jit
def _flags(counters, capacity, trouble, alarm, deadline_us):
    of_blocks = counters + 3 * _LINE
    return Counters(
        of_blocks,
        of_blocks + capacity,
        of_blocks + 2 * capacity,
        counters,
        counters + _LINE,
        counters + 2 * _LINE,
        trouble,
        gl.load(alarm).to(gl.pointer_type(gl.int32)),
        gl.to_tensor(deadline_us).to(gl.int64) * 1000,
    )


# Sizes differ from call to call; the kernel must not be compiled anew for one that is 1, or a multiple of 16. H and I
# always are multiples, and must be known to be: stores of 16 bytes need it.
_SIZES = ("deadline_us", "rank", "tokens", "experts", "capacity", "minibatch", "ring", "saved", "has_start")


@gluon.jit(do_not_specialize=_SIZES)
def forward(
    x_ring_desc,
    hidden_ring_desc,
    hidden_out_desc,
    gate_up_proj,
    down_proj,
    gate_up,
    x_ring,
    x_pointers,
    slot_pointers,
    row_rank,
    row_slot,
    block_expert,
    facts,
    counters,
    trouble,
    alarm,
    topk_ids,
    topk_weights,
    start,
    out,
    deadline_us,
    limit,
    rank,
    tokens,
    H,
    I,  # noqa: E741
    experts,
    capacity,
    minibatch,
    ring,
    saved,
    has_start,
    TOP_K: gl.constexpr,
    RANKS: gl.constexpr,
    CLAMP: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    PIECE: gl.constexpr,
    HEIGHT: gl.constexpr,
    WIDTH: gl.constexpr,
    STORE_WARPS: gl.constexpr,
    DISPATCH_WARPS: gl.constexpr,
    REGISTERS: gl.constexpr,
    DISPATCH: gl.constexpr,
    PUSH: gl.constexpr,
    SUMS: gl.constexpr,
):
    """Run the layer of one rank on its tokens, after the schedule.

    Args:
        x_ring_desc, hidden_ring_desc: bf16 [ring * 128, H] and [ring * 128, I], boxes [128, DEPTH].
        hidden_out_desc: the same memory as hidden_ring_desc, boxes [128, 64].
        gate_up_proj: bf16 [2E, I, H], gate then up of each expert; boxes [1, 128, DEPTH].
        down_proj: bf16 [E, H, I], boxes [1, 256, DEPTH].
        gate_up: bf16 [saved * 128, 2, I], boxes [128, 1, 64], written: pre-activations;
            with saved = 0 anything.
        x_ring: pointer to the memory of x_ring_desc.
        x_pointers, slot_pointers: int64 [ranks], addresses of bf16 [T, H] and bf16 [T * K, H].
        row_rank, row_slot, block_expert, facts, counters: from the schedule.
        trouble: int32 [16], see :mod:`moeloom.runtime.trouble`.
        alarm: int64 [1], address of an int32 that the host reads.
        topk_ids, topk_weights: int64 and fp32 [T, K].
        start: fp32 [T, H], what the sum of each token begins with; only read if there is one.
        out: bf16 [T, H].
        deadline_us: int32, microseconds of each wait; 0 for none.
        limit: fp32, clamp.
        rank, tokens, H, I, experts: int32; T of this rank, widths (multiples of 64), experts of the group.
        capacity, minibatch, ring, saved: int32, row blocks; a ring holds at least two minibatches.
        has_start: int32, 1 if sums begin with ``start``, 0 if with zero.
        TOP_K, RANKS: routes of a token; ranks of the group.
        CLAMP: whether there is a clamp.
        DEPTH, STAGES, SLOTS: columns of a stage of operands, stages, and output buffers.
        PIECE, HEIGHT, WIDTH: rows that dispatch warps take, rows of them and columns in flight at a time.
        STORE_WARPS, DISPATCH_WARPS, REGISTERS: how many; registers of a thread outside of the math warps.
        DISPATCH, PUSH, SUMS: False leaves that part of the work out, for measurements.
    """
    SCOPE: gl.constexpr = "gpu" if RANKS == 1 else "sys"
    a_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, DEPTH], x_ring_desc.layout)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, DEPTH], gl.bfloat16)
    b_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, DEPTH], b_layout)
    # The same memory as gate and up rows apart.
    b_halves = reinterpret(b_buffers, gl.bfloat16, [2 * STAGES, HALF, DEPTH], b_layout)
    c_buffers = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, ROWS, PART], hidden_out_desc.layout)
    t_buffers = gl.allocate_shared_memory(gl.int64, [TASKS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    a = Ring(a_buffers, alloc_mbarriers(STAGES), alloc_mbarriers(STAGES), STAGES)
    outbox = Ring(c_buffers, alloc_mbarriers(SLOTS), alloc_mbarriers(SLOTS), SLOTS)
    mail = Ring(t_buffers, alloc_mbarriers(TASKS), alloc_mbarriers(TASKS), TASKS)
    init_ring(a, 1)
    init_ring(outbox, 1)
    # Read by the math warps and by the store warps.
    init_ring(mail, 2)
    # Bulk loads signal mbarriers that ordinary stores have initialised.
    fence_async_shared()
    thread_barrier()

    sizes = _sizes(facts, capacity, minibatch, ring, saved, H, I, tokens, experts)
    flags = _flags(counters, capacity, trouble, alarm, deadline_us)
    tables = Tables(
        x_pointers,
        slot_pointers,
        row_rank,
        row_slot,
        block_expert,
        x_ring,
        topk_ids,
        topk_weights,
        start,
        out,
        gl.to_tensor(rank),
        gl.to_tensor(has_start),
    )
    pieces: gl.constexpr = ROWS // PIECE if DISPATCH else 0
    warp_specialize(
        [
            (math_warps, (tables, a, b_buffers, outbox, mail, sizes, limit, DEPTH, TOP_K, CLAMP)),
            (store_warps, (hidden_out_desc, gate_up, tables, outbox, mail, sizes, flags, RANKS, PUSH, SCOPE)),
            (
                load_warp,
                (
                    x_ring_desc,
                    hidden_ring_desc,
                    gate_up_proj,
                    down_proj,
                    tables,
                    a,
                    b_buffers,
                    b_halves,
                    mail,
                    sizes,
                    flags,
                    DEPTH,
                    pieces,
                    SUMS,
                    SCOPE,
                ),
            ),
            (dispatch_warps, (tables, sizes, flags, TOP_K, RANKS, PIECE, HEIGHT, WIDTH, DISPATCH)),
        ],
        [STORE_WARPS, 1, DISPATCH_WARPS],
        [REGISTERS, REGISTERS, REGISTERS],
    )
