"""Showing what ``moeloom compile`` found."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def failed(results: list[dict]) -> list[dict]:
    """Return the results with a problem."""
    return [r for r in results if r.get("problems")]


def _instructions(result: dict) -> str:
    counts = result.get("sass") if result.get("sass") is not None else result.get("ptx", {})
    return " ".join(f"{n} {name}" for name, n in sorted((counts or {}).items())) or "-"


def _row(result: dict) -> list[str]:
    head = [result["kernel"], "sm_" + result["architecture"], result["triton"]]
    verdict = "; ".join(result.get("problems", [])) or "ok"
    if "error" in result:
        return [*head, *"-" * 7, verdict]
    numbers = [result[name] for name in ("threads", "registers", "spill_bytes", "shared_bytes")]
    order = f"{result['releases']} / {result['barriers']}"
    seconds = f"{result['seconds']:.1f}"
    shown = ["?" if number is None else str(number) for number in numbers]
    return [*head, *shown, _instructions(result), order, seconds, verdict]


def show(results: list[dict], console: Console) -> None:
    """Print a table, then each problem and note in full."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("kernel", "target", "triton", "threads", "registers", "spilled B", "shared B", "tensor core")
    for name in (*columns, "releases / barriers", "s", "verdict"):
        right = name in ("threads", "registers", "spilled B", "shared B", "releases / barriers", "s")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for result in results:
        table.add_row(*_row(result))
    console.print(table)
    for result in results:
        name = f"{result['kernel']} sm_{result['architecture']}, triton {result['triton']}"
        details = [*([result["error"]] if "error" in result else []), *result.get("violations", [])]
        for text in (*details, *(f"note: {note}" for note in result.get("notes", []))):
            console.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)
    bad = len(failed(results))
    console.print(
        f"{len(results)} kernels, {bad} with problems" if bad else f"{len(results)} kernels, no problem", markup=False
    )
