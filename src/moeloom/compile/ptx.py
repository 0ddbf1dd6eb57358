"""Reading PTX: functions, instructions, and where control can go next.

Only what :mod:`moeloom.compile.order` needs is understood. What is not understood raises :class:`PtxError`; nothing is
skipped silently. Words: a *guard* is the predicate of ``@%p1 bra``; a *block* is a run of instructions that is entered
at its first and left after its last one.

Example: ``L: st.global.b32 [%rd1], %r1; @%p1 bra L; ret;`` has the blocks ``{st, bra}``, which is followed by itself
and by ``{ret}``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


class PtxError(Exception):
    """PTX text that this reader does not understand."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        line: of the PTX text, from 1.
        guard: ``"%p1"``, ``"!%p1"`` or ``""``.
        name: with all its dots, for example ``atom.global.gpu.release.add.u32``.
        operands: the rest, single-spaced.
        source: where it comes from in Python, ``"sync.py:60 in handshake.py:58"``, as far as the compiler noted it.
    """

    line: int
    guard: str
    name: str
    operands: str
    source: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The name's parts: ``("atom", "global", "gpu", ...)``; ``shared::cta`` is one of them."""
        return tuple(self.name.split("."))

    @property
    def text(self) -> str:
        """The instruction as it is written."""
        return f"{'@' + self.guard + ' ' if self.guard else ''}{self.name} {self.operands}".strip()


@dataclass
class Block:
    """A run of instructions, and the numbers of the blocks that may follow it."""

    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


@dataclass
class Function:
    """A kernel or a function. Block 0 is where it begins.

    Attributes:
        is_kernel: whether it is an entry point.
        threads: threads of a CTA (``.reqntid``), or None.
    """

    name: str
    is_kernel: bool
    threads: int | None
    blocks: list[Block]


# A directive that ends with its line, and debug data, hold nothing that runs.
_LINE_DIRECTIVES = re.compile(r"^[ \t]*\.(?:version|target|address_size|file|loc)\b.*$", re.M)
_SECTION = re.compile(r"^[ \t]*\.section\b[^{]*\{[^}]*\}", re.M)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_FILE = re.compile(r'^[ \t]*\.file[ \t]+(\d+)[ \t]+"([^"]*)"(?:[ \t]+"([^"]*)")?', re.M)
_LOC = re.compile(r"^[ \t]*\.loc[ \t]+(\d+)[ \t]+(\d+)[ \t]+\d+(?:[^\n]*inlined_at[ \t]+(\d+)[ \t]+(\d+))?", re.M)
_TOKEN = re.compile(r"::|[;{}:]|[^;{}:]+")
_NAME = re.compile(r"[A-Za-z_$%][\w$]*")
_HEADER = re.compile(r"\.(entry|func)\b(?:\s*\([^)]*\))?\s*([\w$.]+)")


def _blank(found: re.Match) -> str:
    return re.sub(r"[^\n]", " ", found.group())


