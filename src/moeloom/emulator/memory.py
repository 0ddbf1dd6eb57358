"""Global memory: registered tensors, found by address, with bounds and race checks."""

from __future__ import annotations

import bisect
import ctypes

import numpy as np
import torch

from moeloom.emulator.alarms import Fault
from moeloom.emulator.clocks import Access, Box, Index, Shadow
from moeloom.emulator.dtypes import storage

#: Granule of race detection where accesses fill whole ones; it shrinks to the element where they do not.
GRANULE = 16
#: Bytes of an element -> its binary logarithm; shifting large arrays of addresses is much quicker than dividing them.
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3}


class Buffer:
    """One registered tensor."""

    def __init__(self, machine: object, name: str, tensor: torch.Tensor, *, written: bool) -> None:
        self.name, self.start = name, tensor.data_ptr()
        self.element = tensor.element_size()
        self.size = tensor.numel() * self.element
        self.end = self.start + self.size
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * max(self.size, 1)).from_address(self.start))[: self.size]
        self.keep, self.waiters = tensor, []
        unit = self.element if self.element >= 4 or self.start % GRANULE or self.size < GRANULE else GRANULE
        self.shadow = Shadow(machine, name, self.size, unit, "global", written=written)
        self._views: dict[np.dtype, np.ndarray] = {}

    def view(self, dtype: np.dtype) -> np.ndarray:
        """All of it as elements of a type."""
        out = self._views.get(dtype)
        if out is None:
            whole = self.size // dtype.itemsize * dtype.itemsize
            out = self._views[dtype] = self.bytes[:whole].view(dtype)
        return out

    def where(self, starts: np.ndarray, lengths: np.ndarray) -> Index:
        """Granules of runs of bytes, given by offset."""
        shadow = self.shadow
        unit = shadow.unit
        if unit > 1 and ((starts % unit).any() or (lengths % unit).any()):
            size = int(np.gcd.reduce(np.concatenate([starts, lengths, [unit]])))
            shadow.refine(size)
            unit = size
        first, count = starts // unit, lengths // unit
        if len(first) == 1:
            return Index(np.arange(first[0], first[0] + count[0]))
        if (count == count[0]).all():
            index = (first[:, None] + np.arange(count[0])).reshape(-1)
        else:
            ends = np.cumsum(count)
            index = np.arange(ends[-1]) + np.repeat(first - (ends - count), count)
        return Index(index)

    def box(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Box:
        """Granules of a box of bytes whose last axis is contiguous (strides in bytes)."""
        unit = self.shadow.unit
        numbers = (offset, shape[-1], *strides[:-1])
        if any(n % unit for n in numbers):
            unit = int(np.gcd.reduce([*numbers, unit]))
            self.shadow.refine(unit)
        return Box((*shape[:-1], shape[-1] // unit), offset // unit, (*(s // unit for s in strides[:-1]), 1))


class GlobalMemory:
    """All registered tensors of all ranks."""

    def __init__(self, machine: object) -> None:
        self.machine, self.buffers, self.starts = machine, [], []

    def register(self, name: str, tensor: torch.Tensor, *, written: bool) -> Buffer:
        """Make a tensor known; a part of a known one is known already."""
        if tensor.device.type != "cpu":
            raise ValueError(f"{name}: the emulator works on CPU tensors, this one is on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, strides are {tensor.stride()}")
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        at = bisect.bisect_right(self.starts, start)
        if at and end <= self.buffers[at - 1].end:
            return self.buffers[at - 1]
        below = not at or self.buffers[at - 1].end <= start
        above = at == len(self.buffers) or self.starts[at] >= end
        if not (below and above):
            raise ValueError(f"{name}: overlaps a registered tensor; register the larger one first")
        buffer = Buffer(self.machine, name, tensor, written=written)
        self.buffers.insert(at, buffer)
        self.starts.insert(at, start)
        return buffer

    def find(self, address: int, size: int) -> Buffer:
        """The buffer that holds ``size`` bytes at an address."""
        at = bisect.bisect_right(self.starts, address) - 1
        if at < 0 or address + size > self.buffers[at].end:
            raise Fault(self._outside(address, size, at), "bounds")
        return self.buffers[at]

    def _outside(self, address: int, size: int, at: int) -> str:
        who = self.machine.whose()
        if at < 0:
            return f"{who}: access out of bounds: address {address:#x} lies before every registered tensor"
        buffer = self.buffers[at]
        return (
            f"{who}: access out of bounds: {size} bytes at {buffer.name} + {address - buffer.start}, "
            f"whose size is {buffer.size} bytes"
        )

    def _runs(self, addresses: np.ndarray, size: int) -> list[tuple[Buffer, object, np.ndarray, np.ndarray]]:
        """Split flat addresses into (buffer, which elements, run offsets, run bytes)."""
        if (addresses & (size - 1)).any():
            bad = int(addresses[np.argmax(addresses & (size - 1) != 0)])
            raise Fault(f"{self.machine.whose()}: misaligned access of {size} bytes at {bad:#x}", "bounds")
        if len(addresses) == 1:
            buffer = self.find(int(addresses[0]), size)
            return [(buffer, slice(None), addresses - buffer.start, np.array([size]))]
        breaks = np.flatnonzero(addresses[1:] - addresses[:-1] != size) + 1
        at = np.concatenate([[0], breaks])
        counts = np.diff(np.concatenate([at, [len(addresses)]]))
        starts, lengths = addresses[at], counts * size
        which = np.searchsorted(self.starts, starts, "right") - 1
        if (which == which[0]).all():
            groups = [(int(which[0]), slice(None), slice(None))]
        else:
            groups = [(int(i), np.repeat(which == i, counts), which == i) for i in np.unique(which)]
        out = []
        for number, elements, runs in groups:
            s, n = starts[runs], lengths[runs]
            if number < 0 or (s + n).max() > self.buffers[number].end:
                bad = int(np.argmax(s + n))
                raise Fault(self._outside(int(s[bad]), int(n[bad]), number), "bounds")
            out.append((self.buffers[number], elements, s - self.buffers[number].start, n))
        return out

    def read(self, addresses: np.ndarray, ty: object, who: Access) -> np.ndarray:
        """Storage of elements at flat addresses."""
        dtype = storage(ty)
        out = np.empty(len(addresses), dtype)
        if not len(addresses):
            return out
        for buffer, elements, starts, lengths in self._runs(addresses, dtype.itemsize):
            if self.machine.races_on:
                buffer.shadow.access(buffer.where(starts, lengths), "read", who)
            out[elements] = buffer.view(dtype)[(addresses[elements] - buffer.start) >> _SHIFT[dtype.itemsize]]
        return out

    def write(self, addresses: np.ndarray, bits: np.ndarray, ty: object, who: Access) -> None:
        """Store elements at flat addresses."""
        dtype = storage(ty)
        if not len(addresses):
            return
        for buffer, elements, starts, lengths in self._runs(addresses, dtype.itemsize):
            if self.machine.races_on:
                buffer.shadow.access(buffer.where(starts, lengths), "write", who)
            buffer.view(dtype)[(addresses[elements] - buffer.start) >> _SHIFT[dtype.itemsize]] = bits[elements]
            if self.machine.locations:
                self._forget_releases(buffer, starts, lengths)
            self.machine.wake(buffer.waiters)

    def _forget_releases(self, buffer: Buffer, starts: np.ndarray, lengths: np.ndarray) -> None:
        """A plain store to a flag ends its release sequence."""
        if buffer.element < 4:
            return
        locations = self.machine.locations
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            first = buffer.start + start
            if length > 4 * len(locations):
                for address in [a for a in locations if first <= a < first + length]:
                    del locations[address]
            else:
                for address in range(first, first + length, buffer.element):
                    locations.pop(address, None)
