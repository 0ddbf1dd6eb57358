"""Atomics, fences and polling: how agents of different CTAs and ranks learn of each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from moeloom.emulator import state
from moeloom.emulator.agents import Agent
from moeloom.emulator.alarms import Fault
from moeloom.emulator.clocks import Clock, rows_of
from moeloom.emulator.dtypes import decode, encode, storage
from moeloom.emulator.memory import Buffer
from moeloom.emulator.values import Value, as_value, const

SCOPES = ("cta", "gpu", "sys")
_SEMANTICS = ("relaxed", "acquire", "release", "acq_rel")
_LOADS = ("relaxed", "acquire")


@dataclass
class Location:
    """What releases at one address have published, by the scope that sees it: key -> clock."""

    published: dict[tuple, Clock] = field(default_factory=dict)


def _domain(agent: Agent, scope: str) -> tuple:
    """Who shares a scope with an agent."""
    return {"cta": (agent.cta.rank, id(agent.cta)), "gpu": (agent.cta.rank,), "sys": ()}[scope]


def publish(agent: Agent, address: int, clock: Clock, scope: str, rows: list[int] | None = None) -> None:
    """Add a clock to what an address has published; ``rows``: only in some rows."""
    published = agent.machine.locations.setdefault(address, Location()).published
    # A release of a wide scope is seen by acquires of narrower ones too.
    for name in SCOPES[: SCOPES.index(scope) + 1]:
        key = (name, _domain(agent, name))
        if key not in published:
            published[key] = agent.machine.new_clock()
        if rows is None:
            published[key].join(clock)
        else:
            published[key].join_rows(clock, rows)


def _learn(agent: Agent, address: int, scope: str, into: Clock, rows: list[int] | None = None) -> None:
    location = agent.machine.locations.get(address)
    if location is None:
        return
    # A narrower release counts if its scope contains the reader: each side's scope must contain the other side.
    for name in SCOPES[: SCOPES.index(scope) + 1]:
        clock = location.published.get((name, _domain(agent, name)))
        if clock is None:
            continue
        if rows is None:
            into.join(clock)
        else:
            into.join_rows(clock, rows)


def on_read(agent: Agent, addresses: list[int], sem: str, scope: str) -> None:
    """What a read of flags teaches: at once if it acquires, else with the next fence."""
    machine = agent.machine
    for address in addresses:
        if address not in machine.locations:
            continue
        if sem in ("acquire", "acq_rel"):
            _learn(agent, address, scope, agent.clock)
        else:
            for name in SCOPES:
                narrow = min(name, scope, key=SCOPES.index)
                _learn(agent, address, narrow, agent.seen.setdefault(name, machine.new_clock()))
        if machine.diagnose:
            acquires = sem in ("acquire", "acq_rel")
            _learn(agent, address, "sys", agent.clock, rows_of(*(("scope", "all") if acquires else ("all",))))
            _learn(agent, address, scope, agent.clock, rows_of("acquire", "relaxed", "all"))


def on_write(agent: Agent, addresses: list[int], sem: str, scope: str) -> None:
    """What a write to flags publishes."""
    machine = agent.machine
    fenced = agent.fenced
    releases = sem in ("release", "acq_rel")
    if not (releases or fenced or machine.diagnose):
        return
    agent.note("release")
    clock = agent.released() if releases or machine.diagnose else None
    for address in addresses:
        if releases:
            publish(agent, address, clock, scope)
        for name, earlier in fenced.items():
            publish(agent, address, earlier, min(name, scope, key=SCOPES.index))
        if machine.diagnose:
            publish(agent, address, clock, "sys", rows_of("all"))
            publish(agent, address, clock, scope, rows_of("release", "relaxed"))
            if releases:
                publish(agent, address, clock, "sys", rows_of("scope"))


def fence(agent: Agent, scope: str) -> None:
    """An acquire-release fence: relaxed reads before it have acquired, relaxed writes after it release."""
    seen = agent.seen.get(scope)
    if seen is not None:
        # Thread 0 polled, so its fence is the one that acquires; the others learn of it at the next barrier.
        agent.elect.join(seen)
    if agent.machine.diagnose and "sys" in agent.seen:
        agent.clock.join_rows(agent.seen["sys"], rows_of("scope", "all"))
        if seen is not None:
            agent.clock.join_rows(seen, rows_of("barrier"))
    agent.note("release fence")
    agent.fenced[scope] = agent.released()


def sleeps(agent: Agent, key: object, value: bytes, addresses: list[int]) -> bool:
    """Whether a polling loop has made a whole turn without any effect; then the agent has slept once."""
    polls = agent.polls
    if polls.seen.get(key) != value:
        polls.seen[key] = value
        polls.addresses[key] = addresses[0]
        return False
    machine = agent.machine
    buffers = {id(b): b for b in (machine.memory.find(a, 1) for a in polls.addresses.values())}
    names = [_flag_name(machine, a) for a in polls.addresses.values()]
    machine.block(lambda: "a change of " + ", ".join(names), *(b.waiters for b in buffers.values()), timed=polls.timed)
    polls.clear()
    return True


def _flag_name(machine: object, address: int) -> str:
    buffer = machine.memory.find(address, 1)
    size = buffer.element
    at = (address - buffer.start) // size
    number = int.from_bytes(bytes(buffer.bytes[at * size : (at + 1) * size]), "little", signed=True)
    return f"{buffer.name}[{at}], which is {number}"


def _cells(agent: Agent, addresses: np.ndarray, ty: object) -> list[tuple[Buffer, np.ndarray]]:
    size = storage(ty).itemsize
    out = []
    for address in addresses.tolist():
        if address % size:
            raise Fault(f"{agent.machine.whose()}: misaligned atomic at {address:#x}", "bounds")
        buffer = agent.machine.memory.find(address, size)
        start = address - buffer.start
        out.append((buffer, buffer.bytes[start : start + size].view(storage(ty))))
    return out


def check_access(agent: Agent, buffer: Buffer, address: int, size: int, scope: str) -> None:
    """An atomic access races with plain ones, and with atomics whose scope does not contain both sides."""
    machine = agent.machine
    if not machine.races_on:
        return
    where = buffer.where(np.array([address - buffer.start]), np.array([size]))
    buffer.shadow.access(where, "atomic", agent.generic())
    users = machine.scopes_used.setdefault(address, {})
    mine = (agent.cta.rank, id(agent.cta))
    known = users.get(mine)
    if known is not None and SCOPES.index(known[0]) <= SCOPES.index(scope):
        return
    users[mine] = (scope, machine.site(), agent.name)
    for (rank, cta), (other, site, name) in users.items():
        need = "cta" if (rank, cta) == mine else "gpu" if rank == mine[0] else "sys"
        narrow = min(scope, other, key=SCOPES.index)
        if SCOPES.index(narrow) < SCOPES.index(need):
            machine.scope_race(buffer, address, (other, site, name), scope, need, agent)


def rmw(operation: Callable) -> Callable[..., Value]:
    """Make an atomic read-modify-write function of ``operation(old, *operands)``."""

    def atomic(
        pointer: Value, *operands: object, mask: object = None, sem: object = None, scope: object = None, **_: object
    ):
        sem, scope = const(sem) or "acq_rel", const(scope) or "gpu"
        if sem not in _SEMANTICS or scope not in SCOPES:
            raise Fault(f"an atomic with semantics {sem!r} and scope {scope!r}", "assertion")
        agent = state.point(effect=False)
        ty, shape = pointer.ty.element_ty, np.shape(pointer.a)
        live = np.broadcast_to(np.asarray(as_value(True if mask is None else mask).a), shape).reshape(-1)
        addresses = np.asarray(pointer.a).reshape(-1)[live]
        values = [np.broadcast_to(as_value(v, ty).to(ty).a, shape).reshape(-1)[live] for v in map(const, operands)]
        names = addresses.tolist()
        # The compiler makes a load of "add 0": it continues no release sequence.
        looks = operation is _wrapping_add and _is_zero(operands[0]) and sem in _LOADS
        while True:
            cells = _cells(agent, addresses, ty)
            old = [decode(cell, ty)[0] for _, cell in cells]
            new = _apply(operation, names, old, values)
            changed = any(_differs(n, o) for n, o in zip(new, old, strict=True))
            if changed:
                agent.polls.clear()
            elif names and sleeps(agent, (tuple(names), sem), np.array(old).tobytes(), names):
                continue
            break
        size = storage(ty).itemsize
        for (buffer, cell), address, value in zip(cells, names, new, strict=True):
            check_access(agent, buffer, address, size, scope)
            cell[0] = encode(np.asarray(value), ty)
        on_read(agent, names, sem, scope)
        if looks:
            agent.note("look")
        else:
            on_write(agent, names, sem, scope)
        if changed:
            for buffer, _cell in cells:
                agent.machine.wake(buffer.waiters)
        out = np.zeros(len(live), np.asarray(old or [0]).dtype)
        out[live] = _returned(operation, names, old, values)
        return Value(out.reshape(shape)[()].astype(storage(ty) if ty.is_int() else out.dtype), ty)

    return atomic


def _apply(operation: Callable, names: list[int], old: list, values: list[np.ndarray]) -> list:
    """New values of the cells; the lanes of one tensor that share a cell act one after another."""
    current: dict[int, object] = {}
    for lane, address in enumerate(names):
        before = current.get(address, old[lane])
        current[address] = operation(before, *(v[lane] for v in values))
    return [current[a] for a in names]


def _returned(operation: Callable, names: list[int], old: list, values: list[np.ndarray]) -> list:
    current: dict[int, object] = {}
    out = []
    for lane, address in enumerate(names):
        before = current.get(address, old[lane])
        out.append(before)
        current[address] = operation(before, *(v[lane] for v in values))
    return out


def _is_zero(operand: object) -> bool:
    operand = const(operand)
    return isinstance(operand, int) and operand == 0


def _differs(new: object, old: object) -> bool:
    return bool(new != old) and not (new != new and old != old)


def _wrapping_add(old: np.generic, value: np.generic) -> np.generic:
    return np.asarray(old + value).astype(np.asarray(old).dtype)[()]


atomic_add = rmw(_wrapping_add)
atomic_xchg = rmw(lambda old, value: value)
atomic_cas = rmw(lambda old, compare, value: value if old == compare else old)
atomic_max = rmw(max)
atomic_min = rmw(min)
atomic_or = rmw(lambda old, value: old | value)
atomic_and = rmw(lambda old, value: old & value)
atomic_xor = rmw(lambda old, value: old ^ value)


def flag_load(address: int, ty: object, sem: str, scope: str) -> np.generic:
    """A load with semantics (``ld.relaxed``, ``ld.acquire``, a volatile load)."""
    agent = state.point(effect=False)
    while True:
        ((buffer, cell),) = _cells(agent, np.array([address]), ty)
        value = decode(cell, ty)[0]
        if not sleeps(agent, (address, sem), value.tobytes(), [address]):
            break
    check_access(agent, buffer, address, storage(ty).itemsize, scope)
    on_read(agent, [address], sem, scope)
    return value


def flag_store(address: int, value: object, ty: object, sem: str, scope: str) -> None:
    """A store with semantics (``st.relaxed``, ``st.release``); it begins a new release sequence."""
    agent = state.point()
    ((buffer, cell),) = _cells(agent, np.array([address]), ty)
    check_access(agent, buffer, address, storage(ty).itemsize, scope)
    agent.machine.locations.pop(address, None)
    cell[0] = encode(np.asarray(value), ty)
    on_write(agent, [address], sem, scope)
    agent.machine.wake(buffer.waiters)
