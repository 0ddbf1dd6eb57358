"""mbarriers: arrivals, transaction bytes, phases."""

from __future__ import annotations

from moeloom.emulator import state
from moeloom.emulator.agents import completed
from moeloom.emulator.alarms import Fault
from moeloom.emulator.clocks import Access, Clock
from moeloom.emulator.shared import SharedView
from moeloom.emulator.values import const


class Barrier:
    """The state of one mbarrier.

    Attributes:
        pending: arrivals that this phase still needs.
        bytes: transaction bytes that this phase still needs.
        phases: phases completed so far; the parity is what waits name.
    """

    def __init__(self, machine: object, name: str, count: int) -> None:
        self.name, self.count, self.pending, self.bytes, self.phases = name, count, count, 0, 0
        self.waiters: list = []
        self.in_flight = 0  # bytes of bulk loads issued in this phase that have not come
        self.arriving, self.complete = machine.new_clock(), machine.new_clock()

    def arrive(self, clock: Clock, count: int, more_bytes: int) -> None:
        """Count arrivals and bytes; complete the phase when none is missing."""
        self.arriving.join(clock)
        self.pending -= count
        self.bytes += more_bytes
        if self.pending < 0:
            raise Fault(f"more arrivals at mbarrier {self.name} than its count of {self.count}", "mbarrier")
        if self.pending == 0 and self.bytes < 0:
            text = f"mbarrier {self.name}: {-self.bytes} bytes more than phase {self.phases} expected have come"
            raise Fault(text, "mbarrier")
        if self.pending == 0 and self.bytes == 0:
            if self.in_flight:
                text = (
                    f"mbarrier {self.name}: phase {self.phases} completes while {self.in_flight} bytes of its bulk "
                    "loads are in flight; fewer bytes were expected than the loads bring"
                )
                raise Fault(text, "mbarrier")
            self.phases += 1
            self.pending = self.count
            self.complete.join(self.arriving)
            state.machine().wake(self.waiters)

    def deliver(self, who: Access, count: int) -> None:
        """Bytes of a bulk load have come."""
        self.in_flight -= count
        self.arrive(completed(who), 0, -count)


def barrier_of(view: SharedView) -> Barrier:
    """The mbarrier in a place of shared memory."""
    found = view.allocation.barriers.get(_place(view))
    if found is None:
        raise Fault(f"mbarrier {view.allocation.name}[{_place(view)}] is used before init", "mbarrier")
    return found


def _place(view: SharedView) -> int:
    """Number of the 8-byte word."""
    if view.place is None:
        base = view.allocation.raw.__array_interface__["data"][0]
        view.place = (view.raw.__array_interface__["data"][0] - base) // 8
    return view.place


def init(mbarrier: SharedView, count: object, **_: object) -> None:
    """Initialise with a number of arrivals."""
    agent = state.point()
    count, place = int(const(count)), _place(mbarrier)
    name = f"{mbarrier.allocation.name}[{place}]"
    old = mbarrier.allocation.barriers.get(place)
    if old is not None and (old.waiters or old.bytes):
        raise Fault(f"mbarrier {name} is initialised again while it is in use", "mbarrier")
    if count < 1:
        raise Fault(f"mbarrier {name} with a count of {count}", "mbarrier")
    mbarrier.allocation.barriers[place] = Barrier(agent.machine, name, count)


def invalidate(mbarrier: SharedView) -> None:
    """Give up an mbarrier."""
    state.point()
    barrier_of(mbarrier)
    del mbarrier.allocation.barriers[_place(mbarrier)]


def expect(mbarrier: SharedView, bytes: object = None, pred: object = True, *, bytes_per_cta: object = None, **_):
    """Arrive once and expect bytes."""
    agent = state.point()
    if const(pred):
        count = bytes if bytes is not None else bytes_per_cta
        barrier_of(mbarrier).arrive(agent.released(), 1, int(const(count)))


def arrive(mbarrier: SharedView, *, count: object = 1, pred: object = True, **_: object) -> None:
    """Arrive; the compiler puts a barrier of the partition's warps before it."""
    agent = state.point()
    agent.barrier()
    if const(pred):
        barrier_of(mbarrier).arrive(agent.released(), int(const(count)), 0)


def wait(mbarrier: SharedView, phase: object, pred: object = True, deps: tuple = (), **_: object) -> None:
    """Wait until the phase of this parity has completed. All threads wait."""
    agent = state.point()
    if not const(pred):
        return
    barrier, parity = barrier_of(mbarrier), int(const(phase))
    if parity not in (0, 1):
        raise Fault(f"phase {parity} at mbarrier {barrier.name}; it is a parity, 0 or 1", "mbarrier")
    while barrier.phases & 1 == parity:
        agent.machine.block(lambda: _missing(barrier, parity), barrier.waiters)
    agent.clock.join(barrier.complete)


def _missing(barrier: Barrier, parity: int) -> str:
    return (
        f"mbarrier {barrier.name}, parity {parity}: {barrier.phases} phases are complete; "
        f"of the next, {barrier.pending} of {barrier.count} arrivals and {barrier.bytes} bytes are missing"
    )
