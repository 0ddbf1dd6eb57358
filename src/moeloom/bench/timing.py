"""Timing: clocks of a device, emptying its cache, and rounds in which all contenders take turns.

One round times every contender once, so that clocks, temperature and neighbours are the same for all; the order moves
on by one place each round. On a GPU time is that between two events in the stream, and nothing waits for the host
between iterations: what is measured is a device that always has work, as in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

#: Bytes written to empty the cache: more than the L2 of any GPU, and than the last cache that two CPU cores have.
GPU_FLUSH_BYTES, CPU_FLUSH_BYTES = 256 << 20, 64 << 20


class Clock(Protocol):
    """Marks points in a device's stream of work."""

    def mark(self) -> object:
        """Return a mark at the end of the work given so far."""

    def ms(self, begin: object, end: object) -> float:
        """Return milliseconds between two marks; only after :meth:`wait`."""

    def wait(self) -> None:
        """Wait until the device has nothing left to do."""


class HostClock:
    """Clock of a CPU, which has finished whatever it was given."""

    def mark(self) -> float:
        """Return seconds since some moment."""
        return time.perf_counter()

    def ms(self, begin: float, end: float) -> float:
        """Return milliseconds between two marks."""
        return (end - begin) * 1e3

    def wait(self) -> None:
        """Do nothing."""


class StreamClock:
    """Clock of a CUDA device: events in its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return milliseconds between two events."""
        return begin.elapsed_time(end)

    def wait(self) -> None:
        """Synchronise the device."""
        torch.cuda.synchronize(self._device)


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return StreamClock(device) if device.type == "cuda" else HostClock()


def cache_flusher(device: torch.device) -> Callable[[], object]:
    """Return a call that fills the device's cache with something else."""
    size = GPU_FLUSH_BYTES if device.type == "cuda" else CPU_FLUSH_BYTES
    waste = torch.empty(size, dtype=torch.uint8, device=device)
    return waste.zero_


@dataclass(frozen=True)
class Step:
    """One thing to time.

    Attributes:
        name: of the contender.
        before: untimed preparation; what it returns is handed to ``timed``.
        timed: what counts.
        after: untimed, frees what ``timed`` left.
    """

    name: str
    before: Callable[[], object]
    timed: Callable[[object], object]
    after: Callable[[], object]


def one_round(steps: Sequence[Step], turn: int, clock: Clock, flush: Callable[[], object] | None) -> dict[str, tuple]:
    """Run every step once, beginning with step ``turn``; return marks by name."""
    marks = {}
    for i in range(len(steps)):
        step = steps[(turn + i) % len(steps)]
        given = step.before()
        if flush is not None:
            flush()
        begin = clock.mark()
        result = step.timed(given)
        marks[step.name] = (begin, clock.mark())
        # The result lives to the end of its iteration and no longer: the next contender gets its memory.
        del given, result
        step.after()
    return marks


def interleave(steps: Sequence[Step], rounds: int, device: torch.device, *, cold: bool) -> dict[str, list[float]]:
    """Time steps in turns.

    Args:
        steps: the contenders; names differ.
        rounds: how often each is timed.
        device: where they run.
        cold: empty the cache before each timed call.

    Returns:
        milliseconds of every round, by name, in round order.
    """
    clock = clock_for(device)
    flush = cache_flusher(device) if cold else None
    marks = [one_round(steps, turn, clock, flush) for turn in range(rounds)]
    clock.wait()
    return {step.name: [clock.ms(*found[step.name]) for found in marks] for step in steps}


def round_seconds(steps: Sequence[Step], device: torch.device, rounds: int) -> float:
    """Run untimed rounds to warm up; return the seconds of one."""
    clock = clock_for(device)
    clock.wait()
    started = time.perf_counter()
    for turn in range(rounds):
        one_round(steps, turn, clock, None)
    clock.wait()
    return (time.perf_counter() - started) / rounds


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return, for every iteration, the time of the rank that took longest.

    Args:
        by_rank: milliseconds [ranks][iterations].
    """
    return [max(times) for times in zip(*by_rank, strict=True)]


def summary(times: Sequence[float]) -> dict[str, float | int]:
    """Return the fields of a record that describe a list of milliseconds."""
    return {
        "ms_median": significant(statistics.median(times)),
        "ms_min": significant(min(times)),
        "ms_max": significant(max(times)),
        "runs": len(times),
    }


def significant(value: float, digits: int = 6) -> float:
    """Round to a number of significant digits, as records hold them."""
    return float(f"{value:.{digits}g}")
