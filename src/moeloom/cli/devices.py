"""Choosing the device of a command."""

from __future__ import annotations

import os

import torch

from moeloom.errors import ArgumentError, complain


def pick_device(name: str, rank: int | None = None) -> torch.device:
    """Return the device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Args:
        name: as given; ``auto`` is a GPU where there is one.
        rank: which GPU ``auto`` and ``cuda`` mean; None: LOCAL_RANK of the environment.

    Raises:
        ArgumentError: no such device here.
    """
    local = int(os.environ.get("LOCAL_RANK", "0")) if rank is None else rank
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError(
            complain("--device", "be auto, cpu, cuda or cuda:N", repr(name), "Fix the name.")
        ) from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ArgumentError(complain("--device", "be auto, cpu, cuda or cuda:N", repr(name), "Use cpu."))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # With fewer GPUs than ranks, ranks share: good for trying things out.
    index = device.index if device.index is not None else local % max(count, 1)
    if index >= count:
        raise ArgumentError(
            complain("--device", f"name one of the {count} CUDA devices here", repr(name), "Use --device cpu.")
        )
    return torch.device("cuda", index)
