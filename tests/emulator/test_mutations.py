"""Every synchronising line of the kernels matters: drop one, and the emulator raises an alarm or the answer is wrong."""

from __future__ import annotations

import ast
import re

import pytest

pytest.importorskip("triton", reason="the emulator takes the names of the language from triton")
pytest.importorskip("greenlet", reason="the emulator's partitions are greenlets")

from moeloom.emulator import sweep
from tests.emulator import harness
from tests.emulator.test_correct import FILES

pytestmark = pytest.mark.slow

SYNCHRONISES = re.compile(
    r"(mbarrier\.(wait|arrive|expect|init)|thread_barrier|fence_|bulk_wait|cp_async_(wait|commit|arrive)|await_|publish"
    r"|meet|until|send|gl\.atomic_|emu\.wait_stream).*\)$"
)
#: (file, function, line) -> why it can be dropped without harm, though it belongs there.
REDUNDANT = {
    (
        "ring",
        "produce",
        "thread_barrier()",
    ): "the thread that polled issues the bulk store; and a bulk wait ends in a barrier",
    (
        "ring",
        "produce",
        "fence_proxy_async()",
    ): "the ring is read and written by bulk operations; their completion fences",
    ("ring", "consume", "thread_barrier()"): "the thread that polled issues the bulk load, and all threads wait for it",
}


def synchronising_lines(stem: str) -> list[tuple[int, str, str]]:
    """(number, function, text) of the lines that a mutation drops."""
    text = harness.source_path(stem).read_text()
    lines = text.splitlines()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    out = []
    for number, line in enumerate(lines, 1):
        if SYNCHRONISES.match(line.strip()):
            (inside,) = (f.name for f in functions if f.lineno <= number <= f.end_lineno)
            out.append((number, inside, line.strip()))
    return out


def is_noticed(stem: str, number: int) -> bool:
    text = harness.source_path(stem).read_text()
    lines = text.split("\n")
    indent = lines[number - 1][: len(lines[number - 1]) - len(lines[number - 1].lstrip())]
    lines[number - 1] = indent + "pass"
    edited = harness.load(stem, ((text, "\n".join(lines)),))
    for one in edited.CASES.values():
        try:
            options = one.options | {"max_steps": 20_000}
            report = sweep(one.build, range(6), check=one.check, same_bits=one.same_bits, processes=1, **options)
        except AssertionError:
            return True
        if report.alarms:
            return True
    return False


@pytest.mark.parametrize("stem", FILES)
def test_no_line_can_be_dropped(stem):
    kept = [line for line in synchronising_lines(stem) if not is_noticed(stem, line[0])]
    assert {(stem, function, text) for _, function, text in kept} == {key for key in REDUNDANT if key[0] == stem}, kept
