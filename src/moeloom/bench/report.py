"""What a benchmark prints for people: tables of records."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moeloom.bench.records import CPU_STAMP

#: Columns that tables may take: no cell is ever cut, whatever the terminal; narrow ones wrap lines.
WIDTH = 400
_TERMS = ("compute_ms", "padding_ms", "weights_ms", "rows_ms", "gradients_ms", "sums_ms")


def console() -> Console:
    """Return a console on which tables are as wide as they need to be."""
    return Console(highlight=False, soft_wrap=True, width=None if Console().is_terminal else WIDTH)


def print_layer(records: Sequence[dict], out: Console) -> None:
    """Print timings, the floors they are held against, and what was missing or failed."""
    timed = [r for r in records if r["ms_median"] is not None]
    if timed:
        first = timed[0]
        sizes = ", ".join(f"{size}: {rate:.4g}" for size, rate in first["gemm_sizes"].items())
        out.print(
            f"{first['device']}, torch {first['torch']}, triton {first['triton']}; {first['dtype']}, ep_size "
            f"{first['ep_size']}, ep_slice {first['ep_slice']}"
        )
        out.print(f"dense products, TFLOP/s: {sizes}; copy {first['copy_gb_per_s']:.0f} GB/s")
        _print_floors(timed, out)
        _print_timings(timed, out)
    _print_reasons(records, out)
    if any(CPU_STAMP in r["device"] for r in records):
        out.print("CPU, scaled: not a GPU speed")


def one_line(record: dict) -> str:
    """Return a record as one line of a log."""
    place = f"{_model(record)} T={record['tokens']} {record['routing']} {record['pass']} {record['backend']}"
    if record["error"] is not None:
        return f"{place}: {record['error']}"
    if record["ms_median"] is None:
        return f"{place}: relative L2 {record['rel_l2_error']:.3e}"
    return f"{place} {record['l2']}: {record['ms_median']:.3f} ms, {record['useful_tflops']:.4g} TFLOP/s"


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    """Return an empty table with plain columns, texts to the left and numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (*left, *right):
        table.add_column(name, justify="right" if name in right or name == "T" else "left", no_wrap=True)
    return table


def _show(table: Table, out: Console) -> None:
    """Print a table in full, also on a terminal that is narrower."""
    out.print(table, width=WIDTH, crop=False, overflow="ignore", no_wrap=True)


def _print_timings(timed: Sequence[dict], out: Console) -> None:
    left = ("model", "T", "routing", "pass", "backend")
    speed = _table(left, ("L2", "ms", "min..max", "runs", "TFLOP/s", "% GEMM", "% floor", "error"))
    costs = _table(left, ("peak GB", "launches", "host us p50", "p99", "host limits below T"))
    for r in timed:
        backend = r["backend"] + ("" if r["is_layer"] else " *")
        place = [_model(r), str(r["tokens"]), r["routing"], r["pass"], backend]
        speed.add_row(
            *place,
            r["l2"],
            f"{r['ms_median']:.3f}",
            f"{r['ms_min']:.3f}..{r['ms_max']:.3f}",
            str(r["runs"]),
            f"{r['useful_tflops']:.4g}",
            f"{100 * r['useful_tflops'] / r['gemm_ceiling_tflops']:.0f}",
            f"{100 * r['floor_share']:.0f}",
            _or_dash(r["rel_l2_error"], "{:.1e}"),
        )
        costs.add_row(
            *place,
            _or_dash(r["peak_bytes"] and r["peak_bytes"] / 1e9, "{:.2f}"),
            _or_dash(r["launches"], "{}"),
            _or_dash(r["host_us"], "{:.0f}"),
            _or_dash(r["host_us_p99"], "{:.0f}"),
            _or_dash(r["host_bound_tokens"], "{}"),
        )
    if any(r["peak_bytes"] is not None for r in timed):
        _show(costs, out)
        out.print(
            "peak GB: on top of parameters, inputs and gradients. host us: until a call returns, the device being idle "
            "before it."
        )
    _show(speed, out)
    out.print(
        "% GEMM: of the best dense product. error: the worst relative L2 against fp64 of any output and gradient."
    )
    if not all(r["is_layer"] for r in timed):
        out.print("* no layer: dense products of the same operations")


