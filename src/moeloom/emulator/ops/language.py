"""Functions of the language that touch registers, global memory and the grid."""

from __future__ import annotations

import numpy as np

from moeloom.compat import gl
from moeloom.emulator import state
from moeloom.emulator.alarms import Fault
from moeloom.emulator.dtypes import decode, encode, storage, value
from moeloom.emulator.ops.atomics import flag_load
from moeloom.emulator.values import Value, as_value, const, dims


def _live(mask: object, shape: tuple[int, ...]) -> np.ndarray | None:
    """The mask over all elements; None: all of them."""
    if mask is None:
        return None
    live = np.broadcast_to(np.asarray(as_value(mask).a), shape)
    return None if live.all() else live


def load(pointer: Value, mask: object = None, other: object = None, *_: object, volatile: object = False, **__: object):
    """Load elements; where the mask is false: ``other``, or poison if there is none."""
    addresses, ty = np.asarray(pointer.a), pointer.ty.element_ty
    if const(volatile) and addresses.ndim == 0 and (mask is None or bool(const(mask))):
        return Value(flag_load(int(addresses), ty, "relaxed", "sys"), ty)
    agent = state.point()
    who, memory = agent.generic(), agent.machine.memory
    live = _live(mask, addresses.shape)
    if live is None:
        bits = memory.read(addresses.reshape(-1), ty, who)
        return Value(decode(bits, ty).reshape(addresses.shape)[()], ty)
    kind = value(ty)
    if other is not None:
        out = np.array(np.broadcast_to(as_value(other, ty).to(ty).a, addresses.shape), kind)
    else:
        out = np.full(addresses.shape, np.nan if ty.is_floating() else -1, kind)
    out[live] = decode(memory.read(addresses[live], ty, who), ty)
    return Value(out[()], ty)


def store(pointer: Value, value: object, mask: object = None, **_: object) -> None:
    """Store elements where the mask is true."""
    agent = state.point()
    addresses, ty = np.asarray(pointer.a), pointer.ty.element_ty
    values = np.broadcast_to(as_value(value, ty).to(ty).a, addresses.shape)
    agent.note("store")
    who, memory = agent.generic(), agent.machine.memory
    live = _live(mask, addresses.shape)
    if live is not None:
        addresses, values = addresses[live], values[live]
    addresses = addresses.reshape(-1)
    bits = encode(values, ty).reshape(-1)
    if _overlaps(addresses, storage(ty).itemsize):
        _same_or_fault(agent, addresses, bits)
    memory.write(addresses, bits, ty, who)


def _overlaps(addresses: np.ndarray, size: int) -> bool:
    """Whether one address occurs twice."""
    if len(addresses) < 2:
        return False
    breaks = np.flatnonzero(addresses[1:] - addresses[:-1] != size) + 1
    if not len(breaks):
        return False
    at = np.concatenate([[0], breaks])
    starts, ends = addresses[at], addresses[np.concatenate([breaks, [len(addresses)]]) - 1]
    order = np.argsort(starts)
    return bool((starts[order][1:] <= ends[order][:-1]).any())


def _same_or_fault(agent: object, addresses: np.ndarray, bits: np.ndarray) -> None:
    """Threads of one store may hit one address only with equal values."""
    order = np.argsort(addresses, kind="stable")
    a, b = addresses[order], bits[order]
    clash = (a[1:] == a[:-1]) & (b[1:] != b[:-1])
    if clash.any():
        at = int(a[1:][np.argmax(clash)])
        buffer = agent.machine.memory.find(at, 1)
        text = f"{agent.machine.whose()}: one store writes different values to {buffer.name} + {at - buffer.start} B"
        raise Fault(text, "assertion")


def program_id(axis: object) -> Value:
    """Number of the CTA."""
    return as_value(state.machine().agent.cta.pid if const(axis) == 0 else 0)


def num_programs(axis: object) -> Value:
    """Number of CTAs."""
    return as_value(state.machine().agent.cta.grid if const(axis) == 0 else 1)


def num_warps() -> int:
    """Warps of this partition."""
    return state.machine().agent.num_warps


def thread_barrier(**_: object) -> None:
    """A barrier of this partition's warps."""
    agent = state.point()
    agent.note("barrier")
    agent.barrier()


def warp_specialize(functions_and_args: object, worker_num_warps: object, worker_num_regs: object = None) -> object:
    """Run partitions side by side; the first is the caller's own warps."""
    machine = state.machine()
    agent = state.point()
    agent.barrier()
    items = [(f, tuple(a)) for f, a in functions_and_args]
    warps = [int(const(w)) for w in const(worker_num_warps)]
    if len(warps) != len(items) - 1:
        raise Fault(f"{len(items)} partitions with {len(warps)} worker_num_warps", "assertion")
    workers = [
        machine.spawn(f.__name__, agent.cta, w, f, args, parent=agent)
        for (f, args), w in zip(items[1:], warps, strict=True)
    ]
    name = agent.name
    first, args = items[0]
    agent.name = f"{agent.cta.name}.{first.__name__}"
    machine.component_names[agent.comp] = agent.name
    out = first(*args)
    for worker in workers:
        while not worker.done:
            machine.block(lambda worker=worker: f"the end of {worker.name}", worker.joiners)
        agent.clock.join(worker.clock)
    agent.barrier()
    agent.name = name
    return out


