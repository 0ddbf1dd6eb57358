"""Backends, and the choice among them."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

from moeloom.backends import hopper, reference
from moeloom.backends import torch as torch_backend
from moeloom.backends.call import Request
from moeloom.config import BACKENDS
from moeloom.errors import ArgumentError, complain

_log = logging.getLogger("moeloom")
_MODULES = {"reference": reference, "torch": torch_backend, "hopper": hopper}


def choose(name: str, device_type: str, request: Request | None = None) -> ModuleType:
    """Return the backend module for ``MoEConfig.backend``.

    Args:
        name: as in the options.
        device_type: such as ``"cpu"`` or ``"cuda"``.
        request: the call, or None if nothing is known of it.

    Raises:
        ArgumentError: the backend was asked for by name and cannot run this call.
    """
    if name == "auto":
        name, why = automatic(device_type, request)
        _announce(name, why)
    elif name == "hopper" and request is not None:
        reason = hopper.why_unsupported(request)
        if reason:
            fix = "Use backend='auto' or 'torch'."
            raise ArgumentError(complain("backend", "be able to run this call", f"'hopper': {reason}", fix))
    return _MODULES[name]


def automatic(device_type: str, request: Request | None = None) -> tuple[str, str]:
    """Return (backend, reason) that ``backend="auto"`` takes on a device type, for one call if it is given."""
    if device_type == "cuda":
        if request is None:
            return "torch", "grouped GEMMs; 'hopper' instead for calls that it can run"
        reason = hopper.why_unsupported(request)
        if reason is None:
            return "hopper", "one fused kernel for compute capability 9.0"
        return "torch", f"grouped GEMMs; not 'hopper', because {reason}"
    return "reference", f"it is the specification, with equal bits on any number of ranks; device type '{device_type}'"


def number(backend: ModuleType) -> int:
    """Return the number that stands for a backend when ranks compare their calls."""
    return next(BACKENDS.index(name) for name, module in _MODULES.items() if module is backend)


@functools.cache
def _announce(name: str, why: str) -> None:
    """Say once a process which backend was taken."""
    _log.info("backend auto: taking '%s' (%s)", name, why)
