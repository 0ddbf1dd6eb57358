"""Pictures of benchmarks, drawn from records alone: bars over models, roofline, scaling with tokens, imbalance.

Of several records of the same thing the last one counts. Records of different machines, dtypes, numbers of ranks or
slices, or with and without shared expert, are never drawn into one picture; each such set gets its own files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moeloom.bench.records import CPU_STAMP, measured
from moeloom.errors import ArgumentError, DataError, complain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe-Ito colours, which stay apart for colour-blind readers; a backend has the same one in every picture.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#8C564B")
_ORDER = ("moeloom-hopper", "moeloom-torch", "sonicmoe", "transformers-grouped_mm", "liger", "moeloom-reference")
_LAST = "cublas-dense"
_INK, _GREY, _RED = "#222222", "#767676", "#B00020"
_HATCHES = ("", "///", "...", "xxx", "++", "\\\\\\")
_MARKERS = "osD^vP"
#: What two records must share to be drawn into one picture, and what they must share to be of the same thing.
_SET = ("device", "dtype", "ep_size", "ep_slice", "shared")
_SAME = (*_SET, "model", "tokens", "routing", "pass", "backend", "l2")


def draw_all(records: Iterable[dict], folder: Path) -> list[Path]:
    """Draw every picture that the records have numbers for, each as PNG and SVG.

    Args:
        records: as :func:`moeloom.bench.records.read` returns them.
        folder: made if it is not there.

    Returns:
        the files written.

    Raises:
        DataError: no record of a timing. ArgumentError: the folder cannot be made.
    """
    last = {tuple(r[name] for name in _SAME): r for r in measured(list(records))}
    if not last:
        raise DataError(complain("the files", "hold a timing that succeeded", "none", "Run moeloom bench layer."))
    sets: dict[tuple, list[dict]] = {}
    for record in last.values():
        sets.setdefault(tuple(record[name] for name in _SET), []).append(record)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(complain("--out", "name a folder that can be made", error, "Choose another.")) from error
    written = []
    for number, found in enumerate(sets.values()):
        suffix = f"-{_slug(found[0])}" if len(sets) > 1 else ""
        if len({_slug(other[0]) for other in sets.values()}) < len(sets) and suffix:
            suffix += f"-{number}"
        for name, draw in _PICTURES.items():
            figure = draw(_one_l2(found))
            if figure is not None:
                written += _save(figure, folder / (name + suffix))
    return written


def _one_l2(records: list[dict]) -> list[dict]:
    """Keep cold-cache records where there are any."""
    cold = [r for r in records if r["l2"] == "cold"]
    return cold or records


def _slug(record: dict) -> str:
    device = record["device"].split(",")[0].lower()
    parts = [device, record["dtype"], f"ep{record['ep_size']}", *(["shared"] if record["shared"] else [])]
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts)).strip("-")


def _backends(records: Sequence[dict]) -> list[str]:
    """Return backends in the order in which they are drawn."""
    names = sorted({r["backend"] for r in records} - {_LAST} - set(_ORDER))
    present = {r["backend"] for r in records}
    return [n for n in (*_ORDER, *names, _LAST) if n in present]


def _colour(backend: str, backends: Sequence[str]) -> str:
    fixed = [*_ORDER, _LAST]
    place = fixed.index(backend) if backend in fixed else len(fixed) + sorted(backends).index(backend)
    return _COLOURS[place % len(_COLOURS)]


def _values(records: Sequence[dict], name: str) -> list:
    """Return the different values of a field, models and routings in order of appearance, the rest sorted."""
    seen = list(dict.fromkeys(r[name] for r in records))
    return seen if name in ("model", "routing", "pass") else sorted(seen)


def _pick(records: Sequence[dict], **fields: object) -> list[dict]:
    return [r for r in records if all(r[name] == value for name, value in fields.items())]


def _main_routing(records: Sequence[dict]) -> str:
    routings = _values(records, "routing")
    return "random" if "random" in routings else routings[0]


def _main_tokens(records: Sequence[dict]) -> int:
    tokens = _values(records, "tokens")
    return 8192 if 8192 in tokens else tokens[-1]


def _figure(records: Sequence[dict], title: str, rows: int, columns: int, size: tuple[float, float]) -> Figure:
    """Make a figure without a display, titled with the machine and, for a CPU, its warning."""
    # Imported here, because measuring must not need matplotlib. Figure alone never opens a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows + 0.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    first = records[0]
    device = first["device"].split(",")[0]
    where = f"{device}, {first['dtype']}, EP {first['ep_size']}, 1/{first['ep_slice']} of the experts"
    is_cpu = CPU_STAMP in first["device"]
    warning = "\nCPU, scaled: not a GPU speed" if is_cpu else ""
    shared = ", with shared expert" if first["shared"] else ""
    figure.suptitle(f"{title}\n{where}{shared}{warning}", fontsize=12, color=_RED if is_cpu else _INK)
    return figure


def _tidy(axes: Axes, title: str, ylabel: str = "useful TFLOP/s") -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_ylabel(ylabel, color=_INK)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, stem: Path) -> list[Path]:
    """Write PNG and SVG, each in one step."""
    from matplotlib import rc_context

    written = []
    for kind in ("png", "svg"):
        target, part = stem.with_name(f"{stem.name}.{kind}"), stem.with_name(f"{stem.name}.{kind}.tmp")
        # No dates and fixed ids: the same records give the same file. Text stays text, which can be searched.
        with rc_context({"svg.hashsalt": stem.name, "svg.fonttype": "none"}):
            figure.savefig(part, format=kind, metadata={"Date": None} if kind == "svg" else None)
        os.replace(part, target)
        written.append(target)
    return written


def _draw_bars(records: list[dict]) -> Figure:
    """Bars over models, one panel a pass, at one number of tokens and one routing; floor and best GEMM as lines."""
    tokens, routing = _main_tokens(records), _main_routing(records)
    shown = _pick(records, tokens=tokens, routing=routing) or records
    tokens, routing = shown[0]["tokens"], shown[0]["routing"]
    shown = _pick(shown, tokens=tokens, routing=routing)
    passes, backends, models = _values(shown, "pass"), _backends(shown), _values(shown, "model")
    figure = _figure(shown, f"MoE layer, {tokens} tokens, {routing} routing", len(passes), 1, (9.5, 3.2))
    for axes, pass_ in zip(figure.subplots(len(passes), 1, squeeze=False)[:, 0], passes, strict=True):
        width = 0.8 / len(backends)
        for i, backend in enumerate(backends):
            found = {r["model"]: r for r in _pick(shown, backend=backend, **{"pass": pass_})}
            places = [m + (i - (len(backends) - 1) / 2) * width for m, name in enumerate(models) if name in found]
            heights = [found[name]["useful_tflops"] for name in models if name in found]
            bars = axes.bar(places, heights, width * 0.94, color=_colour(backend, backends), label=backend)
            axes.bar_label(bars, fmt="%.3g", fontsize=7, color=_INK, padding=1)
        for m, name in enumerate(models):
            limits = {_floor_tflops(r) for r in _pick(shown, model=name, **{"pass": pass_})}
            axes.hlines(max(limits, default=0), m - 0.42, m + 0.42, color=_INK, linewidth=1.4)
        ceiling = max(r["gemm_ceiling_tflops"] for r in shown)
        axes.axhline(ceiling, color=_GREY, linewidth=1, linestyle=(0, (5, 4)))
        axes.set_xticks(range(len(models)), models)
        _tidy(axes, f"{pass_}   (line: floor; dashed: best dense GEMM)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _floor_tflops(record: dict) -> float:
    """Return what the useful work would run at if the time were the floor."""
    return record["useful_tflops"] * record["ms_median"] / record["floor_ms"]


def _draw_roofline(records: list[dict]) -> Figure:
    """Useful TFLOP/s over useful operations per compulsory byte, below the two measured roofs."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    shown = _pick(records, routing=_main_routing(records))
    passes, backends, models = _values(shown, "pass"), _backends(shown), _values(shown, "model")
    figure = _figure(shown, f"Roofline, {_main_routing(records)} routing", 1, len(passes), (6.5, 5))
    for axes, pass_ in zip(figure.subplots(1, len(passes), squeeze=False)[0], passes, strict=True):
        here = _pick(shown, **{"pass": pass_})
        xs = [_intensity(r) for r in here]
        roof, copy = max(r["gemm_ceiling_tflops"] for r in here), max(r["copy_gb_per_s"] for r in here)
        low, high = min(*xs, roof * 1e3 / copy) / 2, max(*xs, roof * 1e3 / copy) * 2
        knee = roof * 1e3 / copy
        axes.plot([low, knee, high], [low * copy / 1e3, roof, roof], color=_INK, linewidth=1.4)
        for r, x in zip(here, xs, strict=True):
            axes.plot(
                x,
                r["useful_tflops"],
                marker=_MARKERS[models.index(r["model"]) % len(_MARKERS)],
                color=_colour(r["backend"], backends),
                markersize=6,
                linestyle="",
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("useful operations per byte that must be moved", color=_INK)
        _tidy(axes, f"{pass_}   (roofs: {roof:.3g} TFLOP/s, {copy:.4g} GB/s)")
    handles = [_key(axes, _colour(b, backends), "s", b) for b in backends]
    handles += [_key(axes, _GREY, _MARKERS[i % len(_MARKERS)], m) for i, m in enumerate(models)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _key(axes: Axes, colour: str, marker: str, label: str) -> object:
    """Return a legend entry that is drawn nowhere else."""
    return axes.plot([], [], color=colour, marker=marker, linestyle="", label=label)[0]


def _intensity(record: dict) -> float:
    return record["useful_tflops"] * record["ms_median"] * 1e9 / record["floor_terms"]["bytes"]


def _draw_scaling(records: list[dict]) -> Figure | None:
    """Useful TFLOP/s over tokens, one panel a model and pass; None with a single number of tokens."""
    shown = _pick(records, routing=_main_routing(records))
    if len(_values(shown, "tokens")) < 2:
        return None
    passes, backends, models = _values(shown, "pass"), _backends(shown), _values(shown, "model")
    title = f"Scaling with tokens, {_main_routing(records)} routing (dashed: floor)"
    figure = _figure(shown, title, len(passes), len(models), (3.6, 3))
    panels = figure.subplots(len(passes), len(models), squeeze=False, sharey="row")
    for row, pass_ in enumerate(passes):
        for column, model in enumerate(models):
            axes, here = panels[row, column], _pick(shown, model=model, **{"pass": pass_})
            for backend in backends:
                points = sorted((r["tokens"], r["useful_tflops"]) for r in _pick(here, backend=backend))
                if points:
                    axes.plot(*zip(*points, strict=True), "o-", color=_colour(backend, backends), markersize=4)
            limit = sorted({r["tokens"]: _floor_tflops(r) for r in here}.items())
            if limit:
                axes.plot(*zip(*limit, strict=True), color=_INK, linewidth=1, linestyle=(0, (5, 4)))
            axes.set_xscale("log", base=2)
            axes.set_xticks(_values(shown, "tokens"), [str(t) for t in _values(shown, "tokens")])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            _tidy(axes, f"{model}, {pass_}", "useful TFLOP/s" if column == 0 else "")
    handles = [_key(axes, _colour(b, backends), "o", b) for b in backends]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_imbalance(records: list[dict]) -> Figure | None:
    """Speed under each routing relative to the most even one measured, by model; None with a single routing."""
    routings = _values(records, "routing")
    if len(routings) < 2:
        return None
    base = "balanced" if "balanced" in routings else _main_routing(records)
    tokens = _main_tokens(records)
    layers = [r for r in _pick(records, tokens=tokens) if r["is_layer"]] or [r for r in records if r["is_layer"]]
    if not layers:
        return None
    passes, backends, models = _values(layers, "pass"), _backends(layers), _values(layers, "model")
    others = [r for r in routings if r != base]
    figure = _figure(layers, f"Imbalance, {tokens} tokens: speed relative to {base} routing", len(passes), 1, (9.5, 3))
    for axes, pass_ in zip(figure.subplots(len(passes), 1, squeeze=False)[:, 0], passes, strict=True):
        count = len(backends) * len(others)
        width = 0.8 / count
        for i, (backend, routing) in enumerate((b, r) for b in backends for r in others):
            found = {r["model"]: r for r in _pick(layers, backend=backend, routing=routing, **{"pass": pass_})}
            even = {r["model"]: r for r in _pick(layers, backend=backend, routing=base, **{"pass": pass_})}
            both = [m for m in models if m in found and m in even]
            places = [models.index(m) + (i - (count - 1) / 2) * width for m in both]
            heights = [found[m]["useful_tflops"] / even[m]["useful_tflops"] for m in both]
            hatch = _HATCHES[others.index(routing) % len(_HATCHES)]
            bars = axes.bar(
                places,
                heights,
                width * 0.92,
                color=_colour(backend, backends),
                hatch=hatch,
                edgecolor="white",
                label=f"{backend}, {routing}",
            )
            axes.bar_label(bars, fmt="%.2f", fontsize=7, color=_INK, padding=1)
        axes.axhline(1.0, color=_GREY, linewidth=1)
        axes.set_xticks(range(len(models)), models)
        _tidy(axes, pass_, f"speed / {base}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


_PICTURES: dict[str, Callable[[list[dict]], Figure | None]] = {
    "bars": _draw_bars,
    "roofline": _draw_roofline,
    "scaling": _draw_scaling,
    "imbalance": _draw_imbalance,
}
