"""Vector clocks and shadow memory: which accesses are ordered by the program, whatever the schedule was.

Every partition and every slot of asynchronous operations is a *component*. A :class:`Clock` holds for each component
the last epoch that its owner knows to have happened. Two accesses to the same memory of which one writes race unless
the later one's clock contains the earlier one's epoch.

Asynchronous operations (TMA, wgmma reading shared memory) belong to another memory proxy: they see generic writes only
through a proxy fence. So a clock has three rows: what happened; the part of it that a fence made visible to
asynchronous accesses of global memory; and the same for shared memory.

To say *why* nothing orders two accesses, a diagnosing run carries further triples of rows, one for each entry of
``SUPPOSE``: the clocks as they would be if, say, every release had a partition barrier before it. The first supposition
under which the race is gone names what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: What a diagnosing run supposes, from the most to the least specific; row triple i + 1 belongs to entry i.
SUPPOSE = ("barrier", "bulk-wait", "scope", "release", "acquire", "relaxed", "all")
HAPPENED, GLOBAL, SHARED = 0, 1, 2


def rows_of(*names: str) -> list[int]:
    """Row numbers of some suppositions."""
    return [3 * (SUPPOSE.index(name) + 1) + k for name in names for k in range(3)]


class Clock:
    """What an agent knows to have happened.

    Attributes:
        m: [rows, components]; rows 0..2 are real (see the module), the rest belongs to suppositions.
    """

    __slots__ = ("m",)

    def __init__(self, m: np.ndarray) -> None:
        self.m = m

    def copy(self) -> Clock:
        """Return an own copy."""
        return Clock(self.m.copy())

    def fit(self, n: int) -> None:
        """Make room for ``n`` components."""
        if self.m.shape[1] < n:
            wider = np.zeros((self.m.shape[0], n), np.int32)
            wider[:, : self.m.shape[1]] = self.m
            self.m = wider

    def join(self, other: Clock) -> None:
        """Learn all that ``other`` knows."""
        a, b = self.m, other.m
        if a.shape != b.shape:
            n = max(a.shape[1], b.shape[1])
            self.fit(n)
            other.fit(n)
            a, b = self.m, other.m
        np.maximum(a, b, out=a)

    def join_rows(self, other: Clock, rows: list[int]) -> None:
        """Learn what ``other`` knows, in some rows only."""
        if rows:
            n = max(self.m.shape[1], other.m.shape[1])
            self.fit(n)
            other.fit(n)
            self.m[rows] = np.maximum(self.m[rows], other.m[rows])

    def fence(self, *rows: int) -> None:
        """Make all that happened visible to asynchronous accesses (of global, of shared memory)."""
        for row in rows:
            np.maximum(self.m[row::3], self.m[0::3], out=self.m[row::3])


@dataclass(frozen=True)
class Access:
    """Who accesses, and what he knows.

    Attributes:
        comp, epoch: the component, and its epoch at this access.
        clock: knowledge of the accessor.
        site: number of the source line.
        is_async: it goes through the asynchronous proxy.
    """

    comp: int
    epoch: int
    clock: Clock
    site: int
    is_async: bool


class Index:
    """Some granules of a shadow, given by number."""

    __slots__ = ("index",)

    def __init__(self, index: np.ndarray) -> None:
        self.index = index

    def get(self, a: np.ndarray) -> np.ndarray:
        """Values at the granules."""
        return a[self.index]

    def set(self, a: np.ndarray, x: int) -> None:
        """Write one value to all granules."""
        a[self.index] = x

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Copy the values at the granules."""
        to[self.index] = source[self.index]

    def first(self, at: int) -> int:
        """Number of the ``at``-th granule."""
        return int(self.index[at])


