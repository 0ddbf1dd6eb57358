"""Shared memory: allocations and their views."""

from __future__ import annotations

import linecache
import math
import re
import sys

import numpy as np

from moeloom.emulator import state
from moeloom.emulator.alarms import Fault, NotEmulated
from moeloom.emulator.clocks import Access, Index, Run, Shadow
from moeloom.emulator.dtypes import decode, encode, storage
from moeloom.emulator.values import Value, const, dims

_GRANULE = 16


class Allocation:
    """One allocation of a CTA's shared memory."""

    def __init__(self, ty: object, shape: list[int]) -> None:
        machine = state.machine()
        self.cta, self.ty, self.barriers = machine.agent.cta, ty, {}
        self.name = f"{self.cta.name}.{_assigned_name()}"
        dtype = storage(ty)
        self.raw = np.full((*shape, dtype.itemsize), 0xFF, np.uint8).view(dtype).reshape(shape)
        # Parts along the first axis are buffers of their own: a granule must not reach over two of them.
        per = math.gcd(max(1, _GRANULE // dtype.itemsize), math.prod(shape[1:] or shape))
        count = self.raw.size
        self.granule = (np.arange(count, dtype=np.int32) // per).reshape(shape)
        # And each has a shadow of its own, so that what happens to the others costs nothing.
        parts = shape[0] if len(shape) > 2 else 1
        self.per_part = count // per // parts
        size, unit = count // parts * dtype.itemsize, per * dtype.itemsize
        names = [f"{self.name}[{i}]" for i in range(parts)] if parts > 1 else [self.name]
        self.shadows = [Shadow(machine, name, size, unit, "shared", written=False) for name in names]


def _assigned_name() -> str:
    """The name that the kernel's source gives to what it allocates."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename not in state.KERNEL_FILES:
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame else ""
    found = re.match(r"\s*(\w+)\s*=", line)
    return found.group(1) if found else "shared"


class SharedView:
    """A view of shared memory.

    Attributes:
        raw: storage, a numpy view of the allocation (a copy where numpy has no such view).
        granule: number of the granule of every element.
    """

    def __init__(self, allocation: Allocation, raw: np.ndarray, granule: np.ndarray, ty: object, layout: object):
        self.allocation, self._raw, self.granule, self.ty, self.layout = allocation, raw, granule, ty, layout
        self._is_view = np.shares_memory(raw, allocation.raw)
        self._source = None
        self._parts: dict[object, SharedView] = {}
        self._where = None
        self.place: int | None = None

    @property
    def raw(self) -> np.ndarray:
        """Storage now."""
        return self._raw if self._source is None else self._source()

    @property
    def dtype(self) -> object:
        """Element type."""
        return self.ty

    @property
    def shape(self) -> list[int]:
        """Extents."""
        return list(self.granule.shape)

    @property
    def rank(self) -> int:
        """Number of axes."""
        return self.granule.ndim

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.granule.size

    def _derived(self, fn: object, ty: object = None, layout: object = None, granule: np.ndarray | None = None):
        raw = fn(self.raw)
        granule = fn(self.granule) if granule is None else granule
        out = SharedView(self.allocation, raw, granule, ty or self.ty, self.layout if layout is None else layout)
        if not out._is_view:
            out._source = lambda: fn(self.raw)
        return out

    def index(self, index: object) -> SharedView:
        """The part at an index of the first axis."""
        i = int(const(index))
        found = self._parts.get(i)
        if found is None:
            if not 0 <= i < self.shape[0]:
                raise Fault(f"index {i} into {self.allocation.name} of shape {self.shape}", "bounds")
            found = self._parts[i] = self._derived(lambda x: x[i])
        return found

    def slice(self, start: object, length: object, dim: object = 0) -> SharedView:
        """A run of one axis."""
        start, length, dim = int(const(start)), int(const(length)), int(const(dim))
        if start < 0 or start + length > self.shape[dim]:
            text = f"slice [{start}, {start + length}) of axis {dim} of {self.allocation.name} of shape {self.shape}"
            raise Fault(text, "bounds")
        key = (slice(None),) * dim + (slice(start, start + length),)
        name = ("slice", dim, start, length)
        if name not in self._parts:
            self._parts[name] = self._derived(lambda x: x[key])
        return self._parts[name]

    def permute(self, order: object) -> SharedView:
        """Reorder the axes."""
        order = dims((order,))
        name = ("permute", *order)
        if name not in self._parts:
            self._parts[name] = self._derived(lambda x: x.transpose(order))
        return self._parts[name]

    def reshape(self, shape: object) -> SharedView:
        """Give the elements other extents."""
        shape = dims((shape,))
        return self._derived(lambda x: x.reshape(shape))

    def _reinterpret(self, dtype: object, shape: object, layout: object) -> SharedView:
        ty, shape = const(dtype), dims((shape,))
        count, old, new = int(np.prod(shape)), storage(self.ty).itemsize, storage(ty).itemsize
        if count * new > self.numel * old:
            raise Fault(f"{self.allocation.name} has no room for {ty}{shape}", "bounds")
        granule = self.granule.reshape(-1)[np.arange(count) * new // old].reshape(shape)
        return self._derived(
            lambda x: x.reshape(-1).view(storage(ty))[:count].reshape(shape), ty, const(layout), granule
        )

    #: Its name from Triton 3.9 on.
    reinterpret = _reinterpret

    def write(self, bits: np.ndarray) -> None:
        """Overwrite the storage."""
        if not self._is_view:
            raise NotEmulated("a write through a reshaped permuted view of shared memory")
        self._raw[...] = bits

    def values(self) -> np.ndarray:
        """Values now."""
        return decode(self.raw, self.ty)

    def check(self, kind: str, who: Access) -> None:
        """Check and note an access of the whole view."""
        if not state.machine().races_on:
            return
        if self._where is None:
            self._where = self._selection()
        for shadow, where in self._where:
            shadow.access(where, kind, who)

    def _selection(self) -> list[tuple[Shadow, Run | Index]]:
        """The granules of the view, by part: runs of them if its elements lie densely, in whatever order of axes."""
        granule, expected, per = self.granule, self.granule.itemsize, self.allocation.per_part
        numbers = None
        for stride, extent in sorted(zip(granule.strides, granule.shape, strict=True)):
            if extent > 1 and stride != expected:
                numbers = np.unique(granule)
                break
            expected *= extent
        if numbers is None:
            numbers = np.arange(granule[(0,) * granule.ndim], granule[(-1,) * granule.ndim] + 1)
        out = []
        for part in range(int(numbers[0]) // per, int(numbers[-1]) // per + 1):
            mine = numbers[numbers // per == part] - part * per
            if len(mine):
                first, last = int(mine[0]), int(mine[-1])
                where = Run(first, last + 1) if last - first + 1 == len(mine) else Index(mine)
                out.append((self.allocation.shadows[part], where))
        return out

    def load(self, layout: object = None) -> Value:
        """Read into registers."""
        agent = state.point()
        self.check("read", agent.generic())
        return Value(self.values(), self.ty)

    def store(self, value: Value) -> None:
        """Write from registers."""
        agent = state.point()
        if value.shape != self.shape or value.ty != self.ty:
            text = f"store of {value.ty}{value.shape} to {self.allocation.name}, {self.ty}{self.shape}"
            raise Fault(text, "assertion")
        self.check("write", agent.generic())
        self.write(encode(value.a, self.ty))

    def _keep_alive(self) -> None:
        """Nothing to do: allocations live as long as they are used."""


def allocate_shared_memory(element_ty: object, shape: object, layout: object, value: Value | None = None) -> SharedView:
    """Allocate; the content is poison until it is written."""
    allocation = Allocation(const(element_ty), dims((shape,)))
    view = SharedView(allocation, allocation.raw, allocation.granule, allocation.ty, const(layout))
    if value is not None:
        view.store(value)
    return view
