"""Inline assembly: the few PTX instructions that kernels need beyond the language."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from moeloom.compat import gl
from moeloom.emulator import state
from moeloom.emulator.alarms import NotEmulated
from moeloom.emulator.clocks import GLOBAL, SHARED
from moeloom.emulator.dtypes import value
from moeloom.emulator.ops import atomics
from moeloom.emulator.ops.tma import wait_stores
from moeloom.emulator.values import Value, as_value, const

_TYPES = {"u32": gl.int32, "s32": gl.int32, "b32": gl.int32, "u64": gl.int64, "s64": gl.int64, "b64": gl.int64}
_SCOPES = {"cta": "cta", "cluster": "gpu", "gpu": "gpu", "gl": "gpu", "sys": "sys"}
_SPACE = r"(?:\.global)?"


class _Registers:
    """Operands ``$0``, ``$1`` ... of one block: outputs first."""

    def __init__(self, outputs: int, inputs: list[Value]) -> None:
        self.outputs: list[object] = [0] * outputs
        self.inputs = inputs

    def read(self, text: str) -> object:
        """Value of a register or a number."""
        text = text.strip()
        if not text.startswith("$"):
            return int(text, 0)
        number = int(text[1:])
        if number < len(self.outputs):
            return self.outputs[number]
        return np.asarray(self.inputs[number - len(self.outputs)].a).reshape(-1)[0]

    def write(self, text: str, x: object) -> None:
        """Set an output."""
        number = int(text.strip()[1:])
        if number >= len(self.outputs):
            raise NotEmulated(f"inline assembly writes to its input {text}")
        self.outputs[number] = x


def _bulk_wait(r: _Registers, read: str | None, pending: str) -> None:
    wait_stores(state.point(), int(pending), read_only=bool(read))


def _bulk_commit(r: _Registers) -> None:
    """Bulk stores commit themselves, each its own group."""


def _proxy_fence(r: _Registers, where: str | None) -> None:
    agent = state.point()
    agent.note("proxy fence")
    rows = {None: (GLOBAL, SHARED), ".global": (GLOBAL,)}.get(where, (SHARED,))
    agent.clock.fence(*rows)
    agent.elect.fence(*rows)


def _fence(r: _Registers, scope: str) -> None:
    atomics.fence(state.point(), _SCOPES[scope])


def _timer(r: _Registers, out: str, width: str, name: str) -> None:
    agent = state.point(effect=False)
    agent.polls.timed = True
    machine = agent.machine
    machine.time += 1
    now = machine.time if "globaltimer" in name else machine.time * 2
    r.write(out, now & 0xFFFFFFFF if width == "32" else now)


def _sleep(r: _Registers, duration: str) -> None:
    state.point(effect=False)


def _move(r: _Registers, out: str, source: str) -> None:
    r.write(out, r.read(source))


def _add(r: _Registers, out: str, a: str, b: str) -> None:
    r.write(out, int(r.read(a)) + int(r.read(b)))


def _load(r: _Registers, sem: str, scope: str, ty: str, out: str, address: str) -> None:
    r.write(out, atomics.flag_load(int(r.read(address)), _TYPES[ty], sem, _SCOPES[scope]))


def _store(r: _Registers, sem: str, scope: str, ty: str, address: str, source: str) -> None:
    atomics.flag_store(int(r.read(address)), r.read(source), _TYPES[ty], sem, _SCOPES[scope])


def _reduce(r: _Registers, sem: str, scope: str, ty: str, address: str, source: str) -> None:
    element = _TYPES[ty]
    pointer = Value(np.int64(r.read(address)), gl.pointer_type(element))
    operand = Value(value(element).type(r.read(source)), element)
    atomics.atomic_add(pointer, operand, sem=sem, scope=_SCOPES[scope])


_INSTRUCTIONS: list[tuple[re.Pattern, Callable]] = [
    (re.compile(pattern), run)
    for pattern, run in (
        (r"cp\.async\.bulk\.wait_group(\.read)? (\d+)", _bulk_wait),
        (r"cp\.async\.bulk\.commit_group", _bulk_commit),
        (r"fence\.proxy\.async(\.global|\.shared::cta|\.shared::cluster)?", _proxy_fence),
        (r"fence\.(?:acq_rel|sc)\.(cta|cluster|gpu|sys)", _fence),
        (r"membar\.(cta|gl|sys)", _fence),
        (r"mov\.[us](?P<w>64|32) (?P<o>\$\d+), %(?P<n>globaltimer|globaltimer_lo|clock64|clock)", _timer),
        (r"nanosleep\.u32 (\S+)", _sleep),
        (r"mov\.[bus](?:32|64) (\$\d+), (\$\d+|-?\w+)", _move),
        (r"add\.[us](?:32|64) (\$\d+), (\$\d+), (\$\d+|-?\d+)", _add),
        (rf"ld\.(relaxed|acquire)\.(cta|gpu|sys){_SPACE}\.([usb](?:32|64)) (\$\d+), \[(\$\d+)\]", _load),
        (rf"st\.(relaxed|release)\.(cta|gpu|sys){_SPACE}\.([usb](?:32|64)) \[(\$\d+)\], (\S+)", _store),
        (rf"red\.(relaxed|release)\.(cta|gpu|sys){_SPACE}\.add\.([us](?:32|64)) \[(\$\d+)\], (\S+)", _reduce),
    )
]


def _run(text: str, registers: _Registers) -> None:
    body = re.sub(r"//[^\n]*", "", text).strip()
    if body.startswith("{") and body.endswith("}"):
        body = body[1:-1]
    for line in body.replace("\n", " ").split(";"):
        instruction = " ".join(line.replace("\t", " ").split())
        if not instruction:
            continue
        for pattern, run in _INSTRUCTIONS:
            match = pattern.fullmatch(instruction)
            if match:
                if run is _timer:
                    run(registers, match["o"], match["w"], match["n"])
                else:
                    run(registers, *match.groups())
                break
        else:
            raise NotEmulated(f"the inline assembly '{instruction}'")


def inline_asm_elementwise(
    asm: object, constraints: object, args: object, dtype: object, is_pure: object, pack: object
) -> Value | tuple[Value, ...]:
    """Run a block once; the result fills a tensor of the operands' shape.

    The instructions here synchronise or read clocks, so running them once for all elements is what one thread does.
    """
    inputs = [as_value(a) for a in const(args)]
    types = const(dtype)
    many = isinstance(types, (tuple, list))
    types = [const(t) for t in types] if many else [types]
    registers = _Registers(len(types), inputs)
    _run(const(asm), registers)
    shape = np.broadcast_shapes(*(np.shape(i.a) for i in inputs)) if inputs else ()
    wide = (np.asarray(x).astype(np.int64).astype(value(ty)) for x, ty in zip(registers.outputs, types, strict=True))
    out = tuple(Value(np.full(shape, x)[()], ty) for x, ty in zip(wide, types, strict=True))
    return out if many else out[0]


def inline_asm(asm, constraints="", args=(), result_types=(), is_pure=False):
    """The block form of the newest versions, for scalars."""
    types = const(result_types)
    if not isinstance(types, (tuple, list)):
        return inline_asm_elementwise(asm, constraints, args, types, is_pure, 1)
    out = inline_asm_elementwise(asm, constraints, args, tuple(types) or (gl.int32,), is_pure, 1)
    return out if types else None
