"""Reads compiled kernels: which synchronising instructions can follow one another.

Each instruction that matters becomes a *word*: "store", "barrier", "release.gpu", "bulk-load" and so on. Words are followed
along the control flow, since the compiler lays out loops in any order.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

#: (pattern, word); the first that fits counts.
WORDS = [
    (re.compile(pattern), word)
    for pattern, word in (
        (r"cp\.async\.bulk\.tensor\S*\.shared::(?:cluster|cta)\.global", "bulk-load"),
        (r"cp\.async\.bulk\.tensor\S*\.global\.shared::cta", "bulk-store"),
        (r"cp\.async\.bulk\.wait_group\.read", "bulk-wait-read"),
        (r"cp\.async\.bulk\.wait_group", "bulk-wait"),
        (r"fence\.proxy\.async\.shared::cta", "proxy-fence-shared"),
        (r"fence\.proxy\.async", "proxy-fence"),
        (r"fence\.acq_rel\.(\w+)", r"fence.\1"),
        (r"(?:atom|red|ld|st)\.global\.(\w+)\.(relaxed|acquire|release)\S*", r"\2.\1"),
        (r"st\.global", "store"),
        (r"ld\.global", "load"),
        (r"stmatrix", "store-matrix"),
        (r"st\.shared\.b\d+|st\.shared\.v\d", "store-shared"),
        (r"mbarrier\.arrive\.expect_tx", "expect"),
        (r"mbarrier\.arrive", "arrive"),
        (r"mbarrier\.try_wait", "wait"),
        (r"bar\.sync|barrier\.sync|bar\.warp\.sync", "barrier"),
    )
]


@dataclass
class Line:
    """One line of PTX: its word, if it has one, its text, and the lines that can follow."""

    word: str | None
    text: str
    next: list[int]


def parse(ptx: str) -> list[Line]:
    """Return the instructions of a kernel with the control flow between them."""
    texts = [line.split("//")[0].strip() for line in ptx.splitlines()]
    labels = {text[:-1]: i for i, text in enumerate(texts) if re.fullmatch(r"\$?\w+:", text)}
    tables: dict[str, list[str]] = {}
    for found in re.finditer(r"(\$?\w+):\s*\.branchtargets([^;]*);", "\n".join(texts)):
        tables[found[1]] = re.findall(r"\$?\w+", found[2])
    out = []
    for i, text in enumerate(texts):
        after = [i + 1] if i + 1 < len(texts) else []
        jump = re.match(r"(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$?\w+);", text)
        table = re.match(r"(@!?%\w+\s+)?brx\.idx\S*\s+%\w+,\s*(\$?\w+);", text)
        if jump:
            after = [labels[jump[2]], *(after if jump[1] else [])] if jump[2] in labels else after
        elif table:
            after = [labels[name] for name in tables[table[2]]]
        elif re.match(r"ret;|exit;", text):
            after = []
        word = next((m.expand(word) for pattern, word in WORDS if (m := pattern.search(text))), None)
        out.append(Line(word, text, after))
    return out


def path(ptx: str, first: str, last: str, absent: tuple[str, ...] = ()) -> list[str] | None:
    """Return the instructions of the shortest way from a `first` to a `last` that meets nothing `absent`; None: no way."""
    lines = parse(ptx)
    starts = [i for i, line in enumerate(lines) if line.word == first]
    before: dict[int, int | None] = dict.fromkeys(starts)
    queue = deque(starts)
    while queue:
        here = queue.popleft()
        for there in lines[here].next:
            if there in before:
                continue
            word = lines[there].word
            before[there] = here
            if word == last:
                return _way(lines, before, there)
            if word not in absent:
                queue.append(there)
    return None


def _way(lines: list[Line], before: dict[int, int | None], at: int | None) -> list[str]:
    way = []
    while at is not None:
        if lines[at].word is not None:
            way.append(lines[at].text)
        at = before[at]
    return way[::-1]


def occurs(ptx: str, word: str) -> list[str]:
    """Return the instructions of one word."""
    return [line.text for line in parse(ptx) if line.word == word]
