"""Several launches: one after another on a stream, side by side on two, and joined by waiting for a stream."""

import torch

from moeloom.compat import gl, gluon
from tests.emulator.harness import Case, blank, guarded, normal, rng


@gluon.jit
def scale(x, y, factor, n, BLOCK: gl.constexpr):
    """y = factor * x, fp32[n]."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    gl.store(y + at, gl.load(x + at, mask=at < n, other=0.0) * factor, mask=at < n)


@gluon.jit
def subtract_mirrored(a, b, out, n, BLOCK: gl.constexpr):
    """out[i] = a[i] - b[n - 1 - i], fp32[n]: reads what another CTA of the launch before wrote."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    first = gl.load(a + at, mask=at < n, other=0.0)
    gl.store(out + at, first - gl.load(b + (n - 1 - at), mask=at < n, other=0.0), mask=at < n)


class Streams(Case):
    """a = 2 x and b = 4 x, then out = a - mirrored b; then x is overwritten and a filled with zeros."""

    n = 300

    def inputs(self):
        return {"x": normal(rng(), self.n, dtype=torch.float32)}

    def tensors(self):
        return guarded(self.inputs()["x"]), *(guarded(blank(self.n, dtype=torch.float32)) for _ in range(3))

    def expected(self):
        x = self.inputs()["x"]
        return {"out": 2 * x - (4 * x).flip(0), "x": 8 * x, "a": torch.zeros_like(x)}


class OneStream(Streams):
    """All launches on one stream."""

    def build(self, emu):
        x, a, b, out = self.tensors()
        sizes = dict(n=self.n, BLOCK=128)
        emu.launch(scale, 3, dict(x=x, y=a, factor=2.0) | sizes)
        emu.launch(scale, 3, dict(x=a, y=b, factor=2.0) | sizes)
        emu.launch(subtract_mirrored, 3, dict(a=a, b=b, out=out) | sizes)
        emu.launch(scale, 3, dict(x=b, y=x, factor=2.0) | sizes)
        emu.fill(a, 0)
        return {"out": out, "x": x, "a": a}


class TwoStreams(Streams):
    """b is computed on a second stream, which later waits for the first."""

    def build(self, emu):
        x, a, b, out = self.tensors()
        sizes = dict(n=self.n, BLOCK=128)
        emu.launch(scale, 3, dict(x=x, y=a, factor=2.0) | sizes, stream="one")
        emu.launch(scale, 3, dict(x=x, y=b, factor=4.0) | sizes, stream="two")
        emu.wait_stream("one", "two")
        emu.launch(subtract_mirrored, 3, dict(a=a, b=b, out=out) | sizes, stream="one")
        emu.wait_stream("two", "one")
        emu.launch(scale, 3, dict(x=b, y=x, factor=2.0) | sizes, stream="two")
        emu.fill(a, 0, stream="one")
        return {"out": out, "x": x, "a": a}


CASES = {"one": OneStream(), "two": TwoStreams()}
