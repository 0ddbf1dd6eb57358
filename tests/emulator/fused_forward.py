"""A whole MoE forward as one kernel, small enough to emulate: pull, gate and up, SwiGLU, down, push, ordered sum.

The roles of a CTA: *dispatch* warps pull token rows into the ring; a *load* warp takes tasks by ticket, hands them to the
other roles and fills the operand ring; *math* warps multiply; *store* warps write hidden rows, push result rows into the
slots of the ranks they come from, and sum slots at the end. Rows of a rank lie in row blocks of BM; block b passes
through ring slot b % RING, both as tokens (`ring`) and as hidden rows (`hidden`).

Counters, each of one row block (they only grow): `x_ready` pieces pulled; `h_ready` hidden tiles written, which also says
that the block's tokens have been read; `d_done` down tiles pushed, so that the hidden rows have been read. `arrived`, one
on each rank: down tiles of all ranks that may have pushed to it.

All workspaces are rank-major, so that one launch can hold several ranks: CTA p of a launch belongs to rank
`first_rank + p // ctas`.
"""

import torch

from moeloom.compat import (
    alloc_mbarriers,
    bulk_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from moeloom.kernels.sync import await_, publish, ticket
from tests.emulator.harness import Case, blank, box, guarded, normal, relative_l2, rng

GATE_UP, DOWN, SUM = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
BM = gl.constexpr(64)
BN = gl.constexpr(128)
BK = gl.constexpr(64)
HALF = gl.constexpr(64)
STAGES = gl.constexpr(3)
PIECE = gl.constexpr(16)
TOKENS = gl.constexpr(8)


# ------------------------------------------------------------------------------------------------- between the roles


@gluon.jit
def unpack(task):
    """A task's kind, row block (or token tile), and column tile."""
    return task >> 28, (task >> 12) & 0xFFFF, task & 0xFFF


@gluon.jit
def send(tasks, t_full, t_empty, turn, task):
    """Hand a task to the math and store warps."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(t_empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
    tasks.index(turn % 2).store(gl.full([1], task, gl.int32, layout))
    mbarrier.arrive(t_full.index(turn % 2))


@gluon.jit
def receive(tasks, t_full, t_empty, turn):
    """The task of this turn; negative: there are no more."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(t_full.index(turn % 2), (turn // 2) & 1)
    task = gl.sum(tasks.index(turn % 2).load(layout), 0)
    mbarrier.arrive(t_empty.index(turn % 2))
    return task


# --------------------------------------------------------------------------------------------------------- the roles


@gluon.jit
def dispatch_warps(
    x_ptrs, row_source, ring, x_ready, h_ready, pulls, num_blocks, routes, H, F, TOP_K: gl.constexpr, RING: gl.constexpr
):
    """Pull token rows into the ring, a piece of PIECE rows at a time; padding rows become zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    pieces: gl.constexpr = BM // PIECE
    row = gl.arange(0, PIECE, gl.SliceLayout(1, layout))
    col = gl.arange(0, 128, gl.SliceLayout(0, layout))
    piece = ticket(pulls)
    while piece < num_blocks * pieces:
        block = piece // pieces
        if block >= RING:
            await_(h_ready + block - RING, F // HALF, 0, 0, "gpu", False)
        source = gl.load(row_source + piece * PIECE + row)
        route = gl.maximum(source, 0)
        x = gl.load(x_ptrs + route // routes).to(gl.pointer_type(gl.bfloat16))
        x += (route % routes // TOP_K).to(gl.int64) * H
        at = block % RING * BM + piece % pieces * PIECE + row
        out = ring + at.to(gl.int64) * H
        for c in range(0, H, 128):
            live = (source >= 0)[:, None] & (col >= 0)[None, :]
            value = gl.load(x[:, None] + (c + col)[None, :], mask=live, other=0.0)
            gl.store(out[:, None] + (c + col)[None, :], value)
        publish(x_ready + block, 1, "gpu", False)
        piece = ticket(pulls)


@gluon.jit
def load_gate_up(ring, w_gate_up, a_bufs, b_bufs, full, empty, step, ring_row, expert, n, H, F):
    """Load the operands of one gate-and-up tile: HALF rows of gate and of up side by side."""
    for k in range(H // BK):
        s = step % STAGES
        mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), (BM + BN) * BK * 2)
        tma_load(ring, [ring_row, k * BK], full.index(s), a_bufs.index(s))
        gate = expert * 2 * F + n * HALF
        tma_load(w_gate_up, [gate, k * BK], full.index(s), b_bufs.index(s).slice(0, HALF, 0))
        tma_load(w_gate_up, [gate + F, k * BK], full.index(s), b_bufs.index(s).slice(HALF, HALF, 0))
        step += 1
    return step


@gluon.jit
def load_down(hidden, w_down, a_bufs, b_bufs, full, empty, step, ring_row, expert, n, H, F):
    """Load the operands of one down tile."""
    for k in range(F // BK):
        s = step % STAGES
        mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), (BM + BN) * BK * 2)
        tma_load(hidden, [ring_row, k * BK], full.index(s), a_bufs.index(s))
        tma_load(w_down, [expert * H + n * BN, k * BK], full.index(s), b_bufs.index(s))
        step += 1
    return step


@gluon.jit
def next_task(table, tickets, num_tasks):
    """Draw a ticket and look up its task; -1: there are no more."""
    number = ticket(tickets)
    return gl.load(table + gl.minimum(number, num_tasks - 1)) if number < num_tasks else -1


@gluon.jit
def load_warp(
    ring,
    hidden,
    w_gate_up,
    w_down,
    table,
    tickets,
    block_expert,
    x_ready,
    h_ready,
    tasks,
    t_full,
    t_empty,
    a_bufs,
    b_bufs,
    full,
    empty,
    rank,
    experts,
    num_tasks,
    H,
    F,
    RING: gl.constexpr,
):
    """Take tasks in order, hand them on, and load their operands."""
    step = 0
    turn = 0
    task = next_task(table, tickets, num_tasks)
    send(tasks, t_full, t_empty, turn, task)
    while task >= 0:
        kind, block, n = unpack(task)
        ring_row = (rank * RING + block % RING) * BM
        if kind == GATE_UP:
            expert = rank * experts + gl.load(block_expert + block)
            await_(x_ready + block, BM // PIECE, 0, 0, "gpu", True)
            step = load_gate_up(ring, w_gate_up, a_bufs, b_bufs, full, empty, step, ring_row, expert, n, H, F)
        elif kind == DOWN:
            expert = rank * experts + gl.load(block_expert + block)
            await_(h_ready + block, F // HALF, 0, 0, "gpu", True)
            step = load_down(hidden, w_down, a_bufs, b_bufs, full, empty, step, ring_row, expert, n, H, F)
        turn += 1
        task = next_task(table, tickets, num_tasks)
        send(tasks, t_full, t_empty, turn, task)


@gluon.jit
def multiply(a_bufs, b_bufs, full, empty, step, num_k):
    """The accumulator [BM, BN] of one tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    acc = gl.zeros((BM, BN), gl.float32, layout)
    for k in range(num_k):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        acc = warpgroup_mma(a_bufs.index(s), b_bufs.index(s).permute((1, 0)), acc, is_async=True, use_acc=k > 0)
        # All but the newest wgmma are done: the stage before this one is free.
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return acc, step


@gluon.jit
def put(c_bufs, c_full, c_empty, out, value):
    """Pass [BM, HALF] results to the store warps."""
    mbarrier.wait(c_empty.index(out % 2), ((out // 2) & 1) ^ 1)
    c_bufs.index(out % 2).store(value.to(gl.bfloat16))
    fence_async_shared()
    mbarrier.arrive(c_full.index(out % 2))
    return out + 1


@gluon.jit
def math_warps(tasks, t_full, t_empty, a_bufs, b_bufs, full, empty, c_bufs, c_full, c_empty, H, F):
    """Multiply, and make hidden rows of gate and up."""
    step = 0
    turn = 0
    out = 0
    task = receive(tasks, t_full, t_empty, turn)
    while task >= 0:
        kind, block, n = unpack(task)
        if kind != SUM:
            acc, step = multiply(a_bufs, b_bufs, full, empty, step, gl.where(kind == GATE_UP, H // BK, F // BK))
            left, right = acc.reshape((BM, 2, HALF)).permute((0, 2, 1)).split()
            if kind == GATE_UP:
                out = put(c_bufs, c_full, c_empty, out, left / (1.0 + gl.exp(-left)) * right)
            else:
                out = put(c_bufs, c_full, c_empty, out, left)
                out = put(c_bufs, c_full, c_empty, out, right)
        turn += 1
        task = receive(tasks, t_full, t_empty, turn)


@gluon.jit
def store_hidden(hidden, c_bufs, c_full, c_empty, out, ring_row, n):
    """Write one tile of hidden rows."""
    mbarrier.wait(c_full.index(out % 2), (out // 2) & 1)
    tma_store(hidden, [ring_row, n * HALF], c_bufs.index(out % 2))
    bulk_wait(0)
    mbarrier.arrive(c_empty.index(out % 2))
    return out + 1


@gluon.jit
def push(slot_ptrs, row_source, c_bufs, c_full, c_empty, out, block, n, routes, H):
    """Push one half of a tile of result rows into the slots of the ranks that the rows come from."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, BM, gl.SliceLayout(1, layout))
    col = n * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    source = gl.load(row_source + block * BM + row)
    route = gl.maximum(source, 0)
    slot = gl.load(slot_ptrs + route // routes).to(gl.pointer_type(gl.bfloat16)) + (route % routes).to(gl.int64) * H
    mbarrier.wait(c_full.index(out % 2), (out // 2) & 1)
    value = c_bufs.index(out % 2).load(layout)
    mbarrier.arrive(c_empty.index(out % 2))
    gl.store(slot[:, None] + col[None, :], value, mask=(source >= 0)[:, None] & (col >= 0)[None, :])
    return out + 1


@gluon.jit
def sum_slots(slots, weights, out, tile, tokens, H, TOP_K: gl.constexpr):
    """out[t] = w[t, 0] * slot[t, 0] + w[t, 1] * slot[t, 1] + ... in this order, fp32."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    token = tile * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    for c in range(0, H, 128):
        col = c + gl.arange(0, 128, gl.SliceLayout(0, layout))
        live = (token < tokens)[:, None] & (col < H)[None, :]
        total = gl.zeros([TOKENS, 128], gl.float32, layout)
        for k in gl.static_range(TOP_K):
            route = token * TOP_K + k
            weight = gl.load(weights + route, mask=token < tokens, other=0.0)
            slot = slots + (route.to(gl.int64) * H)[:, None] + col[None, :]
            total += weight[:, None] * gl.load(slot, mask=live, other=0.0).to(gl.float32)
        gl.store(out + (token.to(gl.int64) * H)[:, None] + col[None, :], total, mask=live)


@gluon.jit
def store_warps(
    hidden,
    slot_ptrs,
    arrived_ptrs,
    row_source,
    weights,
    result,
    h_ready,
    d_done,
    tasks,
    t_full,
    t_empty,
    c_bufs,
    c_full,
    c_empty,
    rank,
    routes,
    tiles_of_all,
    H,
    F,
    RANKS: gl.constexpr,
    TOP_K: gl.constexpr,
    RING: gl.constexpr,
):
    """Write hidden rows, push result rows, sum slots."""
    turn = 0
    out = 0
    task = receive(tasks, t_full, t_empty, turn)
    while task >= 0:
        kind, block, n = unpack(task)
        if kind == GATE_UP:
            if block >= RING:
                await_(d_done + block - RING, H // BN, 0, 0, "gpu", True)
            out = store_hidden(hidden, c_bufs, c_full, c_empty, out, (rank * RING + block % RING) * BM, n)
            publish(h_ready + block, 1, "gpu", True)
        elif kind == DOWN:
            out = push(slot_ptrs, row_source, c_bufs, c_full, c_empty, out, block, 2 * n, routes, H)
            out = push(slot_ptrs, row_source, c_bufs, c_full, c_empty, out, block, 2 * n + 1, routes, H)
            publish(d_done + block, 1, "gpu", False)
            for peer in range(RANKS):
                publish(gl.load(arrived_ptrs + peer).to(gl.pointer_type(gl.int32)), 1, "sys", False)
        else:
            arrived = gl.load(arrived_ptrs + rank).to(gl.pointer_type(gl.int32))
            await_(arrived, tiles_of_all, 0, 0, "sys", False)
            slots = gl.load(slot_ptrs + rank).to(gl.pointer_type(gl.bfloat16))
            sum_slots(slots, weights, result, block, routes // TOP_K, H, TOP_K)
        turn += 1
        task = receive(tasks, t_full, t_empty, turn)


@gluon.jit
def fused_forward(
    ring,
    hidden,
    w_gate_up,
    w_down,
    ring_ptr,
    x_ptrs,
    slot_ptrs,
    arrived_ptrs,
    row_source,
    block_expert,
    table,
    weights,
    result,
    x_ready,
    h_ready,
    d_done,
    tickets,
    pulls,
    block_counts,
    first_rank,
    ctas,
    experts,
    max_blocks,
    num_tasks,
    tiles_of_all,
    routes,
    H,
    F,
    RANKS: gl.constexpr,
    TOP_K: gl.constexpr,
    RING: gl.constexpr,
):
    """One launch of one rank or of several; see `Forward.build` for the shapes."""
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], ring.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], w_down.layout)
    c_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, BM, HALF], hidden.layout)
    tasks = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = alloc_mbarriers(STAGES), alloc_mbarriers(STAGES)
    c_full, c_empty = alloc_mbarriers(2), alloc_mbarriers(2)
    t_full, t_empty = alloc_mbarriers(2), alloc_mbarriers(2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 1)
    for i in gl.static_range(2):
        mbarrier.init(c_full.index(i), 1)
        mbarrier.init(c_empty.index(i), 1)
        mbarrier.init(t_full.index(i), 1)
        # The math warps and the store warps.
        mbarrier.init(t_empty.index(i), 2)
    rank = first_rank + gl.program_id(0) // ctas
    blocks = rank * max_blocks
    row_source += blocks * BM
    num_blocks = gl.load(block_counts + rank)
    x_ready += blocks
    h_ready += blocks
    d_done += blocks
    tokens = rank * (routes // TOP_K)
    warp_specialize(
        [
            (math_warps, (tasks, t_full, t_empty, a_bufs, b_bufs, full, empty, c_bufs, c_full, c_empty, H, F)),
            (
                store_warps,
                (
                    hidden,
                    slot_ptrs,
                    arrived_ptrs,
                    row_source,
                    weights + rank * routes,
                    result + tokens * H,
                    h_ready,
                    d_done,
                    tasks,
                    t_full,
                    t_empty,
                    c_bufs,
                    c_full,
                    c_empty,
                    rank,
                    routes,
                    tiles_of_all,
                    H,
                    F,
                    RANKS,
                    TOP_K,
                    RING,
                ),
            ),
            (
                dispatch_warps,
                (
                    x_ptrs,
                    row_source,
                    ring_ptr + rank * RING * BM * H,
                    x_ready,
                    h_ready,
                    pulls + rank,
                    num_blocks,
                    routes,
                    H,
                    F,
                    TOP_K,
                    RING,
                ),
            ),
            (
                load_warp,
                (
                    ring,
                    hidden,
                    w_gate_up,
                    w_down,
                    table + rank * num_tasks,
                    tickets + rank,
                    block_expert + blocks,
                    x_ready,
                    h_ready,
                    tasks,
                    t_full,
                    t_empty,
                    a_bufs,
                    b_bufs,
                    full,
                    empty,
                    rank,
                    experts,
                    num_tasks,
                    H,
                    F,
                    RING,
                ),
            ),
        ],
        [4, 2, 1],
        [104, 64, 64],
    )


# ---------------------------------------------------------------------------------------------------------- the host


def row_blocks(ids: torch.Tensor, rank: int, experts: int) -> tuple[list[int], list[int]]:
    """Rows of a rank, ordered by (expert, source rank, token, k) and padded to whole blocks.

    Args:
        ids: expert of each route, int [ranks, routes].
        rank: whose rows.
        experts: experts of a rank.

    Returns:
        source rank * routes + route of every row (-1: padding), and the local expert of every block.
    """
    sources, owners = [], []
    flat = ids.flatten().tolist()
    for expert in range(experts):
        mine = [i for i, e in enumerate(flat) if e == rank * experts + expert]
        mine += [-1] * (-len(mine) % BM.value)
        sources += mine
        owners += [expert] * (len(mine) // BM.value)
    return sources, owners


def order_tasks(num_blocks: int, minibatch: int, hidden_tiles: int, down_tiles: int, token_tiles: int) -> list[int]:
    """Tasks of a rank: gate/up tiles of each minibatch, then the down tiles of the one before; sums at the end."""
    groups = [range(b, min(b + minibatch, num_blocks)) for b in range(0, num_blocks, minibatch)]
    tasks = []
    for i in range(len(groups) + 1):
        if i < len(groups):
            tasks += [GATE_UP.value << 28 | b << 12 | n for n in range(hidden_tiles) for b in groups[i]]
        if i >= 1:
            tasks += [DOWN.value << 28 | b << 12 | n for n in range(down_tiles) for b in groups[i - 1]]
    return tasks + [SUM.value << 28 | tile << 12 for tile in range(token_tiles)]


class Forward(Case):
    """A layer of a few tokens: every rank has `experts` experts and `tokens` tokens with TOP_K routes each."""

    top_k, hidden_size, intermediate = 2, 128, 128

    def __init__(
        self, ranks: int, tokens: int, experts: int, ctas: int = 2, ring: int = 2, launches: int = 1, **options
    ):
        self.ranks, self.tokens, self.experts, self.ctas = ranks, tokens, experts, ctas
        self.ring, self.launches, self.options = ring, launches, options
        self.routes = tokens * self.top_k

    def inputs(self):
        generator, H, F = rng(), self.hidden_size, self.intermediate
        total = self.ranks * self.experts
        scores = torch.rand(self.ranks, self.tokens, total, generator=generator)
        return {
            "x": normal(generator, self.ranks, self.tokens, H),
            "ids": scores.topk(self.top_k).indices.reshape(self.ranks, self.routes),
            "weights": torch.rand(self.ranks, self.routes, generator=generator),
            "w_gate_up": normal(generator, total, 2 * F, H, scale=H**-0.5),
            "w_down": normal(generator, total, H, F, scale=F**-0.5),
        }

    def schedule(self, ids):
        """Tables of all ranks, padded to equal sizes: row sources, block experts, tasks; and blocks of each rank."""
        rows = [row_blocks(ids, rank, self.experts) for rank in range(self.ranks)]
        counts = [len(owners) for _, owners in rows]
        token_tiles = -(-self.tokens // TOKENS.value)
        down_tiles = self.hidden_size // BN.value
        tables = [order_tasks(n, 1, self.intermediate // HALF.value, down_tiles, token_tiles) for n in counts]
        most = max(counts)

        def padded(lists, size):
            return guarded(torch.tensor([x + [-1] * (size - len(x)) for x in lists], dtype=torch.int32))

        return {
            "row_source": padded([sources for sources, _ in rows], most * BM.value),
            "block_expert": padded([owners for _, owners in rows], most),
            "table": padded(tables, max(map(len, tables))),
            "block_counts": guarded(torch.tensor(counts, dtype=torch.int32)),
            "max_blocks": most,
            "num_tasks": max(map(len, tables)),
            "tiles_of_all": sum(counts) * down_tiles,
        }

    def build(self, emu):
        given, H, F, R = self.inputs(), self.hidden_size, self.intermediate, self.ranks
        args = self.schedule(given["ids"])
        blocks = args["max_blocks"]
        ring, hidden = (guarded(blank(R * self.ring * BM.value, n)) for n in (H, F))
        # Bulk loads reach ring and hidden rows that only the kernel has written.
        emu.register("ring", ring, written=False)
        emu.register("hidden", hidden, written=False)
        zeros = {"x_ready": R * blocks, "h_ready": R * blocks, "d_done": R * blocks, "tickets": R, "pulls": R}
        args |= {name: guarded(torch.zeros(n, dtype=torch.int32)) for name, n in zeros.items()}
        peers = {
            "x": list(map(guarded, given["x"])),
            "slot": [guarded(blank(self.routes, H)) for _ in range(R)],
            "arrived": [guarded(torch.zeros(1, dtype=torch.int32)) for _ in range(R)],
        }
        for name, tensors in peers.items():
            args[f"{name}_ptrs"] = guarded(torch.tensor([t.data_ptr() for t in tensors]))
            for rank, tensor in enumerate(tensors):
                emu.register(f"r{rank}.{name}", tensor, written=name != "slot")
        w_gate_up, w_down = guarded(given["w_gate_up"].view(-1, H)), guarded(given["w_down"].view(-1, F))
        result = guarded(blank(R, self.tokens, H, dtype=torch.float32))
        args |= dict(ring=box(ring, 64, 64), hidden=box(hidden, 64, 64), ring_ptr=ring)
        args |= dict(w_gate_up=box(w_gate_up, 64, 64), w_down=box(w_down, 128, 64))
        args |= dict(weights=guarded(given["weights"]), result=result, ctas=self.ctas, experts=self.experts)
        args |= dict(routes=self.routes, H=H, F=F, RANKS=R, TOP_K=self.top_k, RING=self.ring)
        if self.launches == 1:
            ctas = self.ctas
            emu.launch(fused_forward, R * ctas, args | dict(first_rank=0), rank=lambda pid: pid // ctas)
        else:
            for rank in range(R):
                emu.launch(fused_forward, self.ctas, args | dict(first_rank=rank), rank=rank)
        return {"result": result}

    def expected(self):
        given, H = self.inputs(), self.hidden_size
        x, result = given["x"].float(), torch.zeros(self.ranks, self.tokens, H)
        for rank in range(self.ranks):
            for route, expert in enumerate(given["ids"][rank].tolist()):
                token = route // self.top_k
                gate, up = (given["w_gate_up"][expert].float() @ x[rank, token]).chunk(2)
                hidden = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16).float()
                y = given["w_down"][expert].float() @ hidden
                result[rank, token] += given["weights"][rank, route] * y
        return {"result": result}

    def check(self, outputs):
        error = relative_l2(outputs["result"], self.answer["result"])
        assert error < 2e-3, f"relative error {error:.2e}"


CASES = {
    "one_rank": Forward(1, 20, 3),
    "two_ranks": Forward(2, 20, 3),
    "two_launches": Forward(2, 20, 3, launches=2),
    "one_cta_each": Forward(2, 20, 3, launches=2, resident=1),
}
