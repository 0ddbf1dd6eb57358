"""Bulk copies between global and shared memory (TMA), and waiting for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeloom.emulator import state
from moeloom.emulator.agents import Agent, Event, Store, completed
from moeloom.emulator.alarms import Fault, NotEmulated
from moeloom.emulator.clocks import Access
from moeloom.emulator.dtypes import FROM_TORCH, encode, storage
from moeloom.emulator.memory import Buffer
from moeloom.emulator.ops.mbarrier import barrier_of
from moeloom.emulator.shared import SharedView
from moeloom.emulator.values import Value, as_value, const, dims


@dataclass
class Descriptor:
    """A tensor descriptor of 1 to 5 axes.

    Attributes:
        extents, steps: of the tensor; steps in elements.
        block_shape: extents of a box.
    """

    buffer: Buffer
    offset: int
    dtype: object
    extents: list[int]
    steps: list[int]
    block_shape: list[int]
    layout: object
    padding: str

    def __post_init__(self) -> None:
        kind = storage(self.dtype)
        size = kind.itemsize
        axes = len(self.extents)
        if not 1 <= axes <= 5:
            raise Fault(f"a descriptor of {axes} axes over {self.buffer.name}; 1 to 5 are possible", "bounds")
        if self.steps[-1] != 1:
            raise Fault(f"a descriptor over {self.buffer.name} whose last stride is {self.steps[-1]}, not 1", "bounds")
        if (self.buffer.start + self.offset) % 16 or any(s * size % 16 for s in self.steps[:-1]):
            text = f"a descriptor over {self.buffer.name} with base or strides that are no multiples of 16 bytes"
            raise Fault(text, "bounds")
        last = self.offset + size * (1 + sum((n - 1) * s for n, s in zip(self.extents, self.steps, strict=True)))
        if min(self.extents, default=1) > 0 and last > self.buffer.size:
            raise Fault(f"a descriptor reaches {last - self.buffer.size} bytes past {self.buffer.name}", "bounds")
        self.box_shape = tuple(self.block_shape)
        self.shape = [as_value(n) for n in self.extents]
        self.strides = [as_value(s) for s in self.steps]
        self._bytes = tuple(s * size for s in self.steps)
        self._view = np.ndarray(self.extents, kind, self.buffer.bytes.data, self.offset, self._bytes)

    @classmethod
    def from_host(cls, machine: object, name: str, host: object) -> Descriptor:
        """Take a descriptor that the host made."""
        base = host.base
        buffer = machine.memory.find(base.data_ptr(), 1)
        return cls(
            buffer,
            base.data_ptr() - buffer.start,
            FROM_TORCH[base.dtype],
            [int(n) for n in host.shape],
            [int(n) for n in host.strides],
            [int(n) for n in host.block_shape],
            host.layout,
            getattr(host, "padding", "zero"),
        )

    def part(self, at: list[int], shape: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Slices of the tensor and of the box where a box lies inside the tensor; None if nowhere."""
        inside, box = [], []
        for start, n, extent in zip(at, shape, self.extents, strict=True):
            low, high = max(start, 0), min(start + n, extent)
            if low >= high:
                return None
            inside.append(slice(low, high))
            box.append(slice(low - start, high - start))
        return tuple(inside), tuple(box)

    def check(self, inside: tuple[slice, ...], kind: str, who: Access) -> None:
        """Check and note the access of a part of the tensor."""
        if not state.machine().races_on:
            return
        size = storage(self.dtype).itemsize
        offset = self.offset + sum(s.start * b for s, b in zip(inside, self._bytes, strict=True))
        shape = tuple(s.stop - s.start for s in inside)
        box = self.buffer.box(offset, (*shape[:-1], shape[-1] * size), self._bytes)
        self.buffer.shadow.access(box, kind, who)


def make_tensor_descriptor(
    base: Value, shape: list, strides: list, block_shape: list, layout: object, padding_option: object = "zero"
) -> Descriptor:
    """Make a descriptor in the kernel."""
    agent = state.point()
    buffer = agent.machine.memory.find(int(base.a), 1)
    return Descriptor(
        buffer,
        int(base.a) - buffer.start,
        base.ty.element_ty,
        dims((shape,)),
        dims((strides,)),
        dims((block_shape,)),
        const(layout),
        const(padding_option),
    )


