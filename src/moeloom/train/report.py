"""What a training tells a person: a progress bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from moeloom.train.baselines import Baselines
from moeloom.train.data import Corpus
from moeloom.train.metrics import read_metrics
from moeloom.train.options import Options

#: Seconds between loss lines.
LINE_SECONDS = 5.0


class Reporter:
    """Prints for one rank.

    Args:
        silent: say nothing, on ranks other than 0.
    """

    def __init__(self, silent: bool = False) -> None:
        self._silent = silent
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task = None
        self._last_line = float("-inf")
        self._load = ""

    def say(self, text: str) -> None:
        """Print one line."""
        if not self._silent:
            self._console.print(text, markup=False)

    @contextlib.contextmanager
    def progress(self, options: Options, step: int):
        """Show a progress bar inside, if this is a terminal."""
        if self._silent or not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            TextColumn("{task.percentage:3.0f} %"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self._console) as self._bar:
            done = step / options.steps if options.minutes is None else 0.0
            self._task = self._bar.add_task("starting", total=1.0, completed=min(done, 1.0))
            yield
        self._bar = None

    def status(self, text: str) -> None:
        """Name what is being done, on the bar."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def step(self, row: dict, progress: float) -> None:
        """Show one step; prints a line every few seconds."""
        if self._silent:
            return
        if "expert_load" in row:
            self._load = _describe_load(row["expert_load"])
        loss, speed = f"{row['bits_per_byte']:.3f}", f"{row['tokens_per_s']:,.0f}"
        if self._bar is not None:
            # Short enough for a terminal of 80 columns.
            text = f"{row['step']}: {loss} bits/byte, {speed} tokens/s, load {self._load}"
            self._bar.update(self._task, completed=progress, description=text)
        if time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            load = f"  expert load {self._load} of mean" if self._load else ""
            text = f"step {row['step']:5d}  loss {loss} bits/byte  {speed:>7} tokens/s{load}"
            self.say(f"{text}  {100 * progress:3.0f} %")

    def validated(self, row: dict) -> None:
        """Print a validation result."""
        what = "whole validation text" if row["whole_text"] else "part of the validation text"
        self.say(f"step {row['step']:5d}  validation {row['bits_per_byte']:.3f} bits/byte ({what})")

    def sample(self, when: str, step: int, text: bytes, path: Path) -> None:
        """Print generated text and append it to a file."""
        if self._silent:
            return
        shown = "".join(chr(b) if 32 <= b < 127 or b == 10 else "\N{MIDDLE DOT}" for b in text)
        entry = f"--- generated {when} (step {step}); bytes outside ASCII shown as dots\n{shown}\n---"
        self.say(entry)
        with open(path, "a", encoding="utf-8") as file:
            file.write(entry + "\n")

    def finish(self, out: Path, bits: float, corpus: Corpus, baselines: Baselines) -> None:
        """Draw the picture and print our result beside simpler methods on the same validation text."""
        from moeloom.train.plots import plot_training

        picture = out / "training.png"
        plot_training(read_metrics(out / "metrics.jsonl"), vars(baselines), picture)
        self.say(f"bits per byte on the validation text of {corpus.name} ({corpus.valid.size:,} bytes):")
        for name, value in {"this model": bits, **baselines.named()}.items():
            self.say(f"  {name:15s} {value:.3f}")
        self.say(f"picture: {picture}\nmetrics: {out / 'metrics.jsonl'}\ncheckpoint: {out / 'checkpoints'}")


def _describe_load(load: list[list[int]]) -> str:
    """Return the busiest and the idlest expert of any layer as multiples of the mean load."""
    high = max(max(layer) * len(layer) / max(sum(layer), 1) for layer in load)
    low = min(min(layer) * len(layer) / max(sum(layer), 1) for layer in load)
    return f"{low:.2f}..{high:.2f}"