def _print_floors(timed: Sequence[dict], out: Console) -> None:
    """Print each floor once, term by term."""
    terms = ("= max(compute", "of it padding", "weights +", "rows +", "gradients)", "+ sums")
    table = _table(("floor of", "T", "routing", "pass"), ("ms", "TFLOP/s", *terms))
    seen = set()
    for r in timed:
        key = tuple(r[name] for name in ("model", "shared", "tokens", "routing", "pass"))
        if key in seen:
            continue
        seen.add(key)
        useful = r["useful_tflops"] * r["ms_median"] / r["floor_ms"]
        terms = [f"{r['floor_terms'][name]:.3f}" for name in _TERMS]
        table.add_row(
            _model(r), str(r["tokens"]), r["routing"], r["pass"], f"{r['floor_ms']:.3f}", f"{useful:.4g}", *terms
        )
    _show(table, out)


def _print_reasons(records: Sequence[dict], out: Console) -> None:
    """Print each reason once, with how many records carry it."""
    counts: dict[tuple[str, str], int] = {}
    for r in records:
        if r["error"] is not None:
            counts[r["backend"], r["error"]] = counts.get((r["backend"], r["error"]), 0) + 1
    for (backend, reason), count in counts.items():
        out.print(f"{backend}: {reason}" + (f" ({count} records)" if count > 1 else ""), markup=False)


def print_compact(records: Sequence[dict], out: Console) -> None:
    """Print records of any files on few lines: useful TFLOP/s by point and backend, then mean errors, then failures."""
    timed = [r for r in records if r["kind"] == "layer" and r["ms_median"] is not None]
    for device in dict.fromkeys(r["device"] for r in timed):
        _print_pivot([r for r in timed if r["device"] == device], device, out)
    errors = [r for r in records if r["kind"] == "errors" and r["errors"]]
    if errors:
        table = _table(
            ("model", "backend"), ("seeds", "mean relative L2", "mean ratio", "worst ratio", "largest element")
        )
        for r in errors:
            ratios = [e["ratio"] for e in r["errors"].values()]
            largest = max(e["largest_ratio"] for e in r["errors"].values())
            mean = sum(ratios) / len(ratios)
            cells = [f"{r['rel_l2_error']:.3e}", f"{mean:.3f}", f"{max(ratios):.3f}", f"{largest:.3f}"]
            table.add_row(_model(r), r["backend"], str(r["runs"]), *cells)
        out.print("errors against fp64; " + errors[0]["note"].split(";")[0])
        _show(table, out)
    _print_reasons(records, out)


def _print_pivot(timed: Sequence[dict], device: str, out: Console) -> None:
    """Print one machine's timings: a line a point and pass, a column a backend."""
    backends = list(dict.fromkeys(r["backend"] for r in timed))
    lines: dict[tuple, dict[str, dict]] = {}
    for r in timed:
        lines.setdefault((_model(r), r["tokens"], r["routing"], r["pass"], r["l2"], r["ep_size"]), {})[r["backend"]] = r
    table = _table(("model", "T", "routing", "pass", "L2", "EP"), (*backends, "floor", "GEMM"))
    for key, found in lines.items():
        some = next(iter(found.values()))
        limit = some["useful_tflops"] * some["ms_median"] / some["floor_ms"]
        cells = [f"{found[b]['useful_tflops']:.4g}" if b in found else "-" for b in backends]
        table.add_row(*map(str, key), *cells, f"{limit:.4g}", f"{some['gemm_ceiling_tflops']:.4g}")
    out.print(f"useful TFLOP/s; {device}", markup=False)
    _show(table, out)


def print_errors(records: Sequence[dict], out: Console) -> None:
    """Print the error table: one line a contender and tensor."""
    table = _table(("model", "backend", "tensor"), ("relative L2", "ratio", "largest / rms", "its ratio"))
    found = [r for r in records if r["errors"]]
    for r in found:
        for tensor, e in r["errors"].items():
            table.add_row(
                r["model"],
                r["backend"],
                tensor,
                f"{e['relative_l2']:.3e}",
                f"{e['ratio']:.3f}",
                f"{e['largest']:.3e}",
                f"{e['largest_ratio']:.3f}",
            )
        ratio = sum(e["ratio"] for e in r["errors"].values()) / len(r["errors"])
        table.add_row(r["model"], r["backend"], "mean", f"{r['rel_l2_error']:.3e}", f"{ratio:.3f}", "", "")
    if found:
        base = found[0]["note"].split(";")[0]
        out.print(f"errors against fp64, {found[0]['runs']} seeds, T={found[0]['tokens']}; {base}")
        _show(table, out)
    _print_reasons(records, out)


def _model(record: dict) -> str:
    return record["model"] + ("+shared" if record["shared"] else "")


def _or_dash(value: object, form: str) -> str:
    return "-" if value is None else form.format(value)
