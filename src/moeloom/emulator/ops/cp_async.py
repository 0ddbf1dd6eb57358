"""cp.async: copies by the partition's threads from pointers into shared memory."""

from __future__ import annotations

import numpy as np

from moeloom.emulator import state
from moeloom.emulator.agents import Event, completed
from moeloom.emulator.alarms import Fault
from moeloom.emulator.dtypes import storage
from moeloom.emulator.ops.mbarrier import barrier_of
from moeloom.emulator.shared import SharedView
from moeloom.emulator.values import Value, as_value, const


def copy(smem: SharedView, pointer: Value, mask: object = None, *args: object, **_: object) -> None:
    """Start a copy; where the mask is false, zeros are written."""
    agent = state.point()
    if smem.shape != pointer.shape:
        raise Fault(f"cp.async of {pointer.shape} pointers into shared memory of {smem.shape}", "assertion")
    ty = pointer.ty.element_ty
    addresses = np.asarray(pointer.a)
    live = np.broadcast_to(np.asarray(as_value(True if mask is None else mask).a), addresses.shape)
    who = agent.asynchronous("cp.async")
    memory = agent.machine.memory

    def effect() -> None:
        bits = np.zeros(addresses.shape, storage(ty))
        bits[live] = memory.read(addresses[live], ty, who)
        smem.check("write", who)
        smem.write(bits)

    agent.copies.append((Event(agent.machine, effect), who))


def commit_group() -> None:
    """Close a group of the copies started since the last one."""
    agent = state.point()
    agent.groups.append(agent.copies)
    agent.copies = []


def wait_group(num_outstanding: object = 0) -> None:
    """Wait until at most so many groups are in flight. Each thread knows of its own copies; a barrier tells the others.

    The compiler puts a partition barrier before shared memory so filled is read, so all threads know.
    """
    agent = state.point()
    count = max(len(agent.groups) - int(const(num_outstanding)), 0)
    for group in agent.groups[:count]:
        for event, who in group:
            event.fire()
            agent.clock.join(completed(who))
    del agent.groups[:count]


def mbarrier_arrive(mbarrier: SharedView, increment_count: object = True, **_: object) -> None:
    """Let every thread arrive at an mbarrier once its copies so far are complete.

    With ``increment_count`` the phase first expects one more arrival of every thread; without, the barrier's count must
    include them.
    """
    agent = state.point()
    barrier, pending = barrier_of(mbarrier), [c for g in agent.groups for c in g] + agent.copies
    agent.copies, agent.groups = [], []
    count = 32 * agent.num_warps
    if const(increment_count):
        barrier.pending += count
    clock = agent.released()

    def effect() -> None:
        for event, who in pending:
            event.fire()
            clock.join(completed(who))
        barrier.arrive(clock, count, 0)

    Event(agent.machine, effect)
