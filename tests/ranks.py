"""Run a function on several ranks, each a process with its own gloo group, and collect what they return."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "moeloom"])


@dataclass
class Outcome:
    """What became of one rank: its return value, or the error it raised, or the exit code it died with."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None
    seconds: float = 0.0


def run_ranks(function: Callable, world: int, *args: Any, seconds: float = 120) -> list[Outcome]:
    """Call ``function(rank, world, *args)`` on ``world`` ranks; kill whatever is left after ``seconds``.

    Values travel pickled; tensors are turned into numpy arrays by the caller. A rank that had to be killed by the
    deadline fails the test: nothing may hang.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            receive, send = _context.Pipe(duplex=False)
            process = _context.Process(target=_main, args=(send, folder, function, rank, world, args), daemon=True)
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        deadline = time.monotonic() + seconds
        outcomes, late = [], []
        for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
            outcome = Outcome()
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    outcome = pipe.recv()
                else:
                    late.append(rank)
            except EOFError:
                pass
            process.join(max(0.1, min(10.0, deadline - time.monotonic())))
            if process.is_alive():
                late.append(rank)
                process.kill()
                process.join()
            outcome.exitcode = process.exitcode
            outcomes.append(outcome)
    assert not late, f"ranks {sorted(set(late))} did not end within {seconds} s"
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """Return the values of all ranks; fail with the first rank's own traceback if one raised or died."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}:\n{outcome.trace}"
        assert outcome.exitcode == 0, f"rank {rank} ended with exit code {outcome.exitcode}"
    return [outcome.value for outcome in outcomes]


def _main(send, folder: str, function: Callable, rank: int, world: int, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    dist.barrier()  # A rank that ends early must not disturb others that are still connecting.
    outcome, started = Outcome(), time.monotonic()
    try:
        outcome.value = function(rank, world, *args)
    except BaseException as error:
        outcome.error, outcome.trace = error, traceback.format_exc()
    outcome.seconds = time.monotonic() - started
    try:
        send.send(outcome)
    except Exception:  # An exception that does not pickle still has its text.
        outcome.error = RuntimeError(repr(outcome.error))
        send.send(outcome)
    send.close()
    os._exit(0)  # A lost peer leaves transfers in flight, and their destructors would wait for it.
