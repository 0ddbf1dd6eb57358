"""What the roles of a CTA share: sizes, tables, counters, and three rings of shared memory between them.

Annotations of aggregates are read when the class is made, so this file does not postpone them.
"""

from moeloom.compat import aggregate, gl, gluon, mbarrier
from moeloom.kernels.forward.order import MOST_TILES

#: Rows and columns of a tile: rows of a row block; gate and up columns side by side, or output columns.
ROWS: gl.constexpr = gl.constexpr(128)
COLUMNS: gl.constexpr = gl.constexpr(256)
#: Hidden columns of a gate/up tile.
HALF: gl.constexpr = gl.constexpr(128)
#: Columns that pass from math to store warps at a time.
PART: gl.constexpr = gl.constexpr(64)
#: Tasks that the load warp may be ahead of the others.
TASKS: gl.constexpr = gl.constexpr(4)
#: Tokens of a sum.
TOKENS: gl.constexpr = gl.constexpr(8)
_MOST_TILES: gl.constexpr = gl.constexpr(MOST_TILES)


@aggregate
class Sizes:
    """Sizes of a call, int32.

    Attributes:
        blocks, capacity: row blocks that there are, and that the tables have room for.
        minibatch, ring, saved: of a minibatch, of the ring, and those that keep pre-activations; in row blocks.
        gate_up_tiles, down_tiles: column tiles of a row block.
        hidden, inner: H and I. tokens: T. experts: of the whole group.
    """

    blocks: gl.tensor
    capacity: gl.tensor
    minibatch: gl.tensor
    ring: gl.tensor
    saved: gl.tensor
    gate_up_tiles: gl.tensor
    down_tiles: gl.tensor
    hidden: gl.tensor
    inner: gl.tensor
    tokens: gl.tensor
    experts: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, blocks, capacity, minibatch, ring, saved, gate_up_tiles, down_tiles, hidden, inner, tokens, experts
    ):
        self.blocks = blocks
        self.capacity = capacity
        self.minibatch = minibatch
        self.ring = ring
        self.saved = saved
        self.gate_up_tiles = gate_up_tiles
        self.down_tiles = down_tiles
        self.hidden = hidden
        self.inner = inner
        self.tokens = tokens
        self.experts = experts


@aggregate
class Tables:
    """Pointers to what a call reads and writes by ordinary accesses; shapes as in the kernel's docstring.

    Attributes:
        x_pointers, slot_pointers: int64. row_rank, row_slot, block_expert: int32.
        x_ring: bf16. topk_ids: int64. topk_weights, start: fp32. out: bf16.
        rank: int32, this rank. has_start: int32, 1 or 0.
    """

    x_pointers: gl.tensor
    slot_pointers: gl.tensor
    row_rank: gl.tensor
    row_slot: gl.tensor
    block_expert: gl.tensor
    x_ring: gl.tensor
    topk_ids: gl.tensor
    topk_weights: gl.tensor
    start: gl.tensor
    out: gl.tensor
    rank: gl.tensor
    has_start: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
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
        rank,
        has_start,
    ):
        self.x_pointers = x_pointers
        self.slot_pointers = slot_pointers
        self.row_rank = row_rank
        self.row_slot = row_slot
        self.block_expert = block_expert
        self.x_ring = x_ring
        self.topk_ids = topk_ids
        self.topk_weights = topk_weights
        self.start = start
        self.out = out
        self.rank = rank
        self.has_start = has_start


@aggregate
class Counters:
    """Flags and tickets, all int32 in one piece of memory that the schedule has set to zero.

    Attributes:
        x_ready, h_ready, d_done: of each row block, see :mod:`moeloom.kernels.forward`.
        pushed: one flag. tasks, pieces: tickets.
        trouble: int32 [16], see :mod:`moeloom.runtime.trouble`.
        alarm: one int32 that the host reads, set to 1 when a role gives up.
        deadline_ns: int64, of each wait; 0 for none.
    """

    x_ready: gl.tensor
    h_ready: gl.tensor
    d_done: gl.tensor
    pushed: gl.tensor
    tasks: gl.tensor
    pieces: gl.tensor
    trouble: gl.tensor
    alarm: gl.tensor
    deadline_ns: gl.tensor

    @gluon.constexpr_function
    def __init__(self, x_ready, h_ready, d_done, pushed, tasks, pieces, trouble, alarm, deadline_ns):
        self.x_ready = x_ready
        self.h_ready = h_ready
        self.d_done = d_done
        self.pushed = pushed
        self.tasks = tasks
        self.pieces = pieces
        self.trouble = trouble
        self.alarm = alarm
        self.deadline_ns = deadline_ns


