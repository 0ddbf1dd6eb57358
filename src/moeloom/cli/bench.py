"""``moeloom bench layer | errors | table | plot``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from moeloom.bench import records
from moeloom.bench.inputs import DTYPES, Point
from moeloom.bench.models import MODELS, PASSES, ModelShape, find_model
from moeloom.bench.report import console, one_line, print_compact, print_errors, print_layer
from moeloom.bench.rivals import find_rivals
from moeloom.bench.rivals.base import RivalOptions
from moeloom.bench.routing import check_name
from moeloom.cli.devices import pick_device
from moeloom.errors import ArgumentError, complain
from moeloom.runtime.ep_group import resolve_group
from moeloom.train.processes import join_group

#: Experts of a rank are E / 8 of the model's by default, however many ranks there are.
USUAL_SLICE = 8


def run_layer(
    *,
    model: str,
    ep_slice: int | None,
    tokens: str,
    routing: str,
    pass_: str,
    dtype: str,
    shared: str,
    against: str,
    l2: str,
    seconds: float,
    warmup: float,
    seed: int,
    sonicmoe_tiles: str,
    json_out: str | None,
    device: str,
    commit: str | None,
    launches: bool,
) -> int:
    """Measure a matrix; exit code 0, or 130 when interrupted (what was measured is kept)."""
    from moeloom.bench.layer import LayerBenchmark, LayerOptions

    target = pick_device(device)
    shapes = _shapes(model, target)
    passes = _one_of("--pass", pass_, tuple(PASSES))
    modes = ["cold", "warm"] if l2 == "both" else _one_of("--l2", l2, ("cold", "warm"))
    flags = [word == "1" for word in _one_of("--shared", shared, ("0", "1"))]
    routings = _routings(routing)
    rivals, rival_options = find_rivals(_words("--against", against)), _rival_options(sonicmoe_tiles)
    counts = _numbers("--tokens", tokens)
    _one_of("--dtype", dtype, tuple(DTYPES), single=True)
    with _ranks(target) as group, _appending(json_out, resolve_group(group).rank) as write:
        options = LayerOptions(
            shapes=shapes,
            tokens=counts,
            routings=routings,
            shared=flags,
            passes=passes,
            rivals=rivals,
            dtype=dtype,
            ep_slice=ep_slice or max(1, USUAL_SLICE // resolve_group(group).size),
            l2=modes,
            seconds=seconds,
            warmup_s=warmup,
            point_warmup_s=warmup / 5,
            seed=seed,
            rival_options=rival_options,
            commit=commit,
            count_launches=launches,
        )
        total = len(options.points()) * len(passes) * len(rivals) * len(modes)

        def measure(report: Callable[[str], None]) -> Iterator[dict]:
            benchmark = LayerBenchmark(options, target, group, report)
            benchmark.prepare()
            yield from benchmark.run()

        return _collect(measure, total, write, print_layer, quiet=resolve_group(group).rank != 0)


def run_errors(
    *,
    model: str,
    ep_slice: int | None,
    tokens: int,
    routing: str,
    dtype: str,
    shared: str,
    against: str,
    seeds: int,
    sonicmoe_tiles: str,
    json_out: str | None,
    device: str,
    commit: str | None,
) -> int:
    """Compare with fp64 over several seeds; exit code 0, or 130 when interrupted (what was compared is kept)."""
    from moeloom.bench.errors_table import ErrorOptions, error_table

    target = pick_device(device)
    shapes = _shapes(model, target)
    flags = [word == "1" for word in _one_of("--shared", shared, ("0", "1"))]
    rivals, rival_options = find_rivals(_words("--against", against)), _rival_options(sonicmoe_tiles)
    _one_of("--dtype", dtype, tuple(DTYPES), single=True)
    with _ranks(target) as group, _appending(json_out, resolve_group(group).rank) as write:
        cut = ep_slice or max(1, USUAL_SLICE // resolve_group(group).size)
        points = [
            Point(shape, tokens, name, flag, dtype=dtype, ep_slice=cut)
            for shape in shapes
            for name in _routings(routing)
            for flag in flags
        ]
        options = ErrorOptions(points, rivals, seeds, rival_options, commit)
        return _collect(
            lambda report: error_table(options, target, group, report),
            len(points) * (len(rivals) + 1),
            write,
            print_errors,
            quiet=resolve_group(group).rank != 0,
        )


def run_plot(*, files: list[str], out: str) -> int:
    """Draw pictures from records alone."""
    from moeloom.bench.plots import draw_all

    for path in draw_all(records.read(files), Path(out)):
        print(path)
    return 0


def run_table(*, files: list[str]) -> int:
    """Print records on few lines."""
    print_compact(records.read(files), console())
    return 0


def _collect(
    measure: Callable[[Callable[[str], None]], Iterator[dict]],
    total: int,
    write: Callable[[dict], None],
    print_table: Callable[[list[dict], object], None],
    *,
    quiet: bool,
) -> int:
    """Show progress, write records as they come, and print the table last, also after Ctrl-C."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    out, found, code = console(), [], 0
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.completed}/{task.total}")
    bar = Progress(*columns, TimeRemainingColumn(compact=True), console=out, disable=quiet or not out.is_terminal)
    with bar:
        task = bar.add_task("starting", total=total)
        try:
            for record in measure(lambda text: bar.update(task, description=text)):
                write(record)
                found.append(record)
                bar.advance(task)
                if not quiet and not out.is_terminal:
                    # In a log, which may end early, every record is a line.
                    out.print(one_line(record), markup=False)
        except KeyboardInterrupt:
            code = 130
    if not quiet:
        print_table(found, out)
        if code:
            print(f"interrupted; {len(found)} of {total} records kept", file=sys.stderr)
    return code


