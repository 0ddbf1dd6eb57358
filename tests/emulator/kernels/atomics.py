"""Atomics on tensors, masked or not, and places handed out by them."""

import torch

from moeloom.compat import gl, gluon
from tests.emulator.harness import Case, guarded, rng


@gluon.jit
def count_bins(bins, values, n, counts, sums, most, least, seen, parity, BLOCK: gl.constexpr):
    """For each element i < n of its CTA's block: counts[bin] += 1, sums[bin] += value, and max, min, or, xor likewise.

    bins, values int32[n]; sums fp32 (of whole numbers, so the order does not show), the other results int32.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    live = at < n
    bin = gl.load(bins + at, mask=live, other=0)
    value = gl.load(values + at, mask=live, other=0)
    one = gl.full([BLOCK], 1, gl.int32, layout)
    gl.atomic_add(counts + bin, one, mask=live, sem="relaxed", scope="gpu")
    gl.atomic_add(sums + bin, value.to(gl.float32), mask=live, sem="relaxed", scope="gpu")
    gl.atomic_max(most + bin, value, mask=live, sem="relaxed", scope="gpu")
    gl.atomic_min(least + bin, value, mask=live, sem="relaxed", scope="gpu")
    gl.atomic_or(seen + bin, one << (value & 15), mask=live, sem="relaxed", scope="gpu")
    gl.atomic_xor(parity + bin, value, mask=live, sem="relaxed", scope="gpu")


@gluon.jit
def compact(values, n, cursor, out, BLOCK: gl.constexpr):
    """Write the values >= 0 to out, each at a place of its own; cursor int32[1] starts at 0 and ends at their number."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    value = gl.load(values + at, mask=at < n, other=-1)
    live = value >= 0
    one = gl.full([BLOCK], 1, gl.int32, layout)
    place = gl.atomic_add(cursor + one * 0, one, mask=live, sem="relaxed", scope="gpu")
    gl.store(out + place, value, mask=live)


class Bins(Case):
    """700 elements on 3 CTAs into 16 bins."""

    n, bins = 700, 16

    def inputs(self):
        generator = rng()
        bins = torch.randint(0, self.bins, (self.n,), generator=generator, dtype=torch.int32)
        return {"bins": bins, "values": torch.randint(0, 1000, (self.n,), generator=generator, dtype=torch.int32)}

    def build(self, emu):
        given = {name: guarded(t) for name, t in self.inputs().items()}
        outputs = {
            name: guarded(torch.full((self.bins,), start, dtype=torch.float32 if name == "sums" else torch.int32))
            for name, start in (("counts", 0), ("sums", 0), ("most", 0), ("least", 1000), ("seen", 0), ("parity", 0))
        }
        emu.launch(count_bins, 3, given | outputs | dict(n=self.n, BLOCK=256))
        return outputs

    def expected(self):
        bins, values = (t.tolist() for t in self.inputs().values())
        rows = [[v for b, v in zip(bins, values, strict=True) if b == i] for i in range(self.bins)]
        seen, parity = [0] * self.bins, [0] * self.bins
        for b, v in zip(bins, values, strict=True):
            seen[b] |= 1 << (v & 15)
            parity[b] ^= v
        results = dict(counts=map(len, rows), most=map(max, rows), least=map(min, rows), seen=seen, parity=parity)
        exact = {name: torch.tensor(list(x), dtype=torch.int32) for name, x in results.items()}
        return exact | {"sums": torch.tensor([float(sum(r)) for r in rows])}


class Compact(Case):
    """Places depend on who comes first: only the set of what is written is promised."""

    n = 300
    same_bits = False

    def inputs(self):
        return {"values": torch.randint(-50, 50, (self.n,), generator=rng(), dtype=torch.int32)}

    def build(self, emu):
        values = guarded(self.inputs()["values"])
        cursor, out = guarded(torch.zeros(1, dtype=torch.int32)), guarded(torch.full((self.n,), -1, dtype=torch.int32))
        emu.launch(compact, 3, dict(values=values, n=self.n, cursor=cursor, out=out, BLOCK=128))
        return {"cursor": cursor, "out": out}

    def expected(self):
        values = self.inputs()["values"]
        live = values[values >= 0]
        return {"cursor": torch.tensor([len(live)], dtype=torch.int32), "out": live}

    def check(self, outputs):
        live = self.answer["out"]
        assert torch.equal(outputs["cursor"], self.answer["cursor"])
        assert torch.equal(outputs["out"][: len(live)].sort().values, live.sort().values)
        assert (outputs["out"][len(live) :] == -1).all()


CASES = {"bins": Bins(), "compact": Compact()}
