"""Where the emulator says that the hardware would misbehave, the PTX of the planted kernel shows it.

A witness is a way through the planted kernel that the correct one does not have: say, from a store to a release with no
barrier on it. `docs/emulator-witness.md` explains them; run this file with ``-rP`` to see the instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("triton", reason="kernels are compiled by triton")

from moeloom.compat import TRITON_VERSION
from tests.emulator import harness
from tests.emulator.planted import PLANTS
from tests.emulator.ptx import occurs, path
from tests.emulator.test_correct import CASES

pytestmark = pytest.mark.slow

#: Shared memory that a Hopper CTA can have.
MOST_SHARED_BYTES = 227 * 1024
KINDS = ("barrier", "release", "acquire", "proxy-fence", "bulk-wait", "scope", "publish-order", "bulk-buffer")
#: The first Triton versions that put a barrier before a release by themselves, and a proxy fence before a bulk store.
BARRIERS, PROXY_FENCES = (3, 9), (3, 7)


@dataclass(frozen=True)
class Witness:
    """What the PTX of a planted kernel shows.

    Attributes:
        kind, plant, case: of the bug.
        first, last: a way leads from one to the other...
        absent: ...on which none of these is. Without `last`, `first` occurs at all.
        until: Triton version from which on the compiler repairs the bug.
    """

    kind: str
    plant: str
    case: str
    first: str
    last: str | None = None
    absent: tuple[str, ...] = ()
    until: tuple[int, int] | None = None

    def look(self, ptx: str) -> list[str] | None:
        """Return the instructions that show it, or None."""
        if self.last is None:
            return occurs(ptx, self.first)[:1] or None
        return path(ptx, self.first, self.last, self.absent)


LAYER = "fused_forward.two_ranks"
FENCES, WAITS = ("proxy-fence-shared", "proxy-fence"), ("bulk-wait-read", "bulk-wait")
WITNESSES = [
    Witness(
        "barrier",
        "the token is passed before all have written",
        "turnstile.turnstile",
        "store",
        "release.gpu",
        ("barrier",),
        BARRIERS,
    ),
    Witness(
        "barrier",
        "ordinary stores are published before all have written",
        "ring.two_proxies",
        "store",
        "release.gpu",
        ("barrier",),
        BARRIERS,
    ),
    Witness(
        "barrier", "all warps read what one thread has acquired", "polling.arrives", "fence.gpu", "load", ("barrier",)
    ),
    Witness(
        "barrier",
        "rows are published before all warps have pulled",
        LAYER,
        "store",
        "release.gpu",
        ("barrier",),
        BARRIERS,
    ),
    Witness(
        "release",
        "the token is passed without release",
        "turnstile.turnstile",
        "store",
        "relaxed.gpu",
        ("release.gpu",),
    ),
    Witness("release", "peers are told without release", "ranks.launch_all", "relaxed.sys"),
    Witness(
        "acquire",
        "the token is taken without acquire",
        "turnstile.turnstile",
        "relaxed.gpu",
        "store",
        ("acquire.gpu", "fence.gpu"),
    ),
    Witness("acquire", "relaxed polling without a fence", "polling.arrives", "relaxed.gpu", "load", ("fence.gpu",)),
    Witness("acquire", "rows are awaited without acquire", LAYER, "relaxed.gpu", "bulk-load", ("fence.gpu", "load")),
    Witness(
        "proxy-fence", "registers to a bulk store", "copy.boxes2", "store-shared", "bulk-store", FENCES, PROXY_FENCES
    ),
    Witness(
        "proxy-fence",
        "a result ring between partitions",
        "specialised.gemm",
        "store-matrix",
        "arrive",
        (*FENCES, "wait"),
    ),
    Witness(
        "proxy-fence",
        "ordinary stores are read by bulk loads",
        "ring.two_proxies",
        "fence.gpu",
        "bulk-load",
        ("proxy-fence", "store"),
    ),
    Witness(
        "proxy-fence", "pulled rows are loaded without a proxy fence", LAYER, "fence.gpu", "bulk-load", ("proxy-fence",)
    ),
    Witness(
        "bulk-wait",
        "published when the buffer was read",
        "ring.two_ctas",
        "bulk-store",
        "release.gpu",
        ("bulk-wait", "fence.gpu"),
    ),
    Witness(
        "bulk-wait",
        "hidden rows are published when their buffer was read",
        LAYER,
        "bulk-store",
        "release.gpu",
        ("bulk-wait",),
    ),
    Witness("scope", "peers are told at gpu scope", "ranks.launch_each", "release.gpu"),
    Witness("scope", "peers are heard at gpu scope", "ranks.launch_all", "acquire.gpu"),
    Witness("scope", "the fence after polling is of cta scope", "polling.arrives", "fence.cta"),
    Witness(
        "publish-order", "barrier after release", "polling.arrives", "store", "release.gpu", ("barrier",), BARRIERS
    ),
    Witness(
        "publish-order",
        "completion awaited after release",
        "ring.two_ctas",
        "bulk-store",
        "release.gpu",
        ("bulk-wait", "fence.gpu"),
    ),
    Witness("bulk-buffer", "loaded again while it is stored", "copy.line", "bulk-store", "bulk-load", WAITS),
    Witness(
        "bulk-buffer", "a result buffer is freed while it is stored", "specialised.gemm", "bulk-store", "arrive", WAITS
    ),
]


def test_every_kind_has_two_witnesses():
    assert {kind: n for kind in KINDS if (n := sum(w.kind == kind for w in WITNESSES)) < 2} == {}


@pytest.mark.parametrize("witness", WITNESSES, ids=lambda w: f"{w.kind}: {w.plant}")
def test_the_ptx_shows_the_bug(witness):
    (plant,) = (p for p in PLANTS if (p.name, p.case) == (witness.plant, witness.case))
    assert plant.kind == witness.kind
    shown = witness.look(harness.ptx_of(plant.case, plant.edits))
    print("\n".join(shown or ["(not there)"]))
    assert witness.look(harness.ptx_of(plant.case)) is None
    repaired = witness.until is not None and witness.until <= TRITON_VERSION
    assert (shown is None) == repaired


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_real_ones(case):
    """They compile for Hopper, fit its shared memory, and multiply with its tensor cores."""
    for launch in harness.launches_of(harness.case(case)):
        kernel = harness.compiled(launch)
        assert kernel.metadata.shared <= MOST_SHARED_BYTES
        multiplies = any(name in case for name in ("gemm", "persistent", "fused"))
        assert ("wgmma.mma_async" in kernel.asm["ptx"]) == multiplies
