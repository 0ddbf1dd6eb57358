"""The picture of a finished training: loss on the left, expert load on the right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moeloom.errors import ArgumentError, complain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe-Ito colours, which stay apart for colour-blind readers.
_BLUE, _ORANGE, _INK, _GREY = "#0072B2", "#D55E00", "#222222", "#767676"
_BASELINE_NAMES = {"order0": "order-0 counts", "order3": "order-3 counts", "zlib": "zlib", "xz": "xz"}
_MAX_EXPERT_TICKS = 16
_MAX_CELLS_WITH_TEXT = 160


def plot_training(metrics: list[dict], baselines: dict | None, out_png: str | os.PathLike) -> None:
    """Write a 1600 x 700 pixel PNG of the loss over the steps and of the share of routes of each expert.

    Args:
        metrics: rows as in ``metrics.jsonl``; of kind ``"train"`` and ``"valid"`` with ``step`` and ``bits_per_byte``,
            and now and then ``expert_load``, counts [MoE layers][experts]. The load is summed over the rows of the last
            quarter of the steps.
        baselines: bits per byte by name (``order0``, ``order3``, ``zlib``, ``xz``), drawn as labelled lines, or None.
        out_png: the file to write; replaced in one step when it exists.

    Raises:
        ArgumentError: no row of kind ``"train"`` has a number to draw.
    """
    train, valid = _series(metrics, "train"), _series(metrics, "valid")
    if not train.size:
        raise ArgumentError(
            complain("metrics", "hold a train row with bits_per_byte", f"{len(metrics)} rows", "Train first.")
        )
    # Imported here, because training without a picture must not need matplotlib. Figure alone never opens a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 7), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_loss(left, train, valid, baselines or {})
    _draw_load(figure, right, _final_load(metrics))
    target = Path(out_png)
    temporary = target.with_name(target.name + ".tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, target)


def _series(metrics: list[dict], kind: str) -> np.ndarray:
    """Return the finite points of one kind as [points, (step, bits per byte)], by step."""
    points = [
        (row["step"], row["bits_per_byte"])
        for row in metrics
        if row.get("kind") == kind and row.get("bits_per_byte") is not None
    ]
    return np.array(sorted(points), dtype=float).reshape(-1, 2)


def _final_load(metrics: list[dict]) -> np.ndarray | None:
    """Return the load [layers, experts] relative to balance, 1.0 = balanced, or None where no row has one."""
    rows = [row for row in metrics if row.get("expert_load")]
    if not rows:
        return None
    last = max(row["step"] for row in rows)
    counts = np.sum([row["expert_load"] for row in rows if row["step"] >= 0.75 * last], axis=0, dtype=float)
    total = counts.sum(axis=1, keepdims=True)
    return counts * counts.shape[1] / np.where(total > 0, total, 1)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Return the running mean over about 1/40 of the points, over fewer at both ends."""
    half = values.size // 80
    sums = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(values.size)
    low, high = np.maximum(place - half, 0), np.minimum(place + half + 1, values.size)
    return (sums[high] - sums[low]) / (high - low)


def _draw_loss(axes: Axes, train: np.ndarray, valid: np.ndarray, baselines: dict) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

    steps, bits = train.T
    smooth = _smooth(bits)
    axes.plot(steps, bits, color=_BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, color=_BLUE, linewidth=2)
    labels = [(smooth[-1], f"train {smooth[-1]:.2f}", _BLUE)]
    if valid.size:
        axes.plot(*valid.T, color=_ORANGE, marker="o", markersize=5, linewidth=1.2, clip_on=False, zorder=3)
        labels.append((valid[-1, 1], f"validation {valid[-1, 1]:.2f}", _ORANGE))
    for name, value in baselines.items():
        axes.axhline(value, color=_GREY, linewidth=1, linestyle=(0, (5, 4)), zorder=0)
        labels.append((value, f"{_BASELINE_NAMES.get(name, name)} {value:.2f}", _GREY))
    # Logarithmic, because the differences that matter are small and at the bottom, far below the 8 bits of the start.
    low, high = min(bits.min(), *(label[0] for label in labels)), max(bits.max(), *(label[0] for label in labels))
    axes.set_yscale("log", base=2)
    axes.set_ylim(max(low, 1e-3) * 0.95, max(high, 2e-3) * 1.03)
    axes.yaxis.set_major_locator(MaxNLocator(8))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0, max(steps[-1], valid[-1, 0] if valid.size else 0, 1))
    _label_right(axes, labels)
    axes.set_title("Loss in bits per byte (log scale)", loc="left", fontsize=15, color=_INK)
    axes.set_xlabel("step", fontsize=12, color=_INK)
    axes.tick_params(labelsize=11, colors=_INK)
    axes.spines[["top", "right"]].set_visible(False)


def _label_right(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Write the labels right of the axes, each at its value, moved just so far that none covers another."""
    bottom, top = np.log(axes.get_ylim())
    labels = sorted(labels)
    heights = (np.log([max(value, 1e-3) for value, _, _ in labels]) - bottom) / (top - bottom)
    for height, place, (_, text, color) in zip(heights, _spread(heights, gap=0.04), labels, strict=True):
        axes.plot([1.005, 1.035], [height, place], transform=axes.transAxes, color=color, linewidth=0.9, clip_on=False)
        axes.text(1.04, place, text, transform=axes.transAxes, fontsize=12, color=color, va="center")


def _spread(heights: np.ndarray, gap: float) -> np.ndarray:
    """Return sorted heights moved as little as possible (least squares) so that neighbours are ``gap`` apart."""
    # With the gaps taken out the task is to find the closest rising sequence: pool neighbours that are out of order.
    steps = np.arange(len(heights)) * gap
    pools: list[list[float]] = []
    for height in heights - steps:
        pools.append([height])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return np.concatenate([[np.mean(pool)] * len(pool) for pool in pools]) + steps


def _draw_load(figure: Figure, axes: Axes, load: np.ndarray | None) -> None:
    axes.set_title("Expert load at the end, 1.0 = balanced", loc="left", fontsize=15, color=_INK)
    if load is None:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no expert load recorded", ha="center", va="center", fontsize=13, color=_GREY)
        return
    layers, experts = load.shape
    # Symmetric around 1, so that white is balance and the two colours are too little and too much.
    reach = max(1.0, float(np.abs(load - 1).max()))
    image = axes.imshow(load, cmap="PuOr_r", vmin=1 - reach, vmax=1 + reach, aspect="auto", interpolation="nearest")
    axes.set_xlabel("expert", fontsize=12, color=_INK)
    axes.set_ylabel("MoE layer", fontsize=12, color=_INK)
    axes.set_yticks(range(0, layers, -(-layers // _MAX_EXPERT_TICKS)))
    axes.set_xticks(range(0, experts, -(-experts // _MAX_EXPERT_TICKS)))
    axes.tick_params(labelsize=11, colors=_INK, length=0)
    axes.spines[:].set_visible(False)
    if load.size <= _MAX_CELLS_WITH_TEXT and experts <= 20:
        for (layer, expert), value in np.ndenumerate(load):
            color = "white" if abs(value - 1) > 0.65 * reach else _INK
            axes.text(expert, layer, f"{value:.1f}", ha="center", va="center", fontsize=10, color=color)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.set_ylim(max(0.0, 1 - reach), 1 + reach)
    bar.ax.tick_params(labelsize=11, colors=_INK)
