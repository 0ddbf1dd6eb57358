"""Handing memory from one partition to another CTA or rank: the only code that touches flags.

A *flag* is an int32 in global memory that only grows: a counter of finished pieces, or a call number. Who writes data
says so with :func:`publish`; who reads it, or writes over it, waits with :func:`await_`. Flags are compared by their
difference, so a call number may wrap around.

Example: two partitions each write half of a row block with bulk stores and call
``publish(ready + block, 1, "gpu", True)``; a third calls ``off = await_(ready + block, 2, deadline_ns, off, "gpu",
True)`` and then loads the block.

Every function here is called by all threads of a partition, with the same arguments in all of them. ``SCOPE`` is
``"gpu"`` if every CTA that looks at the flag runs on this GPU, else ``"sys"``; both sides must say the same.
"""

from __future__ import annotations

from moeloom.compat import (
    bulk_wait_writes,
    fence_acq_rel,
    fence_proxy_async,
    gl,
    gluon,
    nanosleep,
    thread_barrier,
    thread_timers,
)

# Nanoseconds between polls: short at first, because most waits are; doubled up to a length that is small against a
# minibatch, but takes the polls of 132 CTAs off the L2 slice that holds the flag.
FIRST_PAUSE_NS: gl.constexpr = gl.constexpr(16)
LONGEST_PAUSE_NS: gl.constexpr = gl.constexpr(256)


@gluon.jit
def ticket(ptr):
    """Take the next number of a counter, int32. Orders nothing: a ticket says what to do, not that data is there."""
    return gl.atomic_add(ptr, 1, sem="relaxed", scope="gpu")


@gluon.jit
def _finish_stores(BULK: gl.constexpr):
    """Bring all stores of the partition behind what thread 0 does next."""
    if BULK:
        # The ``.read`` form would return when shared memory is free again, with the data still on its way.
        bulk_wait_writes(0)
        # Bulk stores wrote through another proxy: nothing orders them with the ordinary release below but this.
        fence_proxy_async()
    # The release is one thread's, and releases only what that thread knows of: its own stores, and those of threads
    # that it met at a barrier after they stored. Triton 3.6 to 3.8 put no barrier here by themselves.
    thread_barrier()


@gluon.jit
def publish(ptr, amount, SCOPE: gl.constexpr, BULK: gl.constexpr):
    """Add to a flag, after everything that this partition stored so far.

    Args:
        ptr: pointer to an int32.
        amount: what to add, int32.
        SCOPE: ``"gpu"`` or ``"sys"``.
        BULK: whether the partition may have bulk stores in flight; False if all its stores are ordinary ones.
    """
    _finish_stores(BULK)
    gl.atomic_add(ptr, amount, sem="release", scope=SCOPE)


@gluon.jit
def await_(ptr, target, deadline_ns, off, SCOPE: gl.constexpr, BULK: gl.constexpr):
    """Wait until a flag has reached ``target``; what was published before is then visible to this partition.

    Args:
        ptr: pointer to an int32.
        target: int32.
        deadline_ns: nanoseconds that this wait may last, int64 or int32; 0: no end.
        off: int32; not 0: this role has given up before, so do not wait.
        SCOPE: ``"gpu"`` or ``"sys"``.
        BULK: whether bulk loads or bulk stores follow that touch what was waited for.

    Returns:
        int32: 0 if the flag is there; else the role has given up. It must touch none of the data then, and publish
        nothing, but go on with its tickets and mbarriers to the end, so that nobody inside the CTA waits for it.
    """
    # Relaxed: an acquire on every poll would throw away the L1 cache each time. Thread 0 polls, the value is handed
    # to all threads, so they agree on every branch here.
    seen = gl.atomic_add(ptr, 0, sem="relaxed", scope=SCOPE)
    if (seen - target < 0) & (off == 0):
        pause = FIRST_PAUSE_NS
        # Each thread measures by its own clock. That one of them is late is reduced over the threads below, as int32: a
        # reduction of the clocks themselves made ptxas spill a register.
        began = thread_timers()
        while (seen - target < 0) & (off == 0):
            nanosleep(pause)
            pause = gl.minimum(2 * pause, LONGEST_PAUSE_NS)
            seen = gl.atomic_add(ptr, 0, sem="relaxed", scope=SCOPE)
            if deadline_ns > 0:
                late = gl.max((thread_timers() - began > deadline_ns).to(gl.int32), 0)
                off = late & (seen - target < 0).to(gl.int32)
    # Makes of thread 0's relaxed read an acquire.
    fence_acq_rel(SCOPE)
    # Thread 0 has acquired, the other threads have not: they learn of it here.
    thread_barrier()
    if BULK:
        # What was acquired holds for ordinary accesses; bulk ones go through another proxy.
        fence_proxy_async()
    return off
