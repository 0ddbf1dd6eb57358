"""The reference backend, which is the specification: plain torch, any device, ring laps and all.

It walks the same schedule, minibatches and row blocks that a kernel walks, and adds in the same order.
"""

from moeloom.backends.reference.backward import backward
from moeloom.backends.reference.forward import forward

__all__ = ["backward", "forward"]
