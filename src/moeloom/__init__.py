"""moeloom: a mixture-of-experts layer of a training step, same bits every time, on any machine.

Start with :class:`MoE` (a module), or :func:`moe` (a function of tensors). Importing moeloom is quick and touches no
GPU: torch is imported when the first name is used.
"""

from __future__ import annotations

import importlib

from moeloom.version import __version__

_NAMES = {
    "moeloom.config": ["MoEConfig"],
    "moeloom.errors": [
        "ArgumentError",
        "ArgumentTypeError",
        "CheckpointError",
        "DataError",
        "MoeloomError",
        "NonFiniteLoss",
        "PeerLost",
        "PeerMismatch",
    ],
    "moeloom.functional": ["SharedExperts", "moe"],
    "moeloom.gradients": ["clip_gradients", "expert_parameters", "sync_gradients"],
    "moeloom.layer": ["MoE"],
    "moeloom.router": ["Router", "RouterConfig", "Routing", "load_balance_loss"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> object:
    """Import the module that holds a public name when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'moeloom' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
