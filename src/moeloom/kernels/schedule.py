"""The schedule on the device: two launches that turn routes into rows, without the host.

:func:`moeloom.schedule.build_schedule` is the specification; the tables made here are equal to its own, element by
element, with slots in int32. Routes are cut into runs, one for each program. :func:`count_routes` counts how many
routes of its run each expert has. :func:`place_routes` adds these counts up to the first row of every expert and to the
first place of its run inside that expert, and then needs nobody else to place its routes in order. It also sets all
counters to zero that the layer's kernel starts from, and fills the table of pointers.

Example: 2 experts, routes ``[1, 0, 1, -1, 0, 1]`` in two runs of three. The counts are ``[1, 2]`` and ``[1, 1]``, so
expert 0 has 2 rows and begins at row 0, expert 1 has 3 and begins at row 128. The second run's first row of expert 0 is
0 + 1, of expert 1 it is 128 + 2.
"""

from __future__ import annotations

from moeloom.compat import gl, gluon, thread_barrier
from moeloom.config import ROW_BLOCK, ceil_div, round_up

BLOCK: gl.constexpr = gl.constexpr(ROW_BLOCK)
#: Routes that are placed at a time: each is compared with all before it in the tile.
TILE: gl.constexpr = gl.constexpr(128)
#: Programs at most: more counts to add up for each, fewer routes to place.
MOST_PROGRAMS = 128
#: Of both launches.
WARPS = 8
#: Counts that a program holds in registers at a time.
HELD: gl.constexpr = gl.constexpr(8192)


def num_programs(num_routes: int, num_local_experts: int) -> int:
    """Return how many programs both launches have; also those without routes fill parts of the tables."""
    return max(1, min(MOST_PROGRAMS, max(ceil_div(num_routes, TILE.value), num_local_experts)))


def run_length(num_routes: int, programs: int) -> int:
    """Return how many routes one program has, a multiple of :data:`TILE`."""
    return round_up(ceil_div(num_routes, programs), TILE.value)


def padded_experts(num_local_experts: int) -> int:
    """Return the number of experts in a row of counts: a power of two, at least a warp wide."""
    return max(32, 1 << (num_local_experts - 1).bit_length())


# They differ from call to call; no kernel must be compiled anew for a 1, or for a multiple of 16.
_SIZES = ("num_routes", "slots", "run", "first_expert", "experts", "capacity_blocks", "num_counters", "rank")


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _local_expert(ids, route, end, first_expert, experts):
    """Local experts of routes, int32; -1 where there is no route, or its expert lies on another rank."""
    # Compared in 64 bits: an id may be any number.
    local = gl.load(ids + route, mask=route < end, other=-1) - first_expert
    return gl.where((local >= 0) & (local < experts) & (route < end), local, -1).to(gl.int32)


@gluon.jit
def _counts(expert, EXPERTS: gl.constexpr, layout: gl.constexpr):
    """How often each expert occurs, int32 [EXPERTS]."""
    return gl.histogram(gl.maximum(expert, 0), EXPERTS, mask=expert >= 0, layout=layout)


@gluon.jit(do_not_specialize=("num_routes", "run", "first_expert", "experts"))
def count_routes(ids, counts, num_routes, run, first_expert, experts, EXPERTS: gl.constexpr):
    """Count the routes of each local expert in each program's run.

    Args:
        ids: int64 [num_routes], expert ids of all ranks.
        counts: int32 [programs, EXPERTS], written.
        num_routes: int32.
        run: int32, routes of a program, a multiple of TILE.
        first_expert: int32, id of local expert 0. experts: int32, how many there are.
        EXPERTS: see :func:`padded_experts`.
    """
    warps: gl.constexpr = gl.num_warps()
    tile_layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    expert_layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    program = gl.program_id(0)
    first = program * run
    end = gl.minimum(first + run, num_routes)
    place = gl.arange(0, TILE, tile_layout)
    total = gl.zeros([EXPERTS], gl.int32, expert_layout)
    for at in range(first, end, TILE):
        total += _counts(_local_expert(ids, at + place, end, first_expert, experts), EXPERTS, expert_layout)
    gl.store(counts + program * EXPERTS + gl.arange(0, EXPERTS, expert_layout), total)


@gluon.jit
def _sum_counts(counts, program, EXPERTS: gl.constexpr, layout: gl.constexpr):
    """Routes of each expert, and those in the runs before this program's; int32 [EXPERTS]."""
    rows: gl.constexpr = HELD // EXPERTS
    row = gl.arange(0, rows, gl.SliceLayout(1, layout))
    column = gl.arange(0, EXPERTS, gl.SliceLayout(0, layout))
    total = gl.zeros([EXPERTS], gl.int32, gl.SliceLayout(0, layout))
    before = gl.zeros([EXPERTS], gl.int32, gl.SliceLayout(0, layout))
    for first in range(0, gl.num_programs(0), rows):
        run = first + row
        part = gl.load(
            counts + (run * EXPERTS)[:, None] + column[None, :],
            mask=(run < gl.num_programs(0))[:, None] & (column >= 0)[None, :],
            other=0,
        )
        total += gl.sum(part, 0)
        before += gl.sum(gl.where((run < program)[:, None], part, 0), 0)
    return total, before


