"""Checks in PTX that whatever a partition stored stands behind a barrier when one of its threads releases it.

A release is one thread's instruction. It covers other threads' stores only if a barrier of the whole partition lies
between, and bulk stores only if, in this order, their completion was waited for (the form without ``.read``), a
``fence.proxy.async`` was passed, and then that barrier. The check walks all paths of each function and keeps, for
each place, the *facts* that may hold there, such as "an ordinary store was made and no barrier met since".

An acquire, too, is one thread's: what it read it shares with the others, but they have acquired nothing until they
meet it at a barrier. And it holds for ordinary accesses; bulk ones need a ``fence.proxy.async`` first.

Proved for every path of a function, taken or not, if nothing is reported:

- each ``release`` and ``acq_rel`` atomic or store, and each relaxed one that follows an ``acq_rel`` or ``sc`` fence
  with no barrier between, has all of the above before it;
- between an acquire that some threads only did (an atomic under a guard, or a fence behind a relaxed read under a
  guard) and the next access to global memory there is a barrier of the partition;
- between any acquire and the next bulk load there is a ``fence.proxy.async``.

Not proved: that a release or acquire is there at all, that its scope is wide enough, that it names the right flag, and
anything across partitions or CTAs. That is the emulator's part, which does not know what the compiler writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from moeloom.compile.partitions import widths
from moeloom.compile.ptx import Function, Instruction, read


class Fact(IntEnum):
    """What may hold at a place. The value is the place in a state."""

    STORED = 0
    ISSUED = 1
    COMMITTED = 2
    READ = 3
    PARTLY = 4
    WRITTEN = 5
    FENCED = 6
    FENCE = 7
    ACQUIRED = 8
    POLLED = 9
    ALONE = 10


_WHY = {
    Fact.STORED: "a store may come before it with no barrier of the partition between",
    Fact.ISSUED: "a bulk store may come before it that no commit_group follows",
    Fact.COMMITTED: "a bulk store may come before it whose completion is not waited for",
    Fact.READ: "a bulk store may come before it of which only the reading is waited for (wait_group.read)",
    Fact.PARTLY: "a bulk store may come before it that a wait_group leaves in flight",
    Fact.WRITTEN: "a bulk store may come before it, complete, with no fence.proxy.async between",
    Fact.FENCED: "a bulk store may come before it, complete and fenced, with no barrier of the partition behind the "
    "fence",
}
#: What a release must not have before it.
_DIRTY = tuple(_WHY)
_LOAD = "an acquire may come before this bulk load with no fence.proxy.async between"
_ALONE = "an acquire of some threads only may come before this access with no barrier of the partition between"

#: No instruction: the fact does not hold.
_NONE = 1 << 60
State = tuple[int, ...]
_CLEAN: State = (_NONE,) * len(Fact)
#: Who calls a function may have left anything behind.
_CALLER = -1


@dataclass(frozen=True)
class Violation:
    """A release (or an access behind an acquire) that the check could not clear.

    Attributes:
        function: its name.
        why: what is missing.
        line, text, source: of the release or access: PTX line, instruction, Python line.
        cause_line, cause_text, cause_source: of the store (or acquire) that can reach it; line 0: made by a caller.
    """

    function: str
    why: str
    line: int
    text: str
    source: str
    cause_line: int
    cause_text: str
    cause_source: str

    def __str__(self) -> str:
        cause = f"line {self.cause_line} ({self.cause_source}): {self.cause_text}" if self.cause_line else "a caller's"
        return f"PTX line {self.line} ({self.source}): {self.text}: {self.why}. It is {cause}"


@dataclass
class Order:
    """What was found in one PTX text.

    Attributes:
        releases, bulk_stores, bulk_loads, barriers: how many instructions of that kind there are.
        violations: what could not be cleared.
    """

    releases: int = 0
    bulk_stores: int = 0
    bulk_loads: int = 0
    barriers: int = 0
    violations: list[Violation] = field(default_factory=list)


def _is_global(i: Instruction) -> bool:
    """Whether a load, store or atomic may touch global memory; without a state space it may."""
    return not any(p.startswith(("shared", "local", "param", "const")) for p in i.parts[1:])


def is_release(i: Instruction) -> bool:
    """Whether it is an atomic or a store that releases to others outside the CTA."""
    return (
        i.parts[0] in ("atom", "red", "st", "multimem") and bool({"release", "acq_rel"} & {*i.parts}) and _is_global(i)
    )


def is_store(i: Instruction) -> bool:
    """Whether it writes global memory in the ordinary way: data that a later release publishes."""
    kinds = ("st", "red", "atom") if i.parts[0] != "multimem" else ("multimem",)
    return i.parts[0] in kinds and _is_global(i) and "async" not in i.parts and "ld_reduce" not in i.parts


def is_fence(i: Instruction) -> bool:
    """Whether it is a fence that releases and acquires."""
    return (i.parts[0] == "fence" and "proxy" not in i.parts and "mbarrier_init" not in i.parts) or (
        i.parts[0] == "membar" and "proxy" not in i.parts
    )


def is_acquire(i: Instruction) -> bool:
    """Whether what follows it may rely on what others released."""
    acquires = i.parts[0] in ("ld", "atom", "red") and bool({"acquire", "acq_rel"} & {*i.parts}) and _is_global(i)
    return acquires or is_fence(i)


def is_strong_read(i: Instruction) -> bool:
    """Whether it reads global memory so that it may learn of a release, now or with a later fence."""
    return i.parts[0] in ("ld", "atom") and bool({"relaxed", "volatile"} & {*i.parts}) and _is_global(i)


def is_access(i: Instruction) -> bool:
    """Whether it reads or writes data in global memory, in the ordinary way or in bulk; flags are not data."""
    strong = {"relaxed", "volatile", "acquire", "release", "acq_rel"} & {*i.parts}
    plain = i.parts[0] in ("ld", "st") and "async" not in i.parts and not strong and _is_global(i)
    return plain or is_bulk_store(i) or is_bulk_load(i)


def is_bulk_store(i: Instruction) -> bool:
    """Whether it is a bulk copy (or reduction) from shared to global memory."""
    if i.parts[0] != "cp" or "bulk" not in i.parts or "prefetch" in i.parts or "global" not in i.parts:
        return False
    shared = [n for n, p in enumerate(i.parts) if p.startswith("shared")]
    return bool(shared) and i.parts.index("global") < shared[0]


def is_bulk_load(i: Instruction) -> bool:
    """Whether it is a bulk copy from global to shared memory."""
    bulk = i.parts[0] == "cp" and "bulk" in i.parts and "prefetch" not in i.parts and "global" in i.parts
    return bulk and not is_bulk_store(i)


def is_barrier(i: Instruction, warps: set[int | None]) -> bool:
    """Whether all threads of the partition meet there, if it is ``warps`` wide."""
    if i.guard:
        return False
    if i.name == "bar.warp.sync":
        return warps == {1} and i.operands in ("-1", "0xffffffff", "4294967295")
    if i.parts[0] in ("bar", "barrier") and i.parts[-1] != "arrive" and ("sync" in i.parts or "red" in i.parts):
        count = i.operands.split(",")[1:]
        number = count[-1].strip() if count and "red" not in i.parts else ""
        known = {32 * w for w in warps if w is not None}
        return not number or (number.isdigit() and all(int(number) >= k for k in known))
    return i.name.startswith("barrier.cluster.wait")


def _group_wait(i: Instruction) -> tuple[int, bool] | None:
    """Groups that a wait for bulk stores leaves in flight, and whether it waits for reading only."""
    if i.parts[0] != "cp" or "wait_group" not in i.parts or "bulk" not in i.parts or i.guard:
        return None
    return (int(i.operands), "read" in i.parts) if i.operands.isdigit() else None


def _move(state: list[int], sources: tuple[Fact, ...], to: Fact | None) -> None:
    origin = min(state[s] for s in sources)
    for s in sources:
        state[s] = _NONE
    if to is not None:
        state[to] = min(state[to], origin)


def _after(state: State, number: int, i: Instruction, barrier: bool, pending: int) -> State:
    """The state behind an instruction."""
    s = list(state)
    wait = _group_wait(i)
    if barrier:
        _move(s, (Fact.STORED, Fact.FENCED, Fact.FENCE, Fact.ALONE), None)
    elif is_bulk_store(i):
        s[Fact.ISSUED] = min(s[Fact.ISSUED], number)
    elif i.name == "cp.async.bulk.commit_group" and not i.guard:
        _move(s, (Fact.ISSUED,), Fact.COMMITTED)
    elif wait and wait[1]:
        _move(s, (Fact.COMMITTED,), Fact.READ)
    elif wait:
        _move(s, (Fact.COMMITTED, Fact.READ, Fact.PARTLY), Fact.WRITTEN if wait[0] <= pending else Fact.PARTLY)
    elif i.name in ("fence.proxy.async", "fence.proxy.async.global") and not i.guard:
        _move(s, (Fact.WRITTEN,), Fact.FENCED)
        s[Fact.ACQUIRED] = _NONE
    elif i.parts[0] == "call":
        s[Fact.STORED] = min(s[Fact.STORED], number)
        s[Fact.ACQUIRED] = min(s[Fact.ACQUIRED], number)
    elif is_store(i) and not is_release(i):
        s[Fact.STORED] = min(s[Fact.STORED], number)
    if is_fence(i) and any(s[f] != _NONE for f in _DIRTY):
        s[Fact.FENCE] = min(s[Fact.FENCE], number)
    if is_acquire(i):
        s[Fact.ACQUIRED] = min(s[Fact.ACQUIRED], number)
        if not is_fence(i) and i.guard:
            s[Fact.ALONE] = min(s[Fact.ALONE], number)
    if is_fence(i):
        _move(s, (Fact.POLLED,), Fact.ALONE)
    elif is_strong_read(i) and i.guard:
        s[Fact.POLLED] = min(s[Fact.POLLED], number)
    return tuple(s)


def _join(a: State, b: State) -> State:
    return tuple(map(min, a, b))


class _Walk:
    """One function: states by block, then the violations in it."""

    def __init__(self, function: Function, pending: int) -> None:
        self.function, self.pending = function, pending
        self.warps = widths(function)
        self.code = [i for block in function.blocks for i in block.instructions]
        self.first = []
        count = 0
        for block in function.blocks:
            self.first.append(count)
            count += len(block.instructions)
        known = {Fact.FENCE: _NONE, Fact.POLLED: _NONE, Fact.ALONE: _NONE}
        unknown = tuple(known.get(fact, _CALLER) for fact in Fact)
        self.before: list[State | None] = [None] * len(function.blocks)
        self.before[0] = _CLEAN if function.is_kernel else unknown

    def through(self, n: int, see=None) -> State:
        """The state behind a block; ``see(number, instruction, state)`` is called before each instruction."""
        state = self.before[n]
        for number, i in enumerate(self.function.blocks[n].instructions, self.first[n]):
            if see:
                see(number, i, state)
            state = _after(state, number, i, is_barrier(i, self.warps[n]), self.pending)
        return state

    def settle(self) -> None:
        """Carry states along all edges until nothing changes."""
        work = [0]
        while work:
            n = work.pop()
            state = self.through(n)
            for follower in self.function.blocks[n].successors:
                old = self.before[follower]
                new = state if old is None else _join(old, state)
                if new != old:
                    self.before[follower] = new
                    work.append(follower)

    def violation(self, i: Instruction, why: str, cause: int) -> Violation:
        """Describe one."""
        by = self.code[cause] if cause != _CALLER else None
        more = (by.line, by.text, by.source) if by else (0, "", "")
        return Violation(self.function.name, why, i.line, i.text, i.source, *more)

    def find(self) -> list[Violation]:
        """Return what cannot be cleared."""
        found: list[Violation] = []

        def see(number: int, i: Instruction, state: State) -> None:
            if is_release(i):
                found.extend(self.violation(i, _WHY[f], state[f]) for f in _DIRTY if state[f] != _NONE)
            elif is_store(i) and {"relaxed", "volatile"} & {*i.parts} and state[Fact.FENCE] != _NONE:
                why = "a fence may come before it that makes it a release, with stores in front of the fence"
                found.append(self.violation(i, why, state[Fact.FENCE]))
            if is_bulk_load(i) and state[Fact.ACQUIRED] != _NONE:
                found.append(self.violation(i, _LOAD, state[Fact.ACQUIRED]))
            if is_access(i) and state[Fact.ALONE] != _NONE:
                found.append(self.violation(i, _ALONE, state[Fact.ALONE]))

        for n, state in enumerate(self.before):
            if state is not None:
                self.through(n, see)
        return found


def check(text: str, *, pending: int = 0) -> Order:
    """Check the PTX of one kernel.

    Args:
        text: PTX.
        pending: groups of bulk stores that may be in flight at a release because it publishes earlier ones; the check
            then accepts ``wait_group n`` up to that ``n``.

    Raises:
        PtxError: something in it is not understood.
    """
    out = Order()
    for function in read(text):
        walk = _Walk(function, pending)
        walk.settle()
        out.violations += walk.find()
        for n, block in enumerate(function.blocks):
            for i in block.instructions:
                out.releases += is_release(i)
                out.bulk_stores += is_bulk_store(i)
                out.bulk_loads += is_bulk_load(i)
                out.barriers += is_barrier(i, walk.warps[n])
    return out