class Run:
    """Consecutive granules."""

    __slots__ = ("span",)

    def __init__(self, start: int, stop: int) -> None:
        self.span = slice(start, stop)

    def get(self, a: np.ndarray) -> np.ndarray:
        """Values at the granules."""
        return a[self.span]

    def set(self, a: np.ndarray, x: int) -> None:
        """Write one value to all granules."""
        a[self.span] = x

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Copy the values at the granules."""
        to[self.span] = source[self.span]

    def first(self, at: int) -> int:
        """Number of the ``at``-th granule."""
        return self.span.start + at


class Box:
    """A regular box of granules: a view of int64 shadow arrays, without index arithmetic for each granule."""

    __slots__ = ("offset", "shape", "strides")

    def __init__(self, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> None:
        self.shape, self.offset, self.strides = shape, 8 * offset, tuple(8 * s for s in strides)

    def _view(self, a: np.ndarray) -> np.ndarray:
        return np.ndarray(self.shape, np.int64, a, self.offset, self.strides)

    def get(self, a: np.ndarray) -> np.ndarray:
        """Values at the granules."""
        return self._view(a)

    def set(self, a: np.ndarray, x: int) -> None:
        """Write one value to all granules."""
        self._view(a)[...] = x

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Copy the values at the granules."""
        self._view(to)[...] = self._view(source)

    def first(self, at: int) -> int:
        """Number of the ``at``-th granule."""
        where = np.unravel_index(at, self.shape)
        return (self.offset + sum(int(i) * s for i, s in zip(where, self.strides, strict=True))) // 8


#: Epoch and source line of an access in one int64: the line in the low bits, so that order is that of epochs.
_SITE_BITS = 20


def _packed(epoch: int, site: int) -> int:
    return epoch << _SITE_BITS | site


class _Reads:
    """Last reads (or atomics) of one component."""

    __slots__ = ("last", "latest")

    def __init__(self, n: int) -> None:
        self.last, self.latest = np.zeros(n, np.int64), 0


