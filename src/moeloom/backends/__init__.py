"""Backends, and the choice among them."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

from moeloom.backends import reference

_log = logging.getLogger("moeloom")


def choose(name: str, device_type: str) -> ModuleType:
    """Return the backend module for ``MoEConfig.backend`` on a device type such as ``"cpu"`` or ``"cuda"``."""
    if name == "auto":
        name, why = automatic(device_type)
        _announce(name, why)
    return {"reference": reference}[name]


def automatic(device_type: str) -> tuple[str, str]:
    """Return (backend, reason) that ``backend="auto"`` takes on a device type."""
    return "reference", f"it is the only backend of this version; device type '{device_type}'"


@functools.cache
def _announce(name: str, why: str) -> None:
    """Say once a process which backend was taken."""
    _log.info("backend auto: taking '%s' (%s)", name, why)
