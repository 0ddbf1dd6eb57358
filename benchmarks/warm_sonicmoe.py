"""Compile what SonicMoE's Triton kernel tunes over, on all cores, into Triton's cache.

    python3 benchmarks/warm_sonicmoe.py [MODEL ...]

Its sum over experts has about 70 configurations for each width and number of experts, and its tuner compiles them one
after the other: minutes a model. Afterwards the tuner only has to time them. Changes nothing of what is measured.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

from moeloom.bench.models import MODELS

EP_SLICE, TOKENS = 8, 256


def compile_share(share: int, shares: int, names: list[str]) -> None:
    """Compile every ``shares``-th configuration for all models."""
    import torch
    from sonicmoe.functional import reduction_over_k_gather as module

    kernel = module.token_gather_sum_kernel
    everything = list(kernel.configs)
    # One run of each is enough: compiling is the point.
    kernel.do_bench = lambda call, quantiles: (call(), [1.0, 1.0, 1.0])[1]
    for name in names:
        shape = MODELS[name]
        hidden, experts, top_k = shape.hidden, shape.experts // EP_SLICE, shape.top_k
        rows = torch.zeros(TOKENS * top_k, hidden, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(TOKENS, hidden, dtype=torch.bfloat16, device="cuda")
        order = torch.arange(TOKENS * top_k, dtype=torch.int32, device="cuda")
        ends = torch.arange(0, TOKENS * top_k + 1, top_k, dtype=torch.int32, device="cuda")
        weights = torch.ones(TOKENS * top_k, device="cuda")
        for w in (weights, None):
            kernel.configs = everything[share::shares]
            kernel.cache.clear()
            module.token_gather_and_sum_varlen_K_triton(rows, w, out, order, ends, TOKENS, experts, hidden, True)
    torch.cuda.synchronize()


def main() -> None:
    """Start the processes and wait for them."""
    names = sys.argv[1:] or list(MODELS)
    shares = max(1, (os.cpu_count() or 2) - 1)
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_share, args=(i, shares, names)) for i in range(shares)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    failed = sum(worker.exitcode != 0 for worker in workers)
    print(f"compiled in {time.perf_counter() - started:.0f} s, {failed} of {shares} processes failed")


if __name__ == "__main__":
    main()
