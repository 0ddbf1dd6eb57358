"""What a call costs besides time on the device: host time, launches, memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moeloom.bench.timing import Step, clock_for


@dataclass(frozen=True)
class HostTime:
    """Microseconds until a call returns to Python, the device being idle when it begins.

    A call that waits for the device inside counts that wait.
    """

    p50: float
    p99: float
    samples: int


def host_time(step: Step, device: torch.device, samples: int) -> HostTime | None:
    """Sample the host time of a step; None on a CPU, which is host and device in one."""
    if device.type != "cuda":
        return None
    clock = clock_for(device)
    taken: list[float] = []
    for _ in range(samples):
        given = step.before()
        clock.wait()
        started = time.perf_counter()
        result = step.timed(given)
        taken.append((time.perf_counter() - started) * 1e6)
        del given, result
        step.after()
    clock.wait()
    taken.sort()
    return HostTime(round(_quantile(taken, 0.5), 2), round(_quantile(taken, 0.99), 2), samples)


def _quantile(ordered: list[float], share: float) -> float:
    """Return the smallest sample that ``share`` of all do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def host_bound_tokens(host_us: float, ms: float, tokens: int, weights_ms: float) -> int:
    """Estimate the number of tokens below which the host, not the device, sets the time of a call.

    Device time is taken to shrink in proportion to tokens, but not below one read of the weights; 0 = never the host.
    """
    if host_us / 1e3 <= weights_ms:
        return 0
    return math.ceil(tokens * host_us / 1e3 / ms)


def launches(step: Step, device: torch.device) -> int | None:
    """Count what one call puts on the device: kernels, copies and fills; None on a CPU, or where tracing fails.

    Call it after the step has run once, so that what fails is the tracing.
    """
    if device.type != "cuda":
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    given = step.before()
    torch.cuda.synchronize(device)
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            result = step.timed(given)
            torch.cuda.synchronize(device)
        del result
        on_device = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    except Exception:  # A profiler that is in use, or not allowed here, says so in many ways.
        return None
    finally:
        given = None
        step.after()
    return sum(not getattr(e, "is_user_annotation", False) for e in on_device) or None


def peak_bytes(step: Step, device: torch.device, gradient_bytes: Callable[[], int]) -> int | None:
    """Return the most memory that one call needs on top of what is there before it, less the gradients it leaves.

    Parameters and inputs are there before; so what counts is activations, the output, and scratch. None on a CPU.
    """
    if device.type != "cuda":
        return None
    given = step.before()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = step.timed(given)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before - gradient_bytes()
    del given, result
    step.after()
    return peak