def device_range(*bounds: object, **_: object):
    """``range`` over values of the kernel."""
    for i in range(*(int(const(b)) for b in bounds)):
        yield Value(np.int32(i), gl.int32)


def arange(start: object, end: object, layout: object = None) -> Value:
    """Whole numbers."""
    start, end = int(const(start)), int(const(end))
    count = end - start
    if count <= 0 or count & (count - 1):
        raise Fault(f"arange({start}, {end}): the length must be a power of two", "assertion")
    return Value(np.arange(start, end, dtype=np.int32), gl.int32)


def cdiv(x: object, y: object) -> object:
    """Quotient rounded up."""
    x, y = const(x), const(y)
    if isinstance(x, Value) or isinstance(y, Value):
        return (as_value(x) + y - 1) // y
    return -(-x // y)


def check(condition: object, message: object = "", **_: object) -> None:
    """An assertion of the kernel."""
    holds = condition.a.all() if isinstance(condition, Value) else bool(const(condition))
    if not holds:
        raise Fault(f"{state.machine().whose()}: assertion failed: {const(message)}", "assertion")


def join(x: Value, y: Value) -> Value:
    """Two tensors along a new last axis."""
    return Value(np.stack([x.a, y.a], -1), x.ty)


def broadcast(x: Value, y: Value) -> tuple[Value, Value]:
    """Two tensors of one shape."""
    a, b = np.broadcast_arrays(x.a, y.a)
    return Value(a, x.ty), Value(b, y.ty)


def fma(x: object, y: object, z: object) -> Value:
    """``x * y + z`` with one rounding (through fp64, which is exact for products of fp32)."""
    x, y, z = as_value(x), as_value(y), as_value(z)
    wide = np.asarray(x.a, np.float64) * y.a + z.a
    return Value(wide.astype(value(x.ty))[()], x.ty)


def gather(src: Value, index: Value, axis: object) -> Value:
    """Elements of a tensor by index along an axis."""
    return Value(np.take_along_axis(src.a, index.a, const(axis)), src.ty)


def associative_scan(input: object, axis: object, combine_fn: object, reverse: object = False) -> object:
    """Running combinations along an axis, of one tensor or of several together, one element after the other."""
    many = isinstance(input, (tuple, list))
    inputs = list(input) if many else [input]
    axis, backwards = int(const(axis)), bool(const(reverse))
    parts = [np.moveaxis(np.asarray(x.a), axis, 0) for x in inputs]
    outs = [part.copy() for part in parts]
    order = range(len(parts[0]))
    order = list(reversed(order)) if backwards else list(order)
    for before, now in zip(order, order[1:], strict=False):
        left = [Value(out[before], x.ty) for out, x in zip(outs, inputs, strict=True)]
        right = [Value(part[now], x.ty) for part, x in zip(parts, inputs, strict=True)]
        new = combine_fn(*left, *right)
        for out, value_ in zip(outs, new if many else [new], strict=True):
            out[now] = value_.a
    found = tuple(Value(np.moveaxis(out, 0, axis), x.ty) for out, x in zip(outs, inputs, strict=True))
    return found if many else found[0]


def histogram(input: Value, num_bins: object, mask: object = None, layout: object = None) -> Value:
    """How often each number below ``num_bins`` occurs."""
    numbers = np.asarray(input.a).reshape(-1)
    if mask is not None:
        numbers = numbers[np.broadcast_to(as_value(mask).a, input.a.shape).reshape(-1)]
    return Value(np.bincount(numbers, minlength=int(const(num_bins))).astype(np.int32), gl.int32)


def reshape(x: Value, *shape: object, **_: object) -> Value:
    """Give the elements other extents."""
    return x.reshape(*shape)


def permute(x: Value, *order: object) -> Value:
    """Reorder the axes."""
    return x.permute(*order)


def zeros_like(x: Value, *_: object, **__: object) -> Value:
    """Zeros of the same extents and type."""
    return Value(np.zeros(np.shape(x.a), value(x.ty)), x.ty)


def full_like(x: Value, fill: object, *_: object, **__: object) -> Value:
    """One value in the same extents and type."""
    return Value(np.full(np.shape(x.a), as_value(fill, x.ty).to(x.ty).a), x.ty)


def ravel(x: Value, **_: object) -> Value:
    """All elements along one axis."""
    return x.reshape(dims(([x.numel],)))
