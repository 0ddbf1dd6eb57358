"""How many warps run a piece of PTX: which code belongs to which partition, and how wide that partition is.

``warp_specialize`` becomes one function. Its first warps write a table into shared memory, one byte for each further
warp, that says which partition the warp is to run; every further warp reads its byte and branches there. So the width
of partition ``s`` is how often the byte ``s`` occurs. What this module does not recognise has the width None; the
check of barriers then counts no barrier of single warps.

Example: ``st.shared.b32 [global_smem+36], 16843009`` (four bytes 1) means that four warps run partition 1 together.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from dataclasses import dataclass

from moeloom.compile.ptx import Block, Function, Instruction

Width = int | None

_SIZES = {"b8": 1, "u8": 1, "b16": 2, "b32": 4, "u32": 4, "b64": 8, "u64": 8}
_COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_COMPUTE = {"add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_, "xor": operator.xor}
_COMPUTE |= {"shl": lambda a, n: a << n if 0 <= n < 64 else 0, "shr": lambda a, n: a >> n if n >= 0 else 0}


@dataclass(frozen=True)
class _Switch:
    """Where further warps branch to their partitions.

    Attributes:
        block, after: the block that reads a warp's byte, and the number of the instruction behind the read.
        register: that holds the byte.
        place: address that the bytes are counted from, by the number of the warp.
    """

    block: int
    after: int
    register: str
    place: int


def _reach(blocks: list[Block], start: int, closed: set[int]) -> set[int]:
    """Blocks that can be reached from one without entering ``closed``."""
    seen, open_ = set(), [start]
    while open_:
        n = open_.pop()
        if n not in seen and n not in closed:
            seen.add(n)
            open_ += blocks[n].successors
    return seen


def _meets_all(i: Instruction) -> bool:
    # The compiler writes it around a specialised region; barriers of one partition have a count of threads.
    return i.name == "barrier.sync" and "," not in i.operands


def _switch(function: Function) -> _Switch | None:
    """Find where further warps read their byte: behind a barrier of all warps."""
    for n, block in enumerate(function.blocks):
        met = False
        for number, i in enumerate(block.instructions):
            met = met or _meets_all(i)
            found = re.fullmatch(r"(%\w+), ?\[%\w+\+(\d+)\]", i.operands)
            if met and found and i.name.startswith("ld.shared") and i.parts[-1] in ("b8", "u8"):
                return _Switch(n, number + 1, found.group(1), int(found.group(2)))
    return None


def _wrap(value: int, kind: str) -> int:
    """Reduce a number to what a register of a type such as ``u16``, ``s32`` or ``b64`` holds."""
    bits = int(kind[1:])
    value %= 1 << bits
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def _run(code: list[Instruction], known: dict[str, int]) -> None:
    """Carry known values of registers, and of predicates as 0 and 1, through instructions of plain arithmetic."""
    for i in code:
        target, *sources = (word.strip() for word in i.operands.split(","))
        words = [int(word) if re.fullmatch(r"-?\d+", word) else known.get(word) for word in sources]
        known.pop(target, None)
        kind = i.parts[-1]
        if i.guard or not words or None in words or not re.fullmatch(r"[bsu](8|16|32|64)", kind):
            continue
        words = [_wrap(word, kind) for word in words]
        if i.parts[0] == "setp" and i.parts[1] in _COMPARE and len(words) == 2:
            known[target] = int(_COMPARE[i.parts[1]](*words))
        elif i.parts[0] in ("mov", "cvt") and len(words) == 1:
            known[target] = words[0]
        elif i.parts[0] in _COMPUTE and len(words) == 2:
            known[target] = _wrap(_COMPUTE[i.parts[0]](*words), kind)


def _branch(rest: list[Instruction], known: dict[str, int]) -> int | None:
    """Which successor a block goes to; None if that does not follow from what is known."""
    last = rest[-1] if rest else None
    if last is None or last.parts[0] not in ("bra", "brx"):
        return None
    _run(rest[:-1], known)
    if last.parts[0] == "brx":
        return known.get(last.operands.split(",")[0].strip())
    taken = known.get(last.guard.lstrip("!")) if last.guard else None
    return None if taken is None else int(bool(taken) == last.guard.startswith("!"))


def _target(function: Function, switch: _Switch, state: int) -> tuple[int | None, set[int]]:
    """The block that a warp with the byte ``state`` comes to, and the blocks that branch on it on the way."""
    n, rest, passed = switch.block, function.blocks[switch.block].instructions[switch.after :], set()
    known = {switch.register: state}
    while n not in passed:
        followers = function.blocks[n].successors
        which = _branch(rest, known)
        if which is None and not passed and len(followers) == 1:
            which = 0  # the block that reads the byte ends at a label
        if which is None or which >= len(followers):
            return (n if passed else None), passed
        passed.add(n)
        n = followers[which]
        rest = function.blocks[n].instructions
    return None, passed


def _constants(i: Instruction, known: dict[str, int]) -> tuple[int, bytes] | None:
    """Address and bytes of a store of constants to shared memory."""
    if i.guard or i.parts[:2] not in (("st", "shared"), ("st", "shared::cta")):
        return None
    size = _SIZES.get(i.parts[-1])
    found = re.fullmatch(r"\[(?:global_smem|%\w+)\+(\d+)\], ?\{?([^{}]+)\}?", i.operands)
    if size is None or not found:
        return None
    out = b""
    for word in map(str.strip, found.group(2).split(",")):
        value = int(word) if re.fullmatch(r"-?\d+", word) else known.get(word)
        if value is None:
            return None
        out += (value % (1 << 8 * size)).to_bytes(size, "little")
    return int(found.group(1)), out


def _tables(block: Block, place: int, warps: int) -> list[dict[int, int]]:
    """Tables that a block has written when it meets all warps: warp -> partition."""
    tables: list[dict[int, int]] = []
    known: dict[str, int] = {}
    table: dict[int, int] = {}
    for i in block.instructions:
        constant = re.fullmatch(r"(%\w+), (-?\d+)", i.operands)
        if i.parts[0] == "mov" and constant:
            known[constant.group(1)] = int(constant.group(2))
        stored = _constants(i, known)
        if stored:
            begin = stored[0] - place
            table |= {begin + n: value for n, value in enumerate(stored[1]) if 0 <= begin + n < warps}
        if _meets_all(i) and table:
            tables.append(table)
            table = {}
    return tables


def _agreed(values: set[int]) -> Width:
    return next(iter(values)) if len(values) == 1 else None


def widths(function: Function) -> list[set[Width]]:
    """Return for each block the widths, in warps, of the partitions that run it; None among them if unknown."""
    blocks = function.blocks
    warps = function.threads // 32 if function.threads else None
    switch = _switch(function)
    if switch is None or warps is None:
        specialised = any(_meets_all(i) for block in blocks for i in block.instructions)
        return [{None if specialised else warps} for _ in blocks]
    # Bytes beyond the last partition mean "leave"; each walk also finds blocks that only branch.
    closed = {switch.block}.union(*(_target(function, switch, state)[1] for state in range(256)))
    first = _reach(blocks, 0, closed)
    tables = [table for n in first for table in _tables(blocks[n], switch.place, warps)]
    counts: dict[int, set[int]] = {}
    for table in tables:
        for state, count in Counter(table.values()).items():
            counts.setdefault(state, set()).add(count)
    further = _agreed({len(table) for table in tables})
    out: list[set[Width]] = [set() for _ in blocks]
    for n in first:
        out[n].add(None if further is None else warps - further)
    for state, found in counts.items():
        target = _target(function, switch, state)[0]
        for n in _reach(blocks, target, closed) - first if target is not None else ():
            out[n].add(_agreed(found))
    return [found or {None} for found in out]
