"""Tensor core operations of Hopper."""

from __future__ import annotations

import numpy as np

from moeloom.emulator import state
from moeloom.emulator.agents import Event, Mma, completed
from moeloom.emulator.alarms import Fault
from moeloom.emulator.shared import SharedView
from moeloom.emulator.values import Accumulator, Value, const


def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    """``a @ b + acc`` in fp32. Operations of a partition complete in order."""
    agent = state.point()
    if a.shape[1] != b.shape[0] or acc.shape != [a.shape[0], b.shape[1]]:
        raise Fault(f"wgmma of {a.shape}, {b.shape} and accumulator {acc.shape}", "assertion")
    keep = bool(const(use_acc))
    out, before = Accumulator(acc.ty, acc.shape), list(agent.mmas)
    who = agent.asynchronous("wgmma")
    registers = None if isinstance(a, SharedView) else a.a

    def compute() -> None:
        for earlier in before:
            earlier.event.fire()
        for operand in (a, b):
            if isinstance(operand, SharedView):
                operand.check("read", who)
        left = a.values() if registers is None else registers
        product = np.matmul(left, b.values(), dtype=np.float32)
        if keep:
            product += acc.result if isinstance(acc, Accumulator) else acc.a
        out.result = product

    agent.mmas.append(Mma(Event(agent.machine, compute), who, out))
    return out if const(is_async) else warpgroup_mma_wait(0, (out,))


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    """Wait until at most so many operations are in flight. Returns the operands, now readable."""
    agent = state.point()
    count = max(len(agent.mmas) - int(const(num_outstanding)), 0)
    for mma in agent.mmas[:count]:
        mma.event.fire()
        mma.out.waited = True
        agent.clock.join(completed(mma.who))
    del agent.mmas[:count]
    return deps[0] if len(deps) == 1 else tuple(deps)


def warpgroup_mma_init(value: Value) -> Value:
    """An accumulator from registers."""
    return value


def fence_async_shared(cluster=False) -> None:
    """Make generic accesses of shared memory visible to asynchronous ones."""
    from moeloom.emulator.clocks import SHARED

    agent = state.point()
    agent.note("proxy fence")
    agent.clock.fence(SHARED)
