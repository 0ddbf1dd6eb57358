"""Ranks: joining a group that torchrun made, or starting the processes of one here."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

from moeloom.errors import ArgumentError, complain

#: Set in processes that :func:`start_ranks` made; holds the launcher's process id.
PARENT = "MOELOOM_PARENT"
#: Seconds that the other ranks get to end by themselves (they notice a lost peer) before they are ended.
_GRACE_SECONDS = 45.0
_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 0.5


def world_size() -> int:
    """Ranks that the environment speaks of; 1 outside torchrun and outside :func:`start_ranks`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_group(ep: int | None) -> dist.ProcessGroup | None:
    """Join the ranks that the environment names and return the EP group, or None for a single process.

    Raises:
        ArgumentError: ``ep`` is not the number of ranks.
    """
    world = world_size()
    if ep not in (None, world):
        fix = f"Start torchrun with {ep} processes, or leave --ep out."
        raise ArgumentError(complain("--ep", f"be the number of ranks, {world}", ep, fix))
    if PARENT in os.environ:
        _end_with_parent(int(os.environ[PARENT]))
    if world == 1:
        return None
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=300))
    return dist.group.WORLD


def start_ranks(count: int, arguments: list[str]) -> int:
    """Run ``python -m moeloom ARGUMENTS`` as ``count`` ranks on this machine and wait for them.

    SIGINT and SIGTERM go to all ranks, which save and end. When one rank fails, the others get time to notice by
    themselves, then are ended: no process is left behind.

    Returns:
        0, or the exit code of the first rank that failed.
    """
    environment = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        PARENT: str(os.getpid()),
    }
    threads = max(1, (os.cpu_count() or 1) // count)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    command = [sys.executable, "-m", "moeloom", *arguments]
    ranks: list[subprocess.Popen] = []

    def pass_on(number: int, _frame: object) -> None:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(count):
            # A session of its own: a terminal's Ctrl-C reaches the launcher alone, which passes it on once.
            ranks.append(
                subprocess.Popen(
                    command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, start_new_session=True
                )
            )
        return _wait(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: list[subprocess.Popen]) -> int:
    """Return 0 when all ranks ended well, else the exit code of the one that failed first, once the others are gone."""
    cause, deadline = None, float("inf")
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        if cause is None and _cause(ranks) is not None:
            # The others notice within milliseconds, sometimes before the system has taken the first one's exit code.
            time.sleep(_SETTLE_SECONDS)
            cause, deadline = _report(ranks), time.monotonic() + _GRACE_SECONDS
        time.sleep(_POLL_SECONDS)
    cause = cause or _report(ranks)
    if any(process.poll() is None for process in ranks):
        print("ending the ranks that are left", file=sys.stderr, flush=True)
    if cause is None:
        return 0
    return 128 - cause[0] if cause[0] < 0 else cause[0]


def _cause(ranks: list[subprocess.Popen]) -> tuple[int, int] | None:
    """Return (exit code, rank) of a failed rank; one that a signal ended comes before those that only noticed it."""
    failures = [(process.poll(), rank) for rank, process in enumerate(ranks)]
    return min((f for f in failures if f[0]), default=None)


def _report(ranks: list[subprocess.Popen]) -> tuple[int, int] | None:
    """Say which rank failed and how, and return :func:`_cause`."""
    cause = _cause(ranks)
    if cause is not None:
        code, rank = cause
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        print(f"rank {rank} ended with {how}", file=sys.stderr, flush=True)
    return cause


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_with_parent(parent: int) -> None:
    """End this process soon after its launcher is gone, even in the middle of a wait."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