@gluon.jit
def _place_run(
    ids,
    row_rank,
    row_slot,
    base,
    num_routes,
    slots,
    run,
    first_expert,
    experts,
    EXPERTS: gl.constexpr,
    expert_layout: gl.constexpr,
):
    """Write the rows of this program's routes; ``base`` is the first row of its run in each expert."""
    warps: gl.constexpr = gl.num_warps()
    square: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    me = gl.arange(0, TILE, gl.SliceLayout(1, square))
    other = gl.arange(0, TILE, gl.SliceLayout(0, square))
    first = gl.program_id(0) * run
    end = gl.minimum(first + run, num_routes)
    for at in range(first, end, TILE):
        mine = _local_expert(ids, at + me, end, first_expert, experts)
        others = _local_expert(ids, at + other, end, first_expert, experts)
        earlier = (mine[:, None] == others[None, :]) & (other[None, :] < me[:, None])
        index = gl.convert_layout(gl.maximum(mine, 0), expert_layout)
        row = gl.convert_layout(gl.gather(base, index, 0), gl.SliceLayout(1, square)) + gl.sum(earlier.to(gl.int32), 1)
        route = at + me
        gl.store(row_rank + row, route // slots, mask=mine >= 0)
        gl.store(row_slot + row, route % slots, mask=mine >= 0)
        base += _counts(gl.convert_layout(mine, expert_layout), EXPERTS, expert_layout)


@gluon.jit
def _fill(out, value, first, end, layout: gl.constexpr):
    """Set out[first:end] to a value; the programs share the work."""
    place = gl.arange(0, 1024, layout)
    for at in range(first + 1024 * gl.program_id(0), end, 1024 * gl.num_programs(0)):
        gl.store(out + at + place, gl.full([1024], value, gl.int32, layout), mask=at + place < end)


@gluon.jit
def _describe_expert(row_rank, row_slot, block_expert, block_rows, expert, count, first_block, layout: gl.constexpr):
    """Write the row blocks of one expert, and its padding rows."""
    place = gl.arange(0, BLOCK, layout)
    blocks = (count + BLOCK - 1) // BLOCK
    for at in range(0, blocks, BLOCK):
        block = at + place
        inside = block < blocks
        gl.store(block_expert + first_block + block, gl.full([BLOCK], expert, gl.int32, layout), mask=inside)
        gl.store(block_rows + first_block + block, gl.minimum(count - block * BLOCK, BLOCK), mask=inside)
    padding = count + place
    nothing = gl.full([BLOCK], -1, gl.int32, layout)
    gl.store(row_rank + first_block * BLOCK + padding, nothing, mask=padding < blocks * BLOCK)
    gl.store(row_slot + first_block * BLOCK + padding, nothing, mask=padding < blocks * BLOCK)


@gluon.jit(do_not_specialize=_SIZES)
def place_routes(
    ids,
    counts,
    row_rank,
    row_slot,
    block_expert,
    block_rows,
    rows_per_expert,
    facts,
    counters,
    pointers,
    x,
    num_routes,
    slots,
    run,
    first_expert,
    experts,
    capacity_blocks,
    num_counters,
    rank,
    EXPERTS: gl.constexpr,
):
    """Make all tables of a rank from the counts of :func:`count_routes`, with the same number of programs.

    Args:
        ids, counts, num_routes, run, first_expert, experts, EXPERTS: as there.
        row_rank, row_slot: int32 [capacity_blocks * 128], rank and token * K + k of each row; -1 = padding.
        block_expert: int32 [capacity_blocks], local expert of a row block; -1 past the last one.
        block_rows: int32 [capacity_blocks], live rows of a row block.
        rows_per_expert: int64 [experts].
        facts: int32 [1], number of row blocks.
        counters: int32 [num_counters], set to zero.
        pointers: int64 [ranks], address of each rank's tokens; this rank's is written.
        x: bf16, this rank's tokens.
        slots: int32, T * K of one rank.
        rank: int32, this rank.
    """
    warps: gl.constexpr = gl.num_warps()
    table: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    program = gl.program_id(0)
    total, before = _sum_counts(counts, program, EXPERTS, table)
    total = gl.convert_layout(total, flat)
    before = gl.convert_layout(before, flat)
    blocks = (total + BLOCK - 1) // BLOCK
    first_block = gl.associative_scan(blocks, 0, _add) - blocks
    num_blocks = gl.sum(blocks, 0)
    expert = gl.arange(0, EXPERTS, flat)
    if program == 0:
        gl.store(facts, num_blocks)
        gl.store(rows_per_expert + expert, total.to(gl.int64), mask=expert < experts)
        gl.store(pointers + rank, x.to(gl.int64))
    for e in range(program, experts, gl.num_programs(0)):
        count = gl.sum(gl.where(expert == e, total, 0), 0)
        first = gl.sum(gl.where(expert == e, first_block, 0), 0)
        _describe_expert(row_rank, row_slot, block_expert, block_rows, e, count, first, flat)
    _fill(block_expert, -1, num_blocks, capacity_blocks, flat)
    _fill(block_rows, 0, num_blocks, capacity_blocks, flat)
    _fill(row_rank, -1, num_blocks * BLOCK, capacity_blocks * BLOCK, flat)
    _fill(row_slot, -1, num_blocks * BLOCK, capacity_blocks * BLOCK, flat)
    _fill(counters, 0, 0, num_counters, flat)
    base = first_block * BLOCK + before
    _place_run(ids, row_rank, row_slot, base, num_routes, slots, run, first_expert, experts, EXPERTS, flat)
    thread_barrier()