@aggregate
class Ring:
    """Buffers of shared memory that pass from one role to another; ``full`` and ``empty`` are mbarriers of each."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    count: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, count):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.count = gl.constexpr(count)

    @gluon.jit
    def wait_empty(self, turn):
        """Wait, as the writer, for the buffer of a turn; turns count from 0."""
        mbarrier.wait(self.empty.index(turn % self.count), ((turn // self.count) & 1) ^ 1)

    @gluon.jit
    def wait_full(self, turn):
        """Wait, as the reader, for the buffer of a turn."""
        mbarrier.wait(self.full.index(turn % self.count), (turn // self.count) & 1)

    @gluon.jit
    def release(self, turn):
        """Give the buffer of a turn back to the writer."""
        mbarrier.arrive(self.empty.index(turn % self.count))


@gluon.jit
def init_ring(ring, READERS: gl.constexpr):
    """Initialise the mbarriers of a ring that one role writes and ``READERS`` roles read."""
    for i in gl.static_range(ring.count):
        mbarrier.init(ring.full.index(i), 1)
        mbarrier.init(ring.empty.index(i), READERS)


# A task on its way between roles is one int64: row block, column tile, kind, and whether its inputs never came.


@gluon.jit
def pack(kind, block, tile, off):
    """Pack a task; never negative."""
    return ((block.to(gl.int64) * _MOST_TILES + tile) * 4 + kind) * 2 + off


@gluon.jit
def unpack(task):
    """Return (kind, row block or sum, column tile, off) of a task, int32."""
    off = (task & 1).to(gl.int32)
    kind = ((task >> 1) & 3).to(gl.int32)
    tile = ((task >> 3) & (_MOST_TILES - 1)).to(gl.int32)
    return kind, (task // (8 * _MOST_TILES)).to(gl.int32), tile, off


@gluon.jit
def send(mail, turn, task):
    """Hand a task to the math and store warps; a negative one ends their work."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mail.wait_empty(turn)
    mail.buffers.index(turn % mail.count).store(gl.full([1], task, gl.int64, layout))
    mbarrier.arrive(mail.full.index(turn % mail.count))


@gluon.jit
def receive(mail, turn):
    """Return the task of this turn, int64; negative: there are no more."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mail.wait_full(turn)
    task = gl.sum(mail.buffers.index(turn % mail.count).load(layout), 0)
    mail.release(turn)
    return task


@gluon.jit
def memory_of(pointers, rank):
    """Return pointers to the bf16 memory of ranks, from a table of addresses and a tensor of ranks.

    Always a tensor: the compiler forgets the alignment of a single address, and would then copy 2 bytes at a time.
    """
    return gl.multiple_of(gl.load(pointers + rank).to(gl.pointer_type(gl.bfloat16)), 16)


# Roles, as numbers in the record of what went wrong.
DISPATCH_ROLE: gl.constexpr = gl.constexpr(0)
LOAD_ROLE: gl.constexpr = gl.constexpr(1)
STORE_ROLE: gl.constexpr = gl.constexpr(2)


@gluon.jit
def report(counters, before, off, ROLE: gl.constexpr, block):
    """Record that a role gives up now, if it has not before: how often by role, and the first row block."""
    if (off != 0) & (before == 0):
        gl.atomic_add(counters.trouble + ROLE, 1, sem="relaxed", scope="gpu")
        gl.atomic_cas(counters.trouble + 8 + ROLE, 0, block + 1, sem="relaxed", scope="gpu")
        # One writer: host memory need not know atomics.
        if gl.atomic_add(counters.trouble + 15, 1, sem="relaxed", scope="gpu") == 0:
            gl.store(counters.alarm, 1)