def _place(descriptor: Descriptor, coord: object, view: SharedView) -> list[int]:
    """Coordinates of a box, after checking that it fits the shared memory."""
    if view.granule.shape != descriptor.box_shape or view.ty != descriptor.dtype:
        text = f"a box of {descriptor.dtype}{descriptor.block_shape} and shared memory of {view.ty}{view.shape}"
        raise Fault(text, "assertion")
    coord = const(coord)
    if len(coord) != len(descriptor.extents):
        raise Fault(f"{len(coord)} coordinates for a descriptor of {len(descriptor.extents)} axes", "assertion")
    at = []
    for c in coord:
        c = const(c)
        if c.__class__ is Value:
            if np.ndim(c.a):
                raise NotEmulated("bulk gather and scatter (they are Blackwell's)")
            c = c.a
        at.append(int(c))
    return at


def load(
    tensor_desc: Descriptor, coord: object, barrier: SharedView, result: SharedView, pred: object = True, **options
):
    """Start a copy of a box into shared memory; its bytes arrive at the mbarrier."""
    agent = state.point()
    if options.pop("multicast", False):
        raise NotEmulated("bulk loads with multicast")
    if not const(pred):
        return
    descriptor, bar, at = tensor_desc, barrier_of(barrier), _place(tensor_desc, coord, result)
    who = agent.asynchronous("bulk load")
    machine = agent.machine
    dtype = storage(descriptor.dtype)
    bar.in_flight += dtype.itemsize * result.numel
    if machine.poison:  # from now on, anything may be there
        result.write(np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0])

    def arrive() -> None:
        part, shape = descriptor.part(at, descriptor.block_shape), descriptor.box_shape
        if part is not None:
            descriptor.check(part[0], "read", who)
            box = descriptor._view[part[0]]
        if part is None or box.shape != shape:  # not wholly inside the tensor
            inside, box = part and box, np.zeros(shape, dtype)
            if descriptor.padding == "nan":
                box[...] = encode(np.float32("nan"), descriptor.dtype)
            if part is not None:
                box[part[1]] = inside
        result.check("write", who)
        result.write(box)
        bar.deliver(who, box.nbytes)

    Event(machine, arrive)
    agent.cta.loads[who.comp] = who


def store(tensor_desc: Descriptor, coord: object, src: SharedView, **_: object) -> None:
    """Start a copy of shared memory to a box; reading the source and writing the box complete one after the other."""
    agent = state.point()
    descriptor, at = tensor_desc, _place(tensor_desc, coord, src)
    agent.note("store")
    reader, writer = agent.asynchronous("bulk store (read)"), agent.asynchronous("bulk store (write)")
    taken: list[np.ndarray] = []
    machine = agent.machine

    def read() -> None:
        src.check("read", reader)
        taken.append(src.raw.copy())

    def write() -> None:
        reading.fire()
        part = descriptor.part(at, src.shape)
        if part is not None:
            descriptor.check(part[0], "write", writer)
            descriptor._view[part[0]] = taken[0][part[1]]
            machine.wake(descriptor.buffer.waiters)

    reading = Event(machine, read)
    agent.stores.append(Store(reading, Event(machine, write), reader, writer))


def wait_stores(agent: Agent, pending: int, *, read_only: bool) -> None:
    """Wait until at most ``pending`` bulk stores are in flight; the elected thread knows the result."""
    count = max(len(agent.stores) - pending, 0)
    if not read_only:
        agent.note("bulk wait")
    for each in agent.stores[:count]:
        each.read.fire()
        each.read_waited = True
        agent.elect.join(completed(each.reader))
        if not read_only:
            each.write.fire()
            agent.elect.join(completed(each.writer))
    if not read_only:
        del agent.stores[:count]


def store_wait(pendings: object, read_only: object = True) -> None:
    """Wait for bulk stores; the compiler puts a barrier of the partition's warps after it."""
    agent = state.point()
    wait_stores(agent, int(const(pendings)), read_only=bool(const(read_only)))
    agent.barrier()
