"""``moeloom doctor``: what this machine has, whether it keeps the layer's promise, which backend ``auto`` takes."""

from __future__ import annotations

import os
import platform
import sys

import torch

from moeloom import backends
from moeloom.backends import hopper
from moeloom.backends.call import Request
from moeloom.errors import ToolchainError
from moeloom.functional import moe
from moeloom.numerics import rows_matmul
from moeloom.version import __version__


def run() -> int:
    """Print the report; exit code 0 when the self-check holds, 1 when not."""
    _line("moeloom", __version__)
    _line("python", f"{platform.python_version()} ({sys.executable})")
    _line("platform", f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} cores")
    capability = torch.backends.cpu.get_cpu_capability()
    _line("torch", f"{torch.__version__}, {torch.get_num_threads()} threads, CPU capability {capability}")
    _line("distributed", _distributed())
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
        _gpus()
    else:
        build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
        _line("GPU", f"none that torch can use ({build} of torch)")
    for device in devices:
        name, why = backends.automatic(device)
        _line(f"backend on {device}", f"auto takes '{name}': {why}")
    for name, value in _kernels():
        _line(name, value)
    held = _same_bits()
    _line("self-check", f"{'equal bits' if held else 'BITS DIFFER'} over batch sizes, places and threads on this CPU")
    handed = _handshake()
    return 0 if held and handed else 1


def _line(name: str, value: object) -> None:
    print(f"{name:16s} {value}")


def _kernels() -> list[tuple[str, str]]:
    """Name the kernels that there are, and say for every GPU whether they can run there."""
    found = [("kernels", "'hopper': forward of one rank, bf16, compute capability 9.0; backward by 'torch'")]
    try:
        from moeloom.compat import TRITON_VERSION
        from moeloom.runtime.launch import c_compiler
    except ToolchainError as error:
        return [*found, ("triton", f"not usable: {error}")]
    compiler = c_compiler() or "none: kernels that Triton's cache does not have cannot be launched; install gcc"
    found.append(("triton", f"{'.'.join(map(str, TRITON_VERSION))}, C compiler: {compiler}"))
    if not torch.cuda.is_available():
        found.append(("hopper", "cannot run here: no GPU that torch can use"))
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        asked = Request(torch.device("cuda", index), torch.bfloat16, 64, 64, 1, 1, 1, False)
        reason = hopper.why_unsupported(asked)
        found.append((f"hopper on GPU {index}", "can run" if reason is None else f"cannot run: {reason}"))
    return found


def _distributed() -> str:
    import torch.distributed as dist

    if not dist.is_available():
        return "not in this torch build; expert parallelism is not possible"
    found = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    return ", ".join(found) + ("" if "gloo" in found else "; expert parallelism needs gloo")


def _gpus() -> None:
    count = torch.cuda.device_count()
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        _line(
            f"GPU {index}",
            f"{facts.name}, compute capability {facts.major}.{facts.minor}, {facts.total_memory / 2**30:.0f} GiB",
        )
    if count > 1:
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        missing = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
        _line("peer access", "between all GPUs" if not missing else f"missing: {', '.join(missing)}")


def _handshake() -> bool:
    """Let the CTAs of each GPU hand memory to each other; False if data came late, wrong, or not at all."""
    if not torch.cuda.is_available():
        _line("handshake", "not run: no GPU that torch can use")
        return True
    try:
        from moeloom.kernels.handshake import check
    except ToolchainError as error:
        _line("handshake", f"not run: {error}")
        return True
    good = True
    for index in range(torch.cuda.device_count()):
        if torch.cuda.get_device_capability(index) < (9, 0):
            _line(f"handshake {index}", "not run: bulk copies need compute capability 9.0")
            continue
        try:
            found = check(torch.device("cuda", index))
        except Exception as error:  # whatever stops it is what the reader wants to know
            _line(f"handshake {index}", f"FAILED: {type(error).__name__}: {error}")
            good = False
            continue
        right = not (found.wrong or found.gave_up)
        verdict = "all numbers right" if right else f"{found.wrong} WRONG, {found.gave_up} waits without end"
        _line(f"handshake {index}", f"{found.elements} numbers between CTAs: {verdict}")
        good = good and right
    return good


def _same_bits() -> bool:
    """Check on this CPU what the layer's promise rests on: a row's bits do not depend on the rows around it."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(300, 1000, generator=draw), torch.randn(1000, 96, generator=draw)
    ids, w = torch.randint(0, 4, (300, 2), generator=draw), torch.rand(300, 2, generator=draw)
    up, down = torch.randn(4, 64, 1000, generator=draw), torch.randn(4, 1000, 32, generator=draw)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in {1, threads}:
            torch.set_num_threads(count)
            pieces = [rows_matmul(part, weight) for part in x.split([1, 6, 93, 200])]
            results.append((torch.cat(pieces), moe(x, ids, w, up, down)))
            results.append((rows_matmul(x, weight), moe(x, ids, w, up, down)))
    finally:
        torch.set_num_threads(threads)
    return all(torch.equal(a, results[0][0]) and torch.equal(b, results[0][1]) for a, b in results)
