"""CTAs that pass a token through memory: in ticket order (turnstile), or in any order (lock)."""

import torch

from moeloom.compat import gl, gluon, thread_barrier
from tests.emulator.harness import Case, guarded, rng


@gluon.jit
def pass_token(values, total, turn, counter, SIZE: gl.constexpr):
    """total = (total * 3 + values[i]) % 1009 for i = 0, 1, ... in order, each step by the CTA that drew its ticket.

    values int32[grid, SIZE], total int32[SIZE], turn and counter int32[1] start at 0.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, SIZE, layout)
    # CTAs start in any order: a turn by CTA number could wait for one that has no room.
    ticket = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    value = gl.load(values + ticket * SIZE + at)
    while gl.atomic_add(turn, 0, sem="acquire", scope="gpu") != ticket:
        pass
    gl.store(total + at, (gl.load(total + at) * 3 + value) % 1009)
    # One thread releases what all threads have stored.
    thread_barrier()
    gl.atomic_add(turn, 1, sem="release", scope="gpu")


@gluon.jit
def add_locked(values, total, lock, SIZE: gl.constexpr):
    """total += values[CTA], under a lock. values int32[grid, SIZE], total int32[SIZE], lock int32[1] starts at 0."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, SIZE, layout)
    value = gl.load(values + gl.program_id(0) * SIZE + at)
    while gl.atomic_cas(lock, 0, 1, sem="acquire", scope="gpu") != 0:
        pass
    gl.store(total + at, gl.load(total + at) + value)
    thread_barrier()
    gl.atomic_xchg(lock, 0, sem="release", scope="gpu")


class Turnstile(Case):
    """7 CTAs."""

    ctas, size = 7, 256

    def inputs(self):
        return {"values": torch.randint(0, 1009, (self.ctas, self.size), generator=rng(), dtype=torch.int32)}

    def build(self, emu):
        values = guarded(self.inputs()["values"])
        total, turn, counter = (guarded(torch.zeros(n, dtype=torch.int32)) for n in (self.size, 1, 1))
        args = dict(values=values, total=total, turn=turn, counter=counter, SIZE=self.size)
        emu.launch(pass_token, self.ctas, args)
        return {"total": total}

    def expected(self):
        total = torch.zeros(self.size, dtype=torch.int32)
        for value in self.inputs()["values"]:
            total = (total * 3 + value) % 1009
        return {"total": total}


class Lock(Case):
    """5 CTAs."""

    ctas, size = 5, 256

    def inputs(self):
        return {"values": torch.randint(0, 99, (self.ctas, self.size), generator=rng(), dtype=torch.int32)}

    def build(self, emu):
        values = guarded(self.inputs()["values"])
        total, lock = (guarded(torch.zeros(n, dtype=torch.int32)) for n in (self.size, 1))
        emu.launch(add_locked, self.ctas, dict(values=values, total=total, lock=lock, SIZE=self.size))
        return {"total": total}

    def expected(self):
        return {"total": self.inputs()["values"].sum(0, dtype=torch.int32)}


CASES = {"turnstile": Turnstile(), "lock": Lock()}
