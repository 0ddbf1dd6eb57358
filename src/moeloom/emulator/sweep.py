"""Many seeds of one test: on all cores, with progress, stopping at the first alarm and explaining it."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from moeloom.emulator.alarms import Alarm, Race
from moeloom.emulator.machine import Emulator

Build = Callable[[Emulator], "dict[str, torch.Tensor] | None"]


@dataclass
class SweepReport:
    """What a sweep found.

    Attributes:
        seeds: seeds that ran to their end or to an alarm, in order.
        alarms: (seed, alarm), in order of seeds.
        digests: seed -> digest of the outputs' bits, for seeds without an alarm.
        outputs: outputs of the first seed without an alarm that ran in this process.
        seconds: wall time.
    """

    seeds: list[int] = field(default_factory=list)
    alarms: list[tuple[int, Alarm]] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] | None = None
    seconds: float = 0.0

    def raise_first(self) -> None:
        """Raise the alarm of the first seed that has one."""
        if self.alarms:
            raise self.alarms[0][1]

    @property
    def same_bits(self) -> bool:
        """Whether all seeds without an alarm gave equal bits."""
        return len(set(self.digests.values())) <= 1


def sweep(
    build: Build,
    seeds: Iterable[int] = range(30),
    *,
    check: Callable[[dict], None] | None = None,
    same_bits: bool = True,
    processes: int | None = None,
    stop_at_first: bool = True,
    progress: bool | None = None,
    **options: object,
) -> SweepReport:
    """Run a test under many schedules.

    Args:
        build: gets a fresh :class:`Emulator`, makes fresh tensors, launches, and returns the outputs by name.
        seeds: one run each.
        check: gets the outputs of a run; raises AssertionError if they are wrong. With ``same_bits`` it sees the first
            run only, since the others are equal to it.
        same_bits: outputs must have equal bits for all seeds; if not, AssertionError.
        processes: how many processes share the seeds; None: as many as cores, if there is enough to do.
        stop_at_first: end at the first alarm.
        progress: show a bar on a terminal; None: if the sweep takes more than two seconds.
        options: for :class:`Emulator`.

    Returns:
        What was found. Alarms are returned, not raised; see :meth:`SweepReport.raise_first`.

    Raises:
        AssertionError: wrong or unequal outputs.
        NotEmulated: the kernel uses something that the emulator does not have.
    """
    seeds = list(seeds)
    report, started = SweepReport(), time.perf_counter()
    bar = _Bar(len(seeds), progress)
    run = _Runner(build, check, same_bits, options)
    # The first seed runs here: a kernel that is wrong at once costs no processes, and the caller gets its outputs.
    for seed in seeds[:1]:
        _take(report, run(seed), bar)
    rest = seeds[1:] if not (report.alarms and stop_at_first) else []
    if processes is None:
        # One core for each process, unless starting them would cost more than it saves.
        processes = os.cpu_count() or 1 if (time.perf_counter() - started) * len(rest) > 1.0 else 1
    run.check = check if not same_bits else None
    if processes > 1 and len(rest) > 1 and hasattr(os, "fork"):
        _in_processes(run, rest, min(processes, len(rest)), report, bar, stop_at_first)
    else:
        for seed in rest:
            _take(report, run(seed), bar)
            if report.alarms and stop_at_first:
                break
    bar.close()
    report.seeds.sort()
    report.alarms.sort(key=lambda pair: pair[0])
    report.seconds = time.perf_counter() - started
    if same_bits and not report.same_bits:
        groups: dict[str, list[int]] = {}
        for seed, digest in sorted(report.digests.items()):
            groups.setdefault(digest, []).append(seed)
        parts = "; ".join(f"seeds {', '.join(map(str, s[:5]))}: {d}" for d, s in groups.items())
        raise AssertionError(f"the outputs' bits depend on the schedule: {parts}")
    return report


@dataclass
class _Outcome:
    seed: int
    alarm: Alarm | None = None
    digest: str = ""
    outputs: dict | None = None
    error: str | None = None


class _Runner:
    """Runs one seed; after a race, once more with the clocks that explain it."""

    def __init__(self, build: Build, check: Callable | None, same_bits: bool, options: dict) -> None:
        self.build, self.check, self.same_bits, self.options = build, check, same_bits, options

    def __call__(self, seed: int) -> _Outcome:
        try:
            outputs = self._run(seed, **self.options)
        except Race as race:
            if self.options.get("diagnose"):
                return _Outcome(seed, race)
            try:
                self._run(seed, **(self.options | {"diagnose": True}))
            except Alarm as explained:
                return _Outcome(seed, explained)
            return _Outcome(seed, race)
        except Alarm as alarm:
            return _Outcome(seed, alarm)
        if self.check is not None and outputs is not None:
            self.check(outputs)
        return _Outcome(seed, None, _digest(outputs), outputs)

    def _run(self, seed: int, **options: object) -> dict | None:
        machine = Emulator(seed, **options)
        outputs = self.build(machine)
        machine.run()
        return outputs


def _digest(outputs: dict[str, torch.Tensor] | None) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(outputs or {}):
        flat = outputs[name].contiguous().view(-1)
        digest.update(name.encode())
        digest.update(np.asarray(flat.view(torch.uint8) if flat.numel() else flat).tobytes())
    return digest.hexdigest()


def _take(report: SweepReport, outcome: _Outcome, bar: _Bar) -> None:
    if outcome.error is not None:
        raise RuntimeError(f"seed {outcome.seed} failed in a worker process:\n{outcome.error}")
    report.seeds.append(outcome.seed)
    if outcome.alarm is not None:
        report.alarms.append((outcome.seed, outcome.alarm))
    else:
        report.digests[outcome.seed] = outcome.digest
        if report.outputs is None:
            report.outputs = outcome.outputs
    bar.step(len(report.alarms))


def _in_processes(
    run: _Runner, seeds: list[int], count: int, report: SweepReport, bar: _Bar, stop_at_first: bool
) -> None:
    context = multiprocessing.get_context("fork")
    results, stop = context.SimpleQueue(), context.Event()
    workers = [
        context.Process(target=_work, args=(run, seeds[i::count], results, stop), daemon=True) for i in range(count)
    ]
    for worker in workers:
        worker.start()
    try:
        ended = 0
        while ended < count:
            outcome = results.get()
            if outcome is None:
                ended += 1
                continue
            _take(report, outcome, bar)
            if report.alarms and stop_at_first:
                stop.set()
    finally:
        stop.set()
        for worker in workers:
            worker.join(timeout=60)
            if worker.is_alive():
                worker.terminate()


def _work(run: _Runner, seeds: list[int], results: object, stop: object) -> None:
    """In a worker process."""
    torch.set_num_threads(1)  # the parent's thread pool does not survive the fork
    for seed in seeds:
        if stop.is_set():
            break
        try:
            outcome = run(seed)
            outcome.outputs = None
        except BaseException:
            outcome = _Outcome(seed, error=traceback.format_exc())
        results.put(outcome)
    results.put(None)


class _Bar:
    """A line of progress on a terminal, once a sweep takes longer than two seconds."""

    def __init__(self, total: int, wanted: bool | None) -> None:
        self.total, self.done, self.started, self.shown = total, 0, time.perf_counter(), False
        self.wanted = sys.stderr.isatty() if wanted is None else wanted

    def step(self, alarms: int) -> None:
        """One more seed is done."""
        self.done += 1
        elapsed = time.perf_counter() - self.started
        if self.wanted and self.total > 1 and elapsed > 2:
            left = elapsed / self.done * (self.total - self.done)
            self.shown = True
            text = f"\remulating: {self.done}/{self.total} seeds, {alarms} alarms, {left:.0f} s left "
            print(text, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self.shown:
            print(file=sys.stderr)


def emulate(
    kernel: object,
    grid: int | tuple[int, ...],
    args: dict | tuple | list,
    seeds: Iterable[int] = range(10),
    *,
    num_warps: int = 4,
    same_bits: bool = True,
    processes: int | None = None,
    **options: object,
) -> SweepReport:
    """Run one launch under many schedules, in place of ``kernel[grid](*args)`` on a GPU.

    Tensor arguments are set back to what they held before each seed; afterwards they hold the outputs of the first.

    Args:
        kernel: a ``@gluon.jit`` function.
        grid: number of CTAs.
        args: by name or in order.
        seeds: one run each.
        num_warps: of the default partition.
        same_bits: all tensor arguments must end with equal bits for all seeds.
        processes: how many processes share the seeds; None: as many as cores, if there is enough to do.
        options: for :class:`Emulator`.

    Raises:
        Alarm: the first one found.
        AssertionError: unequal bits.
        NotEmulated: the kernel uses something that the emulator does not have.
    """
    tensors = {name: _memory_of(x) for name, x in (args.items() if isinstance(args, dict) else enumerate(args))}
    tensors = {str(name): t for name, t in tensors.items() if t is not None}
    before = {name: t.clone() for name, t in tensors.items()}

    def build(machine: Emulator) -> dict[str, torch.Tensor]:
        for name, t in tensors.items():
            t.copy_(before[name])
        machine.launch(kernel, grid, args, num_warps=num_warps)
        return tensors

    first, *rest = list(seeds)
    report = sweep(build, [first], same_bits=same_bits, **options)
    report.raise_first()
    kept = {name: t.clone() for name, t in tensors.items()}
    if rest:
        more = sweep(build, [first, *rest], same_bits=same_bits, processes=processes, **options)
        more.raise_first()
        report = more
        for name, t in tensors.items():
            t.copy_(kept[name])
    return report


def _memory_of(x: object) -> torch.Tensor | None:
    if isinstance(x, torch.Tensor):
        return x
    base = getattr(x, "base", None)
    return base if isinstance(base, torch.Tensor) else None
