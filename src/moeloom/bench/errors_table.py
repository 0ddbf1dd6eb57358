"""``moeloom bench errors``: how far every output and gradient is from fp64, over several seeds.

Each contender's error is also given relative to that of a pipeline in the same dtype: our torch backend where it takes
part, otherwise the plain loop over experts that serves as yardstick. A ratio of 1.0 is "as exact as torch".
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from moeloom.bench import records
from moeloom.bench.inputs import DTYPES, Point, build
from moeloom.bench.layer import describe
from moeloom.bench.oracle import Error, build_oracle, compare
from moeloom.bench.rivals.base import Place, Rival, RivalOptions
from moeloom.bench.timing import significant
from moeloom.runtime.ep_group import resolve_group

#: The backend name of the yardstick, and the rival that is preferred to it as the base of ratios.
LOOP, PIPELINE = "torch-loop", "torch"


@dataclass(frozen=True)
class ErrorOptions:
    """What to compare.

    Attributes:
        points: one for each line of the table; their seed is replaced.
        rivals: whose results.
        seeds: number of draws.
        rival_options: options of rivals.
        commit: what to record as commit; None: that of the source tree.
    """

    points: Sequence[Point]
    rivals: Sequence[Rival]
    seeds: int = 5
    rival_options: RivalOptions = field(default_factory=RivalOptions)
    commit: str | None = None


def error_table(
    options: ErrorOptions,
    device: torch.device,
    process_group: dist.ProcessGroup | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, object]]:
    """Yield one record a point and contender, the yardstick first; with several ranks all of them call this.

    In a record, ``errors`` has for each tensor the mean over seeds of ``relative_l2``, the largest over seeds of
    ``largest`` (element error over the root mean square), and both relative to the base: ``ratio`` (mean) and
    ``largest_ratio`` (largest). ``rel_l2_error`` is the mean over tensors.
    """
    machine = records.machine(device, options.commit)
    group = resolve_group(process_group)
    for point in options.points:
        point.check(group.size)
        run = records.new_run()
        found: dict[str, list[dict[str, Error]]] = {LOOP: []}
        reasons: dict[str, str] = {}
        notes: dict[str, str | None] = {LOOP: "plain loop over experts, every intermediate in the operand dtype"}
        for seed in range(options.seeds):
            report(f"{point.shape.name}: seed {seed}")
            _one_seed(replace(point, seed=seed), options, device, process_group, found, reasons, notes)
        base_name = PIPELINE if len(found.get(PIPELINE, ())) == options.seeds else LOOP
        names = {LOOP: LOOP} | {rival.name: rival.backend for rival in options.rivals}
        for name, backend in names.items():
            values = machine | _place(point, group.size) | {"backend": backend, "run": run, "runs": options.seeds}
            if name in reasons:
                yield records.complete(values | {"error": reasons[name], "runs": 0})
            elif name in found:
                errors = summarise(found[name], found[base_name])
                mean = statistics.fmean(error["relative_l2"] for error in errors.values())
                note = "; ".join(text for text in (f"ratios against {names[base_name]}", notes.get(name)) if text)
                yield records.complete(values | {"errors": errors, "rel_l2_error": mean, "note": note})


def _one_seed(point, options: ErrorOptions, device, process_group, found: dict, reasons: dict, notes: dict) -> None:
    """Add the errors of one draw to ``found``, or a reason to ``reasons``."""
    problem = build(point, device, process_group)
    place = Place(device, DTYPES[point.dtype], problem.group.size)
    oracle = build_oracle(problem)
    found[LOOP].append(oracle.yardstick)
    for rival in options.rivals:
        if rival.name in reasons:
            continue
        reason = rival.missing(place)
        if reason is not None:
            reasons[rival.name] = f"missing: {reason}"
            continue
        try:
            contender = rival.prepare(problem, options.rival_options)
            if not contender.is_layer:
                reasons[rival.name] = "missing: it is no layer and has no error"
                continue
            found.setdefault(rival.name, []).append(compare(contender.results(backward=True), oracle.want))
            notes[rival.name] = contender.note
        except Exception as error:  # Whatever a rival raises is its result, and the others go on.
            reasons[rival.name] = f"failed: {describe(error)}"
        contender = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def summarise(draws: list[dict[str, Error]], base: list[dict[str, Error]]) -> dict[str, dict[str, float]]:
    """Return, by tensor, mean and largest errors over draws, and their ratios to those of ``base``, draw by draw."""
    table = {}
    for name in draws[0]:
        mine, theirs = [d[name] for d in draws], [b[name] for b in base]
        pairs = list(zip(mine, theirs, strict=True))
        table[name] = {
            "relative_l2": significant(statistics.fmean(e.relative_l2 for e in mine)),
            "largest": significant(max(e.largest for e in mine)),
            "ratio": significant(statistics.fmean(_ratio(m.relative_l2, t.relative_l2) for m, t in pairs)),
            "largest_ratio": significant(max(_ratio(m.largest, t.largest) for m, t in pairs)),
        }
    return table


def _ratio(mine: float, theirs: float) -> float:
    if theirs > 0:
        return mine / theirs
    return 1.0 if mine == 0 else float("inf")


def _place(point: Point, ranks: int) -> dict[str, object]:
    """Return the fields of a record that say what was compared."""
    return {
        "model": point.shape.name,
        "ep_size": ranks,
        "virtual": False,
        "ep_slice": point.ep_slice,
        "tokens": point.tokens,
        "routing": point.routing,
        "shared": point.shared,
        "dtype": point.dtype,
        "wgrad_dtype": point.dtype,
        "pass": "fwd+bwd",
        "kind": "errors",
        "is_layer": True,
        "seed": 0,
    }
