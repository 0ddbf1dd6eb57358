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
    """Return 0 when all ranks ended well, else the first failure's exit code once the others are gone."""
    failed, deadline = 0, float("inf")
    while any(process.poll() is None for process in ranks):
        if not failed:
            codes = [(rank, p.poll()) for rank, p in enumerate(ranks) if p.poll() not in (None, 0)]
            if codes:
                # A rank that a signal ended is the cause; others may have noticed within the same poll.
                rank, failed = min(codes, key=lambda pair: pair[1])
                deadline = time.monotonic() + _GRACE_SECONDS
                how = f"signal {signal.Signals(-failed).name}" if failed < 0 else f"exit code {failed}"
                print(f"rank {rank} ended with {how}; waiting for the others to notice", file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            print("ending the ranks that are left", file=sys.stderr, flush=True)
            break
        time.sleep(_POLL_SECONDS)
    codes = [process.poll() for process in ranks]
    failed = failed or next((code for code in codes if code), 0)
    return 128 - failed if failed < 0 else failed


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
