"""How the forward kernel is cut: stages, buffers, warps. None of it changes the bits of a result."""

from __future__ import annotations

from dataclasses import dataclass

from moeloom.errors import ArgumentError, complain

#: Bytes of shared memory that one CTA can have on compute capability 9.0, and those that mbarriers, mail and the
#: compiler's own needs take of it.
_SHARED_BYTES, _SHARED_REST = 227 * 1024, 1536
_ROWS, _COLUMNS, _PART, _ELEMENT = 128, 256, 64, 2


@dataclass(frozen=True)
class Tuning:
    """Sizes of the kernel that are fixed when it is compiled.

    Attributes:
        depth: columns of a stage of operands, 32 or 64.
        stages: stages of operands.
        slots: output buffers of 128 x 64 between math and store warps.
        store_warps, dispatch_warps: at least 1 each, at most 3 together.
        piece: rows that dispatch warps take at a time.
        copy: elements that they have in flight, a power of two.
        registers: of a thread outside of the math warps, a multiple of 8.

    Raises:
        ArgumentError: a value breaks its rule, or all together take more shared memory or registers than there is.
    """

    depth: int = 64
    stages: int = 4
    slots: int = 2
    store_warps: int = 2
    dispatch_warps: int = 1
    piece: int = 4
    copy: int = 4096
    registers: int = 104

    def __post_init__(self) -> None:
        legal = {
            "depth": (32, 64),
            "stages": range(2, 17),
            "slots": range(2, 17),
            "store_warps": (1, 2),
            "dispatch_warps": (1, 3 - self.store_warps),
            "piece": (1, 2, 4, 8, 16, 32, 64, 128),
            "copy": (512, 1024, 2048, 4096, 8192),
            "registers": range(24, 169, 8),
        }
        for name, values in legal.items():
            if getattr(self, name) not in values:
                rule = f"be one of {', '.join(map(str, values))}"
                raise ArgumentError(complain(f"tuning.{name}", rule, getattr(self, name), "Keep the default."))
        if self.shared_bytes > _SHARED_BYTES:
            rule = f"fit {_SHARED_BYTES} bytes of shared memory"
            fix = "Take fewer stages or slots."
            raise ArgumentError(complain("tuning.stages and .slots", rule, f"{self.shared_bytes} bytes", fix))

    def copy_box(self, hidden: int) -> tuple[int, int]:
        """Return (rows, columns) that dispatch warps have in flight: of :attr:`copy` elements, so wide that whole
        chunks make up a row of ``hidden``."""
        least = 256 * self.dispatch_warps
        width = next((w for w in (4096, 2048, 1024, 512) if w <= self.copy and w >= least and not hidden % w), least)
        return min(self.copy // width, self.piece), width

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA, rounded up."""
        stages = self.stages * (_ROWS + _COLUMNS) * self.depth
        return (stages + self.slots * _ROWS * _PART) * _ELEMENT + _SHARED_REST


@dataclass(frozen=True)
class Parts:
    """Which parts of the work are done; leaving one out gives a wrong result, faster, for measurements."""

    dispatch: bool = True
    push: bool = True
    sums: bool = True


ALL = Parts()
