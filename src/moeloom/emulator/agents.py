"""What runs: launches, their CTAs, and the partitions of a CTA (agents). What they issue: pending operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from greenlet import greenlet

from moeloom.emulator.clocks import Access, Clock, rows_of

#: Clock components that a partition's asynchronous operations of one kind rotate through. An operation may take a slot
#: again while the one before is still pending; the epoch tells them apart.
SLOTS = {"bulk load": 8, "bulk store (read)": 2, "bulk store (write)": 2, "wgmma": 4, "cp.async": 4}


class Event:
    """A pending asynchronous operation. It takes effect when the scheduler fires it, or when a wait demands it."""

    __slots__ = ("done", "effect")

    def __init__(self, machine: object, effect: Callable[[], None]) -> None:
        self.effect, self.done = effect, False
        machine.events.append(self)

    def fire(self) -> None:
        """Take effect, once."""
        if not self.done:
            self.done = True
            self.effect()


class Launch:
    """One kernel launch, or one operation of the host in stream order.

    Attributes:
        name: for reports.
        device: GPU whose SMs it takes.
        after: what must end before it starts.
        clock: what is known to have happened when it has ended.
    """

    def __init__(self, name: str, device: object, after: list[Launch], num_ctas: int) -> None:
        self.name, self.device, self.after = name, device, after
        self.unstarted: list[int] = list(range(num_ctas))
        self.live, self.done, self.clock = 0, False, None
        self.start: Callable[[int], None] | None = None

    @property
    def ready(self) -> bool:
        """Whether everything before it has ended."""
        return all(other.done for other in self.after)


class CTA:
    """One thread block."""

    def __init__(self, launch: Launch, rank: int, pid: int, grid: int) -> None:
        self.launch, self.rank, self.pid, self.grid = launch, rank, pid, grid
        self.live = 0
        self.loads: dict[int, Access] = {}  # the latest bulk load of each clock component
        self.name = f"r{rank}.cta{pid}"


@dataclass
class Note:
    """An entry of an agent's log, kept in a diagnosing run to tell a wrong order from a missing part."""

    epoch: int
    op: str
    site: int


@dataclass
class Store:
    """A bulk store in flight: its read of shared memory and its write to global memory are separate events."""

    read: Event
    write: Event
    reader: Access
    writer: Access
    read_waited: bool = False


@dataclass
class Mma:
    """A wgmma in flight."""

    event: Event
    who: Access
    out: object


@dataclass
class Waiting:
    """What a blocked agent waits for."""

    text: Callable[[], str]
    timed: bool = False


@dataclass
class Polls:
    """Polling loops are put to sleep when a whole turn changed nothing.

    Attributes:
        seen: key of a polled address -> value seen in this turn.
        addresses: key -> one address, to find who can wake the agent.
        timed: the loop also read the device clock.
    """

    seen: dict = field(default_factory=dict)
    addresses: dict = field(default_factory=dict)
    timed: bool = False

    def clear(self) -> None:
        """Begin a new turn."""
        self.seen.clear()
        self.addresses.clear()
        self.timed = False


class Agent:
    """One partition of one CTA: warps that run the same code.

    Attributes:
        clock: what all its threads know.
        elect: what only the elected thread knows, which issues bulk operations and waits for their completion.
        epoch: number of the stretch between two of its synchronisations.
        published: last epoch that a partition barrier has ended: what *every* thread knows of the others' accesses.
    """

    def __init__(self, machine: object, name: str, cta: CTA, num_warps: int, body: Callable[[], None]) -> None:
        self.machine, self.name, self.cta, self.num_warps = machine, name, cta, num_warps
        self.comp = machine.new_component(name, self, is_async=False)
        self.clock, self.elect = machine.new_clock(), machine.new_clock()
        self.epoch, self.published = 1, 0
        self._set_epoch()
        self.slots: dict[str, list] = {}
        self.mmas: list[Mma] = []
        self.stores: list[Store] = []
        self.copies: list = []
        self.groups: list[list] = []
        self.polls = Polls()
        self.seen: dict[str, Clock] = {}
        self.fenced: dict[str, Clock] = {}
        self.log: list[Note] = []
        self.waiting: Waiting | None = None
        self.joiners: list[Agent] = []
        self.priority = machine.rng.random()
        self.done = False
        self.let = greenlet(body, machine.hub)

    def _set_epoch(self) -> None:
        self.clock.fit(self.machine.num_components)
        self.clock.m[0::3, self.comp] = self.epoch

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._set_epoch()

    def note(self, op: str) -> None:
        """Log a synchronising operation, in a diagnosing run."""
        if self.machine.diagnose:
            self.log.append(Note(self.epoch, op, self.machine.site()))

    def generic(self) -> Access:
        """An ordinary access by the partition's threads."""
        machine = self.machine
        return Access(self.comp, self.epoch, self.clock, machine.site() if machine.races_on else 0, False)

    def asynchronous(self, kind: str) -> Access:
        """An asynchronous operation that starts now, issued by the elected thread.

        The compiler puts a partition barrier before one that touches shared memory, so it comes after all that the
        partition did.
        """
        machine = self.machine
        state = self.slots.setdefault(kind, [0, []])
        number, comps = state
        if len(comps) < SLOTS[kind]:
            # cp.async is no asynchronous proxy: it sees generic writes without a fence, and counts as a generic access.
            comps.append([machine.new_component(f"{kind} of {self.name}", self, is_async=kind != "cp.async"), 0])
        slot = comps[number % SLOTS[kind]]
        slot[1] += 1
        state[0] += 1
        if machine.diagnose:
            machine.issued[slot[0], slot[1]] = len(self.log)
        site = machine.site() if machine.races_on else 0
        return Access(slot[0], slot[1], self.elected(), site, kind != "cp.async")

    def elected(self) -> Clock:
        """What the elected thread knows now."""
        clock = self.clock.copy()
        clock.join(self.elect)
        self._next_epoch()
        return clock

    def barrier(self) -> None:
        """A barrier of the partition's warps."""
        self.clock.join(self.elect)
        self.published = self.epoch
        self._next_epoch()

    def released(self) -> Clock:
        """What a release by one thread publishes: of the other threads' accesses those before the last barrier.

        The releasing thread need not be the elected one, so what only that one knows is left out too.
        """
        clock = self.clock.copy()
        column = clock.m[:, self.comp]
        np.minimum(column, self.published, out=column)
        if self.machine.diagnose:
            rows = rows_of("barrier", "all")
            clock.m[rows, self.comp] = self.clock.m[rows, self.comp]
            clock.join_rows(self.elect, rows)
            rows = rows_of("bulk-wait", "all")
            for store in self.stores:
                clock.join_rows(completed(store.writer), rows)
        self._next_epoch()
        return clock


def completed(who: Access) -> Clock:
    """What is known once an asynchronous operation is complete."""
    clock = who.clock.copy()
    clock.fit(who.comp + 1)
    clock.m[0::3, who.comp] = who.epoch
    return clock
