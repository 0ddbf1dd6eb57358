"""The two rates that floors and shares refer to, measured in the same run: best dense GEMM, and copy bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moeloom.bench.timing import Step, clock_for, interleave, round_seconds, significant

#: (m, n, k) of the dense products. A large cube, and the two products of a large expert (gate and up; down).
GPU_SIZES = ((8192, 8192, 8192), (16384, 4096, 7168), (16384, 7168, 2048))
CPU_SIZES = ((512, 512, 512), (1024, 512, 256), (1024, 256, 512))
#: Bytes that a copy reads (and writes as many): far more than any cache holds.
GPU_COPY_BYTES, CPU_COPY_BYTES = 2 << 30, 64 << 20


@dataclass(frozen=True)
class Ceiling:
    """Rates of this machine in this run.

    Attributes:
        gemm_tflops: the best of the sizes.
        gemm_by_size: TFLOP/s by ``"m x n x k"``.
        copy_gb_per_s: bytes read plus bytes written by a large copy within the device's memory.
    """

    gemm_tflops: float
    gemm_by_size: dict[str, float]
    copy_gb_per_s: float


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of dense products: as asked; fp32 on a CPU, most of which have no products in bf16."""
    return dtype if device.type == "cuda" else torch.float32


def warm(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Run dense products until the clocks are those of sustained work; return the seconds spent."""
    size = 8192 if device.type == "cuda" else 512
    dtype = product_dtype(device, dtype)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        for _ in range(4):
            torch.mm(a, b)
        clock_for(device).wait()
    return spent


def measure_ceiling(device: torch.device, dtype: torch.dtype, seconds: float) -> Ceiling:
    """Measure both rates in about ``seconds``.

    The dense products are timed as contenders are: in turns, with the cache emptied before each. A GPU that only
    multiplies runs into its power limit and is slower than one that also moves memory (675 against 705 TFLOP/s seen in
    one run on an H200), and a ceiling that contenders can pass is none.
    """
    is_gpu = device.type == "cuda"
    dtype = product_dtype(device, dtype)
    steps, flops = [], {}
    for m, n, k in GPU_SIZES if is_gpu else CPU_SIZES:
        a, b = (torch.randn(*size, device=device, dtype=dtype) for size in ((m, k), (k, n)))
        out = torch.empty(m, n, device=device, dtype=dtype)
        name = f"{m} x {n} x {k}"
        flops[name] = 2 * m * n * k
        steps.append(Step(name, lambda: None, lambda _, a=a, b=b, out=out: torch.mm(a, b, out=out), lambda: None))
    once = round_seconds(steps, device, 3)
    rounds = min(500, max(5, round(seconds / 2 / once)))
    times = interleave(steps, rounds, device, cold=True)
    by_size = {name: significant(flops[name] / statistics.median(ms) / 1e9) for name, ms in times.items()}
    source = torch.randint(0, 255, (GPU_COPY_BYTES if is_gpu else CPU_COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = _median_ms(device, lambda: target.copy_(source), seconds / 4)
    return Ceiling(max(by_size.values()), by_size, significant(2 * source.numel() / ms / 1e6))


def _median_ms(device: torch.device, call: Callable[[], object], seconds: float) -> float:
    """Return the median milliseconds of a call that is repeated for ``seconds``, at least 5 times."""
    clock = clock_for(device)
    # Several at a time: a GPU that waits for the host between two calls is not what is to be measured.
    batch = 10 if device.type == "cuda" else 1
    call()
    clock.wait()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < deadline:
        spans = []
        for _ in range(batch):
            begin = clock.mark()
            call()
            spans.append((begin, clock.mark()))
        clock.wait()
        times += [clock.ms(*span) for span in spans]
    return statistics.median(times)