class _Reader:
    """Cuts the text into functions, their statements and labels. Inline assembly has names of its own in ``{ }``."""

    def __init__(self, text: str) -> None:
        self.functions: list[Function] = []
        self.files = {number: (second or first).split("/")[-1] for number, first, second in _FILE.findall(text)}
        self.places = [(found.start(), self._place(*found.groups())) for found in _LOC.finditer(text)]
        plain = _SECTION.sub(_blank, _COMMENT.sub(_blank, _LINE_DIRECTIVES.sub(_blank, text)))
        self.text = plain
        self._reset()

    def _place(self, file: str, line: str, outer: str | None, outer_line: str | None) -> str:
        place = f"{self.files.get(file, '?')}:{line}"
        return place if outer is None else f"{place} in {self.files.get(outer, '?')}:{outer_line}"

    def _reset(self) -> None:
        self.header = ""
        self.scopes: list[int] = []
        self.scope_count = 0
        self.code: list[tuple[Instruction, tuple[int, ...]]] = []
        self.labels: dict[tuple[int, str], int] = {}
        self.tables: dict[tuple[int, str], list[str]] = {}
        self.fresh: list[tuple[int, str]] = []

    def read(self) -> list[Function]:
        buffer, began, line, braces, place = "", 0, 1, 0, -1
        for found in _TOKEN.finditer(self.text):
            token = found.group()
            while place + 1 < len(self.places) and self.places[place + 1][0] < found.end():
                place += 1
            if braces or (token not in ("{", "}", ";", ":")):
                braces += (token == "{") - (token == "}")
                if not buffer.strip():
                    began = line + (len(token[: len(token) - len(token.lstrip())].split("\n")) - 1)
                buffer += token
            elif token == "{" and buffer.strip():
                if not self.scopes and _HEADER.search(buffer):
                    self._reset()
                    self.header, buffer, self.scopes, self.scope_count = buffer, "", [0], 1
                else:  # operands, or the numbers of a variable
                    buffer, braces = buffer + token, 1
            elif token == "{":
                self.scopes.append(self.scope_count)
                self.scope_count += 1
            elif token == "}":
                if buffer.strip() or not self.scopes:
                    raise PtxError(f"line {line}: a closing brace after {buffer.strip()[:60]!r}")
                self.scopes.pop()
                if not self.scopes:
                    self._end()
            elif token == ":":
                self._label(buffer.strip(), line)
                buffer = ""
            else:
                source = self.places[place][1] if place >= 0 else ""
                self._statement(" ".join(buffer.split()), began, source)
                buffer = ""
            line += token.count("\n")
        if self.scopes or buffer.strip():
            raise PtxError(f"the text ends inside {self.header.strip()[:60] or buffer.strip()[:60]!r}")
        return self.functions

    def _label(self, name: str, line: int) -> None:
        if not self.scopes or not _NAME.fullmatch(name):
            raise PtxError(f"line {line}: {name!r} is no label")
        key = (self.scopes[-1], name)
        self.labels[key] = len(self.code)
        self.fresh.append(key)

    def _statement(self, text: str, line: int, source: str) -> None:
        if not self.scopes:
            return  # a variable or a prototype
        if text.startswith(".branchtargets"):
            names = [name.strip() for name in text.removeprefix(".branchtargets").split(",")]
            self.tables |= dict.fromkeys(self.fresh, names)
        elif text and not text.startswith("."):
            guard = ""
            if text.startswith("@"):
                guard, _, text = text[1:].partition(" ")
            name, _, operands = text.strip().partition(" ")
            instruction = Instruction(line, guard, name, operands.strip(), source)
            self.code.append((instruction, tuple(self.scopes)))
        if text:
            self.fresh = []

    def _find(self, what: dict, name: str, scopes: tuple[int, ...], line: int) -> object:
        for scope in reversed(scopes):
            if (scope, name) in what:
                return what[scope, name]
        raise PtxError(f"line {line}: nothing is called {name!r}")

    def _next(self, index: int) -> list[int]:
        """Indices of the instructions that may come after one."""
        instruction, scopes = self.code[index]
        kind, line = instruction.parts[0], instruction.line
        after = [index + 1]
        if kind == "bra":
            target = self._find(self.labels, instruction.operands, scopes, line)
            return [target, *after] if instruction.guard else [target]
        if kind == "brx":
            table = self._find(self.tables, instruction.operands.split(",")[-1].strip(), scopes, line)
            return [self._find(self.labels, name, scopes, line) for name in table]
        if kind in ("ret", "exit", "trap"):
            return after if instruction.guard else []
        return after

    def _end(self) -> None:
        kind, name = _HEADER.search(self.header).groups()
        threads = re.search(r"\.reqntid\s+([\d,\s]+)", self.header)
        count = None
        if threads:
            count = 1
            for part in threads.group(1).split(","):
                count *= int(part)
        # A function may end behind its last instruction, at a label.
        self.code.append((Instruction(0, "", "ret", ""), (0,)))
        follow = [self._next(i) for i in range(len(self.code))]
        self.functions.append(Function(name, kind == "entry", count, _blocks([c for c, _ in self.code], follow)))
        self._reset()


def _blocks(code: list[Instruction], follow: list[list[int]]) -> list[Block]:
    """Group instructions into blocks."""
    heads = {0}
    for i, targets in enumerate(follow):
        if targets != [i + 1]:
            heads |= {*targets, i + 1}
    heads = sorted(h for h in heads if h < len(code))
    number = {head: n for n, head in enumerate(heads)}
    blocks = []
    for head, end in zip(heads, [*heads[1:], len(code)], strict=True):
        blocks.append(Block(code[head:end], [number[t] for t in follow[end - 1]]))
    return blocks


def read(text: str) -> list[Function]:
    """Return the functions of a PTX text.

    Raises:
        PtxError: something in it is not understood.
    """
    return _Reader(text).read()
