"""The torch backend: sort the routes, grouped GEMMs, ordered sum. For every device that torch knows.

On one rank with bf16 operands on a GPU of compute capability 9.x or 10.x nothing waits for the device and no shape
depends on the routing, so a call can be captured into a CUDA graph. Elsewhere (fp32, fp64, other GPUs, CPUs, sizes that
are no multiple of 8) a loop over experts does the GEMMs, and the host reads once where each expert's rows end. With
several ranks rows move by all-to-all, and the host reads how many.

All rows are in memory at the same time: ``ring_rows`` and ``minibatch_rows`` have no effect here. Pre-activations of
all rows are kept for backward, unless ``saved_rows`` is given and smaller than the number of routes of the EP group;
then all of them are computed again.

Determinism: equal bits for equal inputs, run after run, on one device with one number of threads, also when
pre-activations are computed again. Not over sizes of the EP group: a GEMM's tiles may depend on all rows of a rank.
"""

from moeloom.backends.torch.backward import backward
from moeloom.backends.torch.forward import forward

__all__ = ["backward", "forward"]
