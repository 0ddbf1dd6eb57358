"""The floor: how fast this layer can be on this machine, from what it must compute and what it must move. A leaf.

Two rates are measured in the same run, the best dense GEMM and the copy bandwidth; everything else is counting:

- *compute*: the products, with the rows of every expert rounded up to 128 in forward and in the data gradients (a GEMM
  tile is 128 rows) and to 64 in the weight gradients (whose contraction runs over rows, in steps of 64);
- *weights*: every weight of an expert that has rows, read once a direction;
- *rows*: tokens and output gradients read once, pre-activations written in forward and read in backward, the result
  row of every route written to its place;
- *gradients*: every weight gradient written once;
- *sums*: the result rows of a token read again, added, and written. Nothing can hide this: it waits for the last row.

``floor = max(compute, weights + rows + gradients) + sums``: a layer may do its memory work under its products, but not
under the last sum. Between ranks nothing is added for the link, so over several GPUs the floor is a lower bound that a
machine with a slow link does not come near.

Example: one expert with 130 rows, H = I = 1024, bf16, no shared expert, forward, 600 TFLOP/s: compute is
``6 * 256 * 1024 * 1024 / 600e12`` s, of which the part for 126 rows of padding is shown as padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeloom.bench.models import ModelShape

#: Rows that a GEMM tile has, in forward and in data gradients.
TILE_ROWS = 128
#: Rows that one step of a weight gradient's contraction has.
STEP_ROWS = 64


@dataclass(frozen=True)
class Work:
    """What one rank has to do in one call.

    Attributes:
        shape: the layer.
        pass_: ``"fwd"``, ``"bwd"`` or ``"fwd+bwd"``.
        tokens: tokens of this rank.
        rows_per_expert: rows of each expert of this rank.
        shared: whether there is a shared expert.
        bytes_per_element: of activations and weights.
        bytes_per_gradient: of weight gradients.
    """

    shape: ModelShape
    pass_: str
    tokens: int
    rows_per_expert: Sequence[int]
    shared: bool = False
    bytes_per_element: int = 2
    bytes_per_gradient: int = 2


@dataclass(frozen=True)
class Floor:
    """The terms of a floor, in milliseconds, and the operations and bytes that they come from."""

    compute_ms: float
    padding_ms: float
    weights_ms: float
    rows_ms: float
    gradients_ms: float
    sums_ms: float
    flops: int
    bytes: int

    @property
    def ms(self) -> float:
        """The floor itself."""
        return max(self.compute_ms, self.weights_ms + self.rows_ms + self.gradients_ms) + self.sums_ms

    def terms(self) -> dict[str, float]:
        """All terms by name, for a record."""
        return dict(vars(self))


def floor(work: Work, *, gemm_tflops: float, copy_gb_per_s: float) -> Floor:
    """Count the work of one rank and divide by the measured rates.

    Args:
        work: what is to be done.
        gemm_tflops: best dense GEMM of the run, TFLOP/s.
        copy_gb_per_s: bytes read plus bytes written by a large copy, GB/s.
    """
    forward, backward = work.pass_ != "bwd", work.pass_ != "fwd"
    flops = _flops(work, forward, backward, TILE_ROWS, STEP_ROWS)
    useful = _flops(work, forward, backward, 1, 1)
    per_ms = gemm_tflops * 1e9
    moved = _bytes(work, forward, backward)
    bytes_per_ms = copy_gb_per_s * 1e6
    return Floor(
        compute_ms=flops / per_ms,
        padding_ms=(flops - useful) / per_ms,
        weights_ms=moved["weights"] / bytes_per_ms,
        rows_ms=moved["rows"] / bytes_per_ms,
        gradients_ms=moved["gradients"] / bytes_per_ms,
        sums_ms=moved["sums"] / bytes_per_ms,
        flops=flops,
        bytes=sum(moved.values()),
    )


def _flops(work: Work, forward: bool, backward: bool, tile: int, step: int) -> int:
    """Operations with rows rounded up to ``tile`` (forward, data gradients) and ``step`` (weight gradients)."""
    widths = [(rows, work.shape.inner) for rows in work.rows_per_expert]
    widths += [(work.tokens, work.shape.shared)] if work.shared else []
    total = 0
    for rows, inner in widths:
        in_tiles, in_steps = -(-rows // tile) * tile, -(-rows // step) * step
        # Forward, data gradients and weight gradients are three products of this size each.
        total += 6 * work.shape.hidden * inner * (in_tiles * (forward + backward) + in_steps * backward)
    return total


def _bytes(work: Work, forward: bool, backward: bool) -> dict[str, int]:
    """Bytes that must pass through the device's memory, by term."""
    shape, size = work.shape, work.bytes_per_element
    directions = forward + backward
    rows = sum(work.rows_per_expert)
    live = sum(r > 0 for r in work.rows_per_expert)
    width = live * shape.inner + (shape.shared if work.shared else 0)
    # Pre-activations: gate and up of every row, and of every token for the shared expert.
    saved = 2 * (rows * shape.inner + (work.tokens * shape.shared if work.shared else 0)) * size
    tokens, results = work.tokens * shape.hidden * size, rows * shape.hidden * size
    # Backward reads x again, and the gradient of the output.
    read = tokens * (forward + 2 * backward)
    return {
        "weights": 3 * shape.hidden * width * size * directions,
        "rows": read + (saved + results) * directions,
        "gradients": 3 * shape.hidden * width * work.bytes_per_gradient * backward,
        "sums": (results + tokens) * directions,
    }
