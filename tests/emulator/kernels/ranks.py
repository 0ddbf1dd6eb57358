"""A barrier between ranks, and data read from peers through a table of their addresses."""

import torch

from moeloom.compat import gl, gluon, thread_barrier
from tests.emulator.harness import Case, blank, guarded, normal, rng

CTAS = gl.constexpr(2)


@gluon.jit
def meet(arrived, arrived_ptrs, epoch, RANKS: gl.constexpr):
    """Return once all CTAs of all ranks have come here `epoch` times; what they wrote before is visible."""
    thread_barrier()
    for peer in range(RANKS):
        theirs = gl.load(arrived_ptrs + peer).to(gl.pointer_type(gl.int32))
        gl.atomic_add(theirs, 1, sem="release", scope="sys")
    while gl.atomic_add(arrived, 0, sem="acquire", scope="sys") < epoch * RANKS * CTAS:
        pass


@gluon.jit
def add_peers(x_ptrs, arrived_ptrs, out_ptrs, rank, num_steps, RANKS: gl.constexpr, SIZE: gl.constexpr):
    """out[step] = sum of all ranks' x; then x = 2 * x + rank. Each CTA has one part of the vectors, SIZE elements.

    x_ptrs, out_ptrs: int64[RANKS], addresses of fp32[CTAS * SIZE] and fp32[num_steps, CTAS * SIZE] of each rank;
    arrived_ptrs: int64[RANKS], addresses of int32[1], which start at 0.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    part = gl.program_id(0) % CTAS
    at = part * SIZE + gl.arange(0, SIZE, layout)
    # Read what the neighbour part's CTA wrote, so that all CTAs take part in the barrier.
    other = (part + 1) % CTAS * SIZE + gl.arange(0, SIZE, layout)
    x = gl.load(x_ptrs + rank).to(gl.pointer_type(gl.float32))
    out = gl.load(out_ptrs + rank).to(gl.pointer_type(gl.float32))
    arrived = gl.load(arrived_ptrs + rank).to(gl.pointer_type(gl.int32))
    for step in range(num_steps):
        meet(arrived, arrived_ptrs, 2 * step + 1, RANKS)
        total = gl.zeros([SIZE], gl.float32, layout)
        for peer in range(RANKS):
            theirs = gl.load(x_ptrs + peer).to(gl.pointer_type(gl.float32))
            total += gl.load(theirs + other)
        gl.store(out + step * SIZE * CTAS + other, total)
        # All have read before anyone writes the next step's values.
        meet(arrived, arrived_ptrs, 2 * step + 2, RANKS)
        gl.store(x + at, gl.load(x + at) * 2 + rank)


@gluon.jit
def add_of_rank(x_ptrs, arrived_ptrs, out_ptrs, rank, num_steps, RANKS: gl.constexpr, SIZE: gl.constexpr):
    """Launched once for each rank, with its number."""
    add_peers(x_ptrs, arrived_ptrs, out_ptrs, rank, num_steps, RANKS, SIZE)


@gluon.jit
def add_of_all(x_ptrs, arrived_ptrs, out_ptrs, num_steps, RANKS: gl.constexpr, SIZE: gl.constexpr):
    """Launched once for all ranks: CTAs 0 and 1 are rank 0, and so on."""
    add_peers(x_ptrs, arrived_ptrs, out_ptrs, gl.program_id(0) // CTAS, num_steps, RANKS, SIZE)


class Ranks(Case):
    """Three steps of x <- 2 x + rank on every rank, and the sum over ranks of each step."""

    ranks, size, steps = 3, 128, 3

    def __init__(self, launches: int) -> None:
        self.launches = launches

    def inputs(self):
        return {"x": normal(rng(), self.ranks, 2 * self.size, dtype=torch.float32)}

    def build(self, emu):
        x = [guarded(t) for t in self.inputs()["x"]]
        arrived = [guarded(torch.zeros(1, dtype=torch.int32)) for _ in x]
        out = [guarded(blank(self.steps, 2 * self.size, dtype=torch.float32)) for _ in x]
        tables = {}
        for name, tensors in (("x", x), ("arrived", arrived), ("out", out)):
            tables[f"{name}_ptrs"] = guarded(torch.tensor([t.data_ptr() for t in tensors]))
            for rank, tensor in enumerate(tensors):
                emu.register(f"r{rank}.{name}", tensor)
        args = tables | dict(num_steps=self.steps, RANKS=self.ranks, SIZE=self.size)
        if self.launches == 1:
            emu.launch(add_of_all, 2 * self.ranks, args, rank=lambda pid: pid // 2)
        else:
            for rank in range(self.ranks):
                emu.launch(add_of_rank, 2, args | dict(rank=rank), rank=rank)
        return {f"out{rank}": t for rank, t in enumerate(out)}

    def expected(self):
        x, sums = self.inputs()["x"], []
        for _ in range(self.steps):
            sums.append(x[0] + x[1] + x[2])
            x = x * 2 + torch.arange(self.ranks)[:, None]
        return {f"out{rank}": torch.stack(sums) for rank in range(self.ranks)}


CASES = {"launch_each": Ranks(3), "launch_all": Ranks(1)}
