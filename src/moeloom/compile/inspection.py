"""What a compiled kernel takes and holds: registers, spills, shared memory, tensor core instructions; and the gates."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from moeloom import compat
from moeloom.compile.order import check
from moeloom.compile.ptx import PtxError, read
from moeloom.compile.targets import SHARED_LIMIT, KernelSpec

#: Tensor core instructions: of SASS, and the PTX instruction that becomes one of them.
SASS_MMA = re.compile(r"\b(HGMMA|QGMMA|IGMMA|BGMMA|HMMA|QMMA|IMMA|UTC[A-Z]*MMA)\b")
PTX_MMA = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
_BECOMES = {"wgmma.mma_async": ("HGMMA", "QGMMA", "IGMMA", "BGMMA"), "mma.sync": ("HMMA", "QMMA", "IMMA")}


@dataclass(frozen=True)
class Compiled:
    """What the compiler left.

    Attributes:
        stem: path of the kept files, without ``.ptx``, ``.cubin``.
        ptx: text.
        ptxas: what ptxas said.
        shared: bytes of shared memory.
        warps: of a CTA, with those of all partitions.
    """

    stem: Path
    ptx: str
    ptxas: str
    shared: int
    warps: int


@dataclass(frozen=True)
class Tools:
    """``nvdisasm`` programs to try in order; an old one cannot read a new architecture."""

    disassemblers: list[str]

    def disassemble(self, cubin: Path) -> str | None:
        """Return SASS, or None if no program here can read the file."""
        for program in self.disassemblers:
            try:
                done = subprocess.run([program, "-c", str(cubin)], capture_output=True, text=True, timeout=300)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout
        return None


@dataclass
class Inspection:
    """The facts of one kernel on one architecture.

    Attributes:
        threads: of a CTA.
        registers: of a thread at launch.
        spill_bytes: stored and loaded, of a thread, in instructions of the program text.
        stack_bytes: of a thread.
        shared_bytes: of a CTA.
        named_barriers: how many the kernel uses, of 16.
        sass, ptx: tensor core instructions by name; ``sass`` is None if nothing here can disassemble it.
        releases, bulk_stores, bulk_loads, barriers: instructions in PTX that matter for the order of memory.
        violations: what the check of order could not clear.
        problems: gates that failed; empty: all is well.
        notes: what was not checked.
    """

    threads: int
    registers: int | None
    spill_bytes: int | None
    stack_bytes: int | None
    shared_bytes: int
    named_barriers: int | None
    sass: dict[str, int] | None
    ptx: dict[str, int]
    releases: int = 0
    bulk_stores: int = 0
    bulk_loads: int = 0
    barriers: int = 0
    violations: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_ptxas(said: str) -> dict[str, int | None]:
    """Return registers, spilled bytes, stack bytes and named barriers, the largest (spills: the sum) over functions."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    barriers = [int(n) for n in re.findall(r"used (\d+) barriers", said)]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return dict(
        registers=max(registers, default=None),
        named_barriers=max(barriers, default=None),
        stack_bytes=max((int(f[0]) for f in frames), default=None),
        spill_bytes=sum(int(f[1]) + int(f[2]) for f in frames) if frames else None,
    )


def count_ptx(text: str) -> dict[str, int]:
    """Count tensor core instructions in PTX."""
    found: Counter[str] = Counter()
    for function in read(text):
        for block in function.blocks:
            for i in block.instructions:
                found.update(name for name in PTX_MMA if i.name == name or i.name.startswith(name + "."))
    return dict(found)


def inspect(made: Compiled, spec: KernelSpec, architecture: str, tools: Tools) -> Inspection:
    """Collect the facts of a compiled kernel and hold them against the gates."""
    sass = tools.disassemble(made.stem.with_suffix(made.stem.suffix + ".cubin"))
    if sass is not None:
        made.stem.with_suffix(made.stem.suffix + ".sass").write_text(sass)
    counted = None if sass is None else dict(Counter(SASS_MMA.findall(sass)))
    out = Inspection(threads=32 * made.warps, shared_bytes=made.shared, sass=counted, ptx={}, **read_ptxas(made.ptxas))
    try:
        out.ptx = count_ptx(made.ptx)
        order = check(made.ptx, pending=spec.pending_bulk_groups)
    except PtxError as error:
        out.problems.append(f"the PTX could not be read, so nothing about it is known: {error}")
    else:
        out.releases, out.barriers = order.releases, order.barriers
        out.bulk_stores, out.bulk_loads = order.bulk_stores, order.bulk_loads
        out.violations = [str(v) for v in order.violations]
    known_spills = spec.known_spills.get(".".join(map(str, compat.TRITON_VERSION[:2])), 0)
    _gates(out, spec.expected_instruction(architecture), known_spills)
    return out


def _gates(out: Inspection, expected: str | None, known_spills: int = 0) -> None:
    if out.spill_bytes is None or out.registers is None:
        out.problems.append("ptxas did not say what it used")
    elif 0 < out.spill_bytes <= known_spills:
        out.notes.append(f"{out.spill_bytes} bytes of registers are spilled, as is known of this Triton")
    elif out.spill_bytes:
        out.problems.append(f"{out.spill_bytes} bytes of registers are spilled")
    if out.shared_bytes > SHARED_LIMIT:
        out.problems.append(f"{out.shared_bytes} bytes of shared memory; a CTA can have {SHARED_LIMIT}")
    if out.sass is None:
        out.notes.append("no nvdisasm here reads this architecture; tensor core instructions are those of PTX")
    if expected:
        of_ptx = next((name for name, kinds in _BECOMES.items() if expected in kinds), "tcgen05.mma")
        if not (out.sass.get(expected) if out.sass is not None else out.ptx.get(of_ptx)):
            out.problems.append(f"no {expected}" if out.sass is not None else f"no {of_ptx}")
    if out.violations:
        count = len(out.violations)
        out.problems.append(f"{count} place{'s' * (count > 1)} where the order of memory does not hold")
