"""``moeloom compile``: build kernels for GPUs that are not here, and check what the compiler made of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from moeloom.compile import report, runner, targets, versions
from moeloom.errors import ArgumentError, ToolchainError, complain


def run(
    *, kernels: list[str], architectures: str, triton: str, json_path: str | None, keep: str | None, jobs: int | None
) -> int:
    """Print the table; exit code 0 when every gate holds, 1 when one fails, 2 when nothing could be checked."""
    wanted = [name.strip() for name in architectures.split(",") if name.strip()]
    targets.check_architectures(wanted)
    selectors = [targets.check_selector(name) for name in kernels]
    if jobs is not None and jobs < 1:
        raise ArgumentError(complain("--jobs", "be at least 1", jobs, "Leave it out to use all cores."))
    try:
        names = [name.strip() for name in triton.split(",") if name.strip()]
        toolchains = [versions.resolve(name, lambda text: print(text, file=sys.stderr)) for name in names]
        more = {} if jobs is None else {"jobs": jobs}
        request = runner.Request(
            selectors, wanted, list(dict.fromkeys(toolchains)), Path(keep) if keep else None, **more
        )
        results = runner.run(request)
    except ToolchainError as error:
        print(f"error: {error} Nothing was checked.", file=sys.stderr)
        return 2
    if json_path:
        Path(json_path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not results:
        print("error: none of these kernels is meant for these architectures. Nothing was checked.", file=sys.stderr)
        return 2
    report.show(results, Console(width=None if sys.stdout.isatty() else 200))
    return 1 if report.failed(results) else 0
