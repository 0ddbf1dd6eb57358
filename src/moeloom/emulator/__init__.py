"""Runs Gluon kernels on the CPU, from the very source that the GPU runs, and finds races and deadlocks.

No compiler, no GPU: every partition of every CTA of every rank becomes a coroutine under a seeded scheduler; bulk
copies and tensor core operations stay pending and take effect when the scheduler says; vector clocks report each pair
of conflicting accesses that nothing orders, whatever the schedule of that run was. See ``docs/emulator.md``.

Imports nothing of the project but :mod:`moeloom.compat`; needs ``triton`` (as a library of names), ``numpy``, ``torch``
and ``greenlet``.
"""

from moeloom.emulator.alarms import KINDS, Alarm, Deadlock, Fault, Finding, NotEmulated, Race
from moeloom.emulator.machine import Emulator
from moeloom.emulator.sweep import SweepReport, emulate, sweep

__all__ = [
    "KINDS",
    "Alarm",
    "Deadlock",
    "Emulator",
    "Fault",
    "Finding",
    "NotEmulated",
    "Race",
    "SweepReport",
    "emulate",
    "sweep",
]
