"""moeloom: a mixture-of-experts layer of a training step, same bits every time, on any machine.

Start with :class:`MoE` (a module), or :func:`moe` (a function of tensors). Importing moeloom touches no GPU.
"""

from moeloom.config import MoEConfig
from moeloom.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailable,
    CheckpointError,
    DataError,
    MoeloomError,
    NonFiniteLoss,
    PeerLost,
    PeerMismatch,
)
from moeloom.functional import SharedExperts, moe
from moeloom.layer import MoE
from moeloom.router import Router, RouterConfig, Routing, load_balance_loss

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BackendUnavailable",
    "CheckpointError",
    "DataError",
    "MoE",
    "MoEConfig",
    "MoeloomError",
    "NonFiniteLoss",
    "PeerLost",
    "PeerMismatch",
    "Router",
    "RouterConfig",
    "Routing",
    "SharedExperts",
    "load_balance_loss",
    "moe",
]
