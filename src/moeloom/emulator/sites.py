"""Source lines of kernels, numbered, so that shadow memory can hold them."""

from __future__ import annotations

import linecache
from pathlib import Path
from types import FrameType

from moeloom.emulator.state import KERNEL_FILES


class Sites:
    """Numbers for source lines; a line inside a helper function carries its caller's line too."""

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {}
        self._texts: list[tuple] = []

    def number(self, frame: FrameType | None) -> int:
        """Number of the innermost kernel line of a frame."""
        files = KERNEL_FILES
        while frame is not None and frame.f_code.co_filename not in files:
            frame = frame.f_back
        if frame is None:
            key = ()
        else:
            back = frame.f_back
            inner = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            if back is not None and back.f_code.co_filename in files:
                key = (inner, (back.f_code.co_filename, back.f_lineno, back.f_code.co_name))
            else:
                key = (inner,)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._texts)
            self._texts.append(key)
        return number

    def __getitem__(self, number: int) -> str:
        lines = self._texts[number] if number < len(self._texts) else ()
        return " < ".join(line_text(*line) for line in lines) or "?"


def line_text(file: str, line: int, function: str) -> str:
    """Readable form of one source line."""
    source = linecache.getline(file, line).strip()
    if len(source) > 100:
        source = source[:97] + "..."
    return f"{Path(file).name}:{line} {function} '{source}'"


def kernel_lines(frame: FrameType | None) -> list[tuple[str, int, str, FrameType]]:
    """Kernel lines of a suspended stack, innermost first."""
    out = []
    while frame is not None:
        if frame.f_code.co_filename in KERNEL_FILES:
            out.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, frame))
        frame = frame.f_back
    return out
