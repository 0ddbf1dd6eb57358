"""The machine that runs now, for the language's functions; kernels call them without naming it."""

from __future__ import annotations

_machine = None

#: Source files of kernels: frames of these files are what reports show.
KERNEL_FILES: set[str] = set()


def machine():
    """Return the running machine."""
    if _machine is None:
        raise RuntimeError("a kernel function of the emulator was called outside a run")
    return _machine


def set_machine(value) -> None:
    """Set (or, with None, unset) the running machine."""
    global _machine
    _machine = value


def point(effect: bool = True):
    """A place where the scheduler may switch; returns the running agent."""
    return _machine.point(effect)
