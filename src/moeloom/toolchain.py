"""Which Triton versions the kernels support. A leaf: imports no Triton."""

from __future__ import annotations

import re

from moeloom.errors import ToolchainError

#: First version that is supported, and first that is not.
OLDEST, TOO_NEW = (3, 6), (3, 10)


def parse_version(text: str) -> tuple[int, int, int]:
    """Return the numbers of a version such as ``3.6.0`` or ``3.7.0+git1234``; a missing part counts as 0."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)


def check_version(text: str) -> tuple[int, int, int]:
    """Return the numbers of a Triton version.

    Raises:
        ToolchainError: the kernels do not support it.
    """
    version = parse_version(text)
    if not OLDEST <= version[:2] < TOO_NEW:
        raise ToolchainError(
            f"triton must be >= {OLDEST[0]}.{OLDEST[1]} and < {TOO_NEW[0]}.{TOO_NEW[1]} for moeloom's kernels; got "
            f"{text}. Install one of these, for example: pip install 'triton==3.6.0'. The reference needs no Triton."
        )
    return version
