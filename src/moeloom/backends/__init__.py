"""Backends, and the choice among them."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

from moeloom.backends import reference
from moeloom.backends import torch as torch_backend
from moeloom.config import BACKENDS

_log = logging.getLogger("moeloom")
_MODULES = {"reference": reference, "torch": torch_backend}


def choose(name: str, device_type: str) -> ModuleType:
    """Return the backend module for ``MoEConfig.backend`` on a device type such as ``"cpu"`` or ``"cuda"``."""
    if name == "auto":
        name, why = automatic(device_type)
        _announce(name, why)
    return _MODULES[name]


def automatic(device_type: str) -> tuple[str, str]:
    """Return (backend, reason) that ``backend="auto"`` takes on a device type."""
    if device_type == "cuda":
        return "torch", "grouped GEMMs, the fastest of this version on a GPU"
    return "reference", f"it is the specification, with equal bits on any number of ranks; device type '{device_type}'"


def number(backend: ModuleType) -> int:
    """Return the number that stands for a backend when ranks compare their calls."""
    return next(BACKENDS.index(name) for name, module in _MODULES.items() if module is backend)


@functools.cache
def _announce(name: str, why: str) -> None:
    """Say once a process which backend was taken."""
    _log.info("backend auto: taking '%s' (%s)", name, why)
