"""Dependent tasks handed out by in-order tickets: every wait points to an earlier task, so one resident CTA is enough."""

import torch

from moeloom.compat import gl, gluon, thread_barrier
from tests.emulator.harness import Case, blank, guarded, rng


@gluon.jit
def task_of(ticket, num_tasks):
    """The task of a ticket. In order: what a task waits for has been handed out before."""
    return ticket


@gluon.jit
def run_tasks(values, out, ready, counter, num_tasks, SIZE: gl.constexpr, REACH: gl.constexpr):
    """out[i] = (values[i] + 3 * out[i - 1] + out[i - REACH]) % 1009, where rows before the first count as zeros.

    values, out int32[num_tasks, SIZE]; ready int32[num_tasks] and counter int32[1] start at 0.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, SIZE, layout)
    ticket = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    while ticket < num_tasks:
        task = task_of(ticket, num_tasks)
        result = gl.load(values + task * SIZE + at)
        if task >= 1:
            while gl.atomic_add(ready + task - 1, 0, sem="acquire", scope="gpu") == 0:
                pass
            result += 3 * gl.load(out + (task - 1) * SIZE + at)
        if task >= REACH:
            while gl.atomic_add(ready + task - REACH, 0, sem="acquire", scope="gpu") == 0:
                pass
            result += gl.load(out + (task - REACH) * SIZE + at)
        gl.store(out + task * SIZE + at, result % 1009)
        thread_barrier()
        gl.atomic_add(ready + task, 1, sem="release", scope="gpu")
        ticket = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")


class Tasks(Case):
    """9 tasks on 4 CTAs, of which one, two or all fit; or most SMs belong to someone else, for a time or for ever."""

    tasks, size, reach = 9, 128, 4

    def __init__(self, held: int = 0, until: str = "end", **options):
        self.held, self.until, self.options = held, until, options

    def inputs(self):
        return {"values": torch.randint(0, 1009, (self.tasks, self.size), generator=rng(), dtype=torch.int32)}

    def build(self, emu):
        values = guarded(self.inputs()["values"])
        out = guarded(blank(*values.shape, dtype=torch.int32))
        ready, counter = (guarded(torch.zeros(n, dtype=torch.int32)) for n in (self.tasks, 1))
        args = dict(values=values, out=out, ready=ready, counter=counter, num_tasks=self.tasks)
        emu.launch(run_tasks, 4, args | dict(SIZE=self.size, REACH=self.reach))
        if self.held:
            emu.hold_sms(self.held, until=self.until)
        return {"out": out}

    def expected(self):
        values, rows = self.inputs()["values"], []
        for i, row in enumerate(values):
            row = row + 3 * rows[i - 1] if i >= 1 else row
            row = row + rows[i - self.reach] if i >= self.reach else row
            rows.append(row % 1009)
        return {"out": torch.stack(rows)}


CASES = {
    "all": Tasks(),
    "one": Tasks(resident=1),
    "two": Tasks(resident=2),
    "held": Tasks(3, resident=4),
    "held_a_while": Tasks(4, "random", resident=4),
}
