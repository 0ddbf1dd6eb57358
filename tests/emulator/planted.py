"""All planted bugs: at least two of every kind on minimal kernels, and a list of them on the fused forward."""

from __future__ import annotations

from tests.emulator.planted_fused import FUSED
from tests.emulator.planted_minimal import MINIMAL

PLANTS = [*MINIMAL, *FUSED]

__all__ = ["FUSED", "MINIMAL", "PLANTS"]
