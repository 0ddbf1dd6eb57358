"""Options of a layer call, and the sizes that follow from them. A leaf: plain Python, imports no torch.

Words: a *row* is a place in the routed buffer of the rank that owns an expert (each route becomes one row). Rows are
cut into *row blocks* of 128 rows of one expert; a *minibatch* is a run of row blocks processed together; the *ring* is
the fixed-size buffer that rows pass through, one filling of it is a *lap*; the first *saved rows* keep their
pre-activations for backward, the others are computed again.

Example: 3 experts with 130, 0 and 5 rows take 2 + 0 + 1 row blocks, that is rows 0..383 of the routed buffer, of which
135 are live. With ``minibatch_rows=128, ring_rows=256`` they pass in 3 minibatches and 2 laps.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeloom.errors import ArgumentError, complain

#: Rows of one expert that form one unit of GEMM tiles. A tail block holds fewer live rows.
ROW_BLOCK = 128

BACKENDS = ("auto", "reference", "torch", "hopper")


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b`` rounded up, for integers ``a >= 0`` and ``b > 0``."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``a``."""
    return ceil_div(a, multiple) * multiple


def capacity_rows(num_routes: int, num_local_experts: int) -> int:
    """Rows that are enough for any routing: all ``num_routes`` routes of the EP group on one rank, however split.

    Each expert wastes less than one row block, so ``128 * (ceil(routes / 128) + experts)`` rows always suffice.
    """
    return ROW_BLOCK * (ceil_div(num_routes, ROW_BLOCK) + num_local_experts)


@dataclass(frozen=True)
class MoEConfig:
    """Options of the MoE layer. None of them changes the bits of a result, except ``backend``.

    Attributes:
        backend: ``"reference"``, ``"torch"``, ``"hopper"`` or ``"auto"``, which takes ``"hopper"`` where it can run
            (compute capability 9.0, bf16), ``"torch"`` on other CUDA devices and for other calls, ``"reference"``
            elsewhere, and says once which and why. The same on all ranks.
        minibatch_rows: rows of a minibatch, a multiple of 128. Default 4096; by the hopper backend about as many as
            fill the device with gate/up tiles once, at least 1024.
        ring_rows: rows of the ring, a multiple of ``minibatch_rows`` and at least two of them. Default two.
        saved_rows: rows that keep their pre-activations (gate and up) for backward, a multiple of 128; 0 saves none.
            Default: 1.25 times the mean rows of a rank, padding included. The torch backend saves all rows or none:
            none if this is given and smaller than the number of routes of the EP group. It has all rows in memory
            at the same time, so the two sizes above have no effect there.
        num_sms: SMs that the hopper backend takes, to leave room for other kernels. Default: all.
        max_tokens_per_rank: refuse a call with more tokens than this on a rank. Default: no limit.
        timeout_s: seconds that a wait for another rank may last; 0 waits for ever. Default: 60 s on entry, where
            peers may still be loading, and 30 s in flight. A value given here holds for every wait.
        entry_timeout_s: overrides ``timeout_s`` for the wait on entry.
        checked: also check that ids lie in [-1, num_experts) and that router weights are finite, before work starts.
            On a GPU this waits for the device.

    Raises:
        ArgumentError: a value breaks its rule.
    """

    backend: str = "auto"
    minibatch_rows: int | None = None
    ring_rows: int | None = None
    saved_rows: int | None = None
    num_sms: int | None = None
    max_tokens_per_rank: int | None = None
    timeout_s: float | None = None
    entry_timeout_s: float | None = None
    checked: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ArgumentError(
                complain("backend", f"be one of {', '.join(BACKENDS)}", repr(self.backend), "Fix the name.")
            )
        if self.minibatch_rows is not None:
            _check_rows("minibatch_rows", self.minibatch_rows, ROW_BLOCK, ROW_BLOCK)
        if self.ring_rows is not None:
            minibatch = self.resolved_minibatch_rows
            _check_rows("ring_rows", self.ring_rows, minibatch, 2 * minibatch)
        if self.saved_rows is not None:
            _check_rows("saved_rows", self.saved_rows, ROW_BLOCK, 0)
        for name in ("num_sms", "max_tokens_per_rank"):
            if getattr(self, name) is not None:
                _check_rows(name, getattr(self, name), 1, 1)
        for name in ("timeout_s", "entry_timeout_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and 0 <= value < float("inf")):
                raise ArgumentError(
                    complain(name, "be a number of seconds >= 0", repr(value), "Use 0 to wait for ever.")
                )

    @property
    def resolved_minibatch_rows(self) -> int:
        """Rows of a minibatch: as given, or 4096."""
        return self.minibatch_rows if self.minibatch_rows is not None else 4096

    @property
    def resolved_ring_rows(self) -> int:
        """Rows of the ring: as given, or two minibatches."""
        return self.ring_rows if self.ring_rows is not None else 2 * self.resolved_minibatch_rows

    def resolved_saved_rows(self, num_routes: int, num_ranks: int, num_local_experts: int) -> int:
        """Rows that keep their pre-activations.

        Args:
            num_routes: routes of the whole EP group in this call.
            num_ranks: ranks of the EP group.
            num_local_experts: experts of this rank; each is expected to waste half a row block.
        """
        if self.saved_rows is not None:
            return self.saved_rows
        mean = ceil_div(num_routes, num_ranks) + num_local_experts * ROW_BLOCK // 2
        return round_up(ceil_div(5 * mean, 4), ROW_BLOCK)

    def wait_seconds(self, *, entry: bool) -> float:
        """Deadline of one wait for another rank, in seconds; 0 means none."""
        if entry and self.entry_timeout_s is not None:
            return self.entry_timeout_s
        if self.timeout_s is not None:
            return self.timeout_s
        return 60.0 if entry else 30.0


def _check_rows(name: str, value: object, multiple: int, least: int) -> None:
    legal = isinstance(value, int) and not isinstance(value, bool) and value >= least and value % multiple == 0
    if not legal:
        rule = f"be an integer >= {least}" + (f" and a multiple of {multiple}" if multiple > 1 else "")
        near = max(least, round_up(value, multiple)) if isinstance(value, int) and value >= 0 else least
        raise ArgumentError(complain(name, rule, repr(value), f"Try {near}."))