class Shadow:
    """Last accesses of each granule of one buffer.

    Attributes:
        unit: bytes of a granule.
        written: nobody needs to have written what is read (the host did).
    """

    def __init__(self, machine: object, name: str, size: int, unit: int, space: str, *, written: bool) -> None:
        self.machine, self.name, self.size, self.unit, self.space, self.written = (
            machine,
            name,
            size,
            unit,
            space,
            written,
        )
        self.row = GLOBAL if space == "global" else SHARED
        self.clear()

    def clear(self) -> None:
        """Forget all accesses."""
        n = -(-self.size // self.unit)
        self.writer, self.last_write = np.full(n, -1, np.int64), np.zeros(n, np.int64)
        # The write before the last; kept in a diagnosing run.
        self.writer_before, self.write_before = self.writer.copy(), self.last_write.copy()
        self.latest_write: dict[int, int] = {}
        self.unsorted: list[tuple] = []
        self.reads: dict[int, _Reads] = {}
        self.atomics: dict[int, _Reads] = {}

    def refine(self, unit: int) -> None:
        """Go on with smaller granules, because accesses do not fill whole ones."""
        self._sort_reads()
        times = self.unit // unit
        n = -(-self.size // unit)
        self.unit = unit
        for name in ("writer", "last_write", "writer_before", "write_before"):
            setattr(self, name, np.repeat(getattr(self, name), times)[:n].copy())
        for table in (*self.reads.values(), *self.atomics.values()):
            table.last = np.repeat(table.last, times)[:n].copy()

    def access(self, where: Index | Run | Box, kind: str, who: Access) -> None:
        """Check one access ("read", "write" or "atomic") against those before it, and note it."""
        if kind == "read" and self.written and not self.latest_write and not self.atomics and not self.machine.diagnose:
            # What only the host has written, as weights are: who reads it matters once somebody writes.
            self.unsorted.append((where, who.comp, who.epoch, who.site))
            return
        if self.unsorted:
            self._sort_reads()
        clock = who.clock
        clock.fit(self.machine.num_components)
        known = clock.m[HAPPENED]
        self._check_writes(where, kind, who, known)
        if kind != "read":
            self._check_table(where, "read", self.reads, kind, who, known)
        if kind != "atomic":
            self._check_table(where, "atomic", self.atomics, kind, who, known)
        if kind == "write":
            if self.machine.diagnose:
                where.copy(self.writer_before, self.writer)
                where.copy(self.write_before, self.last_write)
                self.machine.write_clocks[who.comp, who.epoch] = clock.copy()
            where.set(self.writer, who.comp)
            where.set(self.last_write, _packed(who.epoch, who.site))
            self.latest_write[who.comp] = who.epoch
        else:
            self._note(self.reads if kind == "read" else self.atomics, where, who.comp, who.epoch, who.site)
            if self.machine.diagnose:
                self.machine.read_clocks[who.comp, who.epoch] = clock.copy()

    def _note(self, tables: dict[int, _Reads], where: Index | Run | Box, comp: int, epoch: int, site: int) -> None:
        table = tables.get(comp)
        if table is None:
            table = tables[comp] = _Reads(len(self.writer))
        where.set(table.last, _packed(epoch, site))
        table.latest = epoch

    def _sort_reads(self) -> None:
        waiting, self.unsorted = self.unsorted, []
        for where, comp, epoch, site in waiting:
            self._note(self.reads, where, comp, epoch, site)

    def _check_writes(self, where: Index | Run | Box, kind: str, who: Access, known: np.ndarray) -> None:
        if not self.latest_write:
            if kind == "read" and not self.written:
                self._unwritten(where, who)
            return
        generic = known if not who.is_async else who.clock.m[self.row]
        is_async = self.machine.component_is_async[: self.machine.num_components]
        for comp, epoch in self.latest_write.items():
            seen = known[comp] if is_async[comp] else generic[comp]
            if epoch > seen:
                break
        else:
            if kind == "read" and not self.written and (where.get(self.writer) < 0).any():
                self._unwritten(where, who)
            return
        comps, last = where.get(self.writer), where.get(self.last_write)
        if kind == "read" and not self.written and (comps < 0).any():
            self._unwritten(where, who)
        seen = np.where(is_async, known[: len(is_async)], generic[: len(is_async)])[comps]
        bad = (last >> _SITE_BITS > seen) & (comps >= 0)
        if bad.any():
            at = int(np.argmax(bad))
            comp, found = int(comps.flat[at]), int(last.flat[at])
            fence = found >> _SITE_BITS <= known[comp]
            self._race(where.first(at), ("write", comp, found), kind, who, fence)

    def _check_table(
        self, where: Index | Run | Box, what: str, tables: dict[int, _Reads], kind: str, who: Access, known: np.ndarray
    ) -> None:
        for comp, table in tables.items():
            bound = known[comp]
            if table.latest <= bound:
                continue
            last = where.get(table.last)
            bad = last >= _packed(int(bound) + 1, 0)
            if bad.any():
                at = int(np.argmax(bad))
                self._race(where.first(at), (what, comp, int(last.flat[at])), kind, who, False)

    def _race(self, granule: int, earlier: tuple[str, int, int], kind: str, who: Access, fence: bool) -> None:
        what, comp, packed = earlier
        site = packed & ((1 << _SITE_BITS) - 1)
        self.machine.race(self, granule, (what, comp, packed >> _SITE_BITS, site), kind, who, fence)

    def epoch_of_write(self, granule: int) -> int:
        """Epoch of the last write."""
        return int(self.last_write[granule]) >> _SITE_BITS

    def knows_write_before(self, granule: int, clock: Clock) -> bool:
        """Whether a clock knows the write before the last."""
        comp = int(self.writer_before[granule])
        if comp < 0:
            return False
        clock.fit(comp + 1)
        return bool(clock.m[HAPPENED, comp] >= int(self.write_before[granule]) >> _SITE_BITS)

    def _unwritten(self, where: Index | Run | Box, who: Access) -> None:
        at = int(np.argmax(where.get(self.writer) < 0))
        self.machine.unwritten(self, where.first(at), who)