@contextlib.contextmanager
def _ranks(target: torch.device) -> Iterator[torch.distributed.ProcessGroup | None]:
    """Join the ranks that torchrun started, and leave them at the end."""
    if target.type == "cuda":
        torch.cuda.set_device(target)
    group = join_group(None)
    try:
        yield group
    finally:
        if group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _appending(path: str | None, rank: int) -> Iterator[Callable[[dict], None]]:
    """Open the file of records for appending, on rank 0, before anything is measured: a wrong path costs no time."""
    if path is None or rank != 0:
        yield lambda record: None
        return
    with contextlib.ExitStack() as stack:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "a", encoding="utf-8"))
        except OSError as error:
            fix = "Choose another."
            raise ArgumentError(complain("--json", "name a file that can be written", error, fix)) from error
        yield lambda record: records.write(file, record)


def _shapes(names: str, target: torch.device) -> list[ModelShape]:
    """Return the shapes that were asked for; on a CPU their small versions, said loudly."""
    words = list(MODELS) if names == "all" else _words("--model", names)
    shapes = [find_model(word) for word in words]
    if target.type == "cuda":
        return shapes
    if any(not shape.is_scaled for shape in shapes):
        print("No GPU: measuring -scaled shapes (widths / 64). CPU, scaled: not a GPU speed.", file=sys.stderr)
    return [shape.scaled() for shape in shapes]


def _routings(text: str) -> list[str]:
    words = _words("--routing", text)
    for word in words:
        check_name(word)
    return words


def _rival_options(tiles: str) -> RivalOptions:
    _one_of("--sonicmoe-tiles", tiles, ("default", "all"), single=True)
    return RivalOptions(sonicmoe_tiles=tiles)


def _words(option: str, text: str) -> list[str]:
    """Split a comma list."""
    words = [word.strip() for word in text.split(",")]
    if not all(words) or len(set(words)) != len(words):
        raise ArgumentError(complain(option, "be a list of different words with commas between", repr(text), "Fix it."))
    return words


def _numbers(option: str, text: str) -> list[int]:
    words = _words(option, text)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ArgumentError(complain(option, "be numbers >= 1 with commas between", repr(text), "Try 2048,8192."))
    return [int(word) for word in words]


def _one_of(option: str, text: str, legal: tuple[str, ...], *, single: bool = False) -> list[str]:
    """Split a comma list whose words must be among ``legal``."""
    words = [text] if single else _words(option, text)
    for word in words:
        if word not in legal:
            rule = f"be {'one of' if single else 'among'} {', '.join(legal)}"
            raise ArgumentError(complain(option, rule, repr(word), "Fix it."))
    return words
