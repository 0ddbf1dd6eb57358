"""Waiting by relaxed polling with a deadline on the device clock, and an acquire fence once the flag has come."""

import torch

from moeloom.compat import fence_acq_rel, gl, gluon, partition_timer, thread_barrier
from tests.emulator.harness import Case, guarded, rng


@gluon.jit
def produce(values, shared, flag, SIZE: gl.constexpr):
    """Write the data, then the flag."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, SIZE, layout)
    gl.store(shared + at, gl.load(values + at) * 2)
    thread_barrier()
    gl.atomic_add(flag, 1, sem="release", scope="gpu")


@gluon.jit
def consume(shared, flag, out, late, limit, SIZE: gl.constexpr):
    """Wait for the flag, at most `limit` ns; then read the data, or say that it came too late."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, SIZE, layout)
    end = partition_timer() + limit
    seen = gl.atomic_add(flag, 0, sem="relaxed", scope="gpu")
    while (seen < 1) & (partition_timer() < end):
        seen = gl.atomic_add(flag, 0, sem="relaxed", scope="gpu")
    fence_acq_rel("gpu")
    # The fence orders the polling thread alone; the others follow it through the barrier.
    thread_barrier()
    if seen >= 1:
        gl.store(out + at, gl.load(shared + at) + 1)
    else:
        gl.store(out + at, gl.full([SIZE], -7, gl.int32, layout))
        gl.store(late, 1)


@gluon.jit
def hand_over(values, shared, flag, out, late, limit, SIZE: gl.constexpr):
    """CTA 0 consumes what CTA 1, if there is one, produces. All int32; flag and late start at 0."""
    if gl.program_id(0) == 0:
        consume(shared, flag, out, late, limit, SIZE)
    else:
        produce(values, shared, flag, SIZE)


class Polling(Case):
    """With a producer, or without one, so that the deadline passes."""

    size = 256

    def __init__(self, ctas: int, limit: int) -> None:
        self.ctas, self.limit = ctas, limit

    def inputs(self):
        return {"values": torch.randint(0, 99, (self.size,), generator=rng(), dtype=torch.int32)}

    def build(self, emu):
        values = guarded(self.inputs()["values"])
        shared, out = (guarded(torch.full((self.size,), -1, dtype=torch.int32)) for _ in range(2))
        flag, late = (guarded(torch.zeros(1, dtype=torch.int32)) for _ in range(2))
        args = dict(values=values, shared=shared, flag=flag, out=out, late=late, limit=self.limit, SIZE=self.size)
        emu.launch(hand_over, self.ctas, args)
        return {"out": out, "late": late}

    def expected(self):
        values = self.inputs()["values"]
        if self.ctas == 1:
            return {"out": torch.full_like(values, -7), "late": torch.ones(1, dtype=torch.int32)}
        return {"out": values * 2 + 1, "late": torch.zeros(1, dtype=torch.int32)}


CASES = {"arrives": Polling(2, 10**15), "late": Polling(1, 20_000_000)}
