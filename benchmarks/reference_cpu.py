"""The numbers of DESIGN.md about the reference backend on a CPU: GEMM rate by rows, and the layer against a plain loop.

    .venv/bin/python benchmarks/reference_cpu.py

Medians over repeats in one process, variants interleaved. Prints a table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moeloom import moe


def milliseconds(call: Callable[[], object]) -> float:
    """Time one call."""
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def medians(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each call; they take turns, after three rounds of warm-up."""
    for _ in range(3):
        for call in calls.values():
            call()
    rounds = [{name: milliseconds(call) for name, call in calls.items()} for _ in range(repeats)]
    return {name: statistics.median(r[name] for r in rounds) for name in calls}


def gemm_by_rows(k: int = 256, n: int = 512) -> None:
    """Print GFLOP/s of fp32 ``[m, k] @ [k, n]``."""
    weight = torch.randn(n, k).t()
    rows = (16, 32, 64, 128, 256, 1024)
    inputs = {m: torch.randn(m, k) for m in rows}
    found = medians({str(m): lambda m=m: inputs[m] @ weight for m in rows}, 200)
    for m in rows:
        print(f"GEMM K={k} N={n}, {m:5d} rows: {2 * m * k * n / found[str(m)] / 1e6:6.0f} GFLOP/s")


def plain_loop(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer as a loop over experts with autograd: index, two products, index_add."""
    out = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        token, k = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[e].t()).chunk(2, -1)
        y = (F.silu(gate) * up) @ down[e].t()
        out = out.index_add(0, token, y * weights[token, k, None])
    return out


def layer(tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> None:
    """Print forward and forward + backward of both."""
    x, w = torch.randn(tokens, hidden, requires_grad=True), torch.rand(tokens, top_k, requires_grad=True)
    gate_up = torch.randn(experts, 2 * inner, hidden, requires_grad=True)
    down = torch.randn(experts, hidden, inner, requires_grad=True)
    ids = torch.rand(tokens, experts).argsort(dim=1)[:, :top_k]
    d_out = torch.randn(tokens, hidden)
    calls: dict[str, Callable[[], object]] = {}
    for name, function in (("moeloom", moe), ("plain loop", plain_loop)):
        calls[f"{name} forward"] = lambda f=function: f(x, ids, w, gate_up, down)
        calls[f"{name} forward+backward"] = lambda f=function: f(x, ids, w, gate_up, down).backward(d_out)
    for name, ms in medians(calls, 20).items():
        print(f"T={tokens} H={hidden} I={inner} E={experts} K={top_k}, {name}: {ms:.1f} ms")


def main() -> None:
    """Print all tables."""
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    gemm_by_rows()
    layer(2048, 128, 128, 8, 2)
    layer(4096, 256, 256, 16, 2)
    layer(4096, 256, 128, 64, 8)
    layer(64, 128, 128, 64, 3)


if __name__ == "__main__":
    main()
