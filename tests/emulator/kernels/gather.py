"""Masked loads and stores through tables: rows gathered and scattered, absent ones skipped."""

import torch

from moeloom.compat import gl, gluon
from tests.emulator.harness import Case, blank, guarded, normal, rng


@gluon.jit
def move_rows(src, take, put, dst, num_rows, num_cols, ROWS: gl.constexpr, COLS: gl.constexpr):
    """dst[put[i]] = src[take[i]] where take[i] >= 0. Rows of num_cols <= COLS elements, ROWS of them a CTA."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    col = gl.arange(0, COLS, gl.SliceLayout(0, layout))
    inside = row < num_rows
    source = gl.load(take + row, mask=inside, other=-1)
    target = gl.load(put + row, mask=inside, other=-1)
    gl.device_assert(source < num_rows, "a row that src does not have")
    live = (source >= 0)[:, None] & (col < num_cols)[None, :]
    value = gl.load(src + source[:, None] * num_cols + col[None, :], mask=live, other=0.0)
    gl.store(dst + target[:, None] * num_cols + col[None, :], value, mask=live)


@gluon.jit
def fill_live(source, values, counts, MOST: gl.constexpr):
    """values[i] = source[i] in its first counts[i] entries. One CTA a row."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, MOST, layout)
    row = gl.program_id(0)
    mask = at < gl.load(counts + row)
    gl.store(values + row * MOST + at, gl.load(source + row * MOST + at, mask=mask), mask=mask)


@gluon.jit
def sum_live(values, counts, out, MOST: gl.constexpr):
    """out[i] = sum of the first counts[i] entries of values[i]; the others were never written. One CTA a row."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, MOST, layout)
    row = gl.program_id(0)
    count = gl.load(counts + row)
    value = gl.load(values + row * MOST + at, mask=at < count, other=0.0)
    gl.store(out + row, gl.sum(value, 0))


class Move(Case):
    """`move_rows` of 37 rows on 3 CTAs; the tables lie alone in memory."""

    rows, cols = 37, 48

    def inputs(self):
        take = torch.randperm(self.rows, generator=rng(1), dtype=torch.int32)
        put = torch.randperm(self.rows, generator=rng(2), dtype=torch.int32)
        take[::5] = -1
        return {"src": normal(rng(), self.rows, self.cols), "take": take, "put": put}

    def build(self, emu):
        given = {name: guarded(t) for name, t in self.inputs().items()}
        dst = guarded(torch.zeros(self.rows, self.cols, dtype=torch.bfloat16))
        emu.launch(move_rows, 3, given | dict(dst=dst, num_rows=self.rows, num_cols=self.cols, ROWS=16, COLS=64))
        return {"dst": dst}

    def expected(self):
        src, take, put = self.inputs().values()
        live = take >= 0
        dst = torch.zeros(self.rows, self.cols, dtype=torch.bfloat16)
        dst[put[live].long()] = src[take[live].long()]
        return {"dst": dst}


class Ragged(Case):
    """`sum_live` of memory whose unused part nobody wrote."""

    counts = (3, 0, 64, 17)

    def inputs(self):
        values = torch.randint(-9, 9, (len(self.counts), 64), generator=rng()).float()
        return {"values": values, "counts": torch.tensor(self.counts, dtype=torch.int32)}

    def build(self, emu):
        given = {name: guarded(t) for name, t in self.inputs().items()}
        rows = len(self.counts)
        values = guarded(blank(rows, 64, dtype=torch.float32))
        emu.register("values", values, written=False)
        emu.launch(fill_live, rows, given | dict(values=values, source=given["values"], MOST=64))
        out = guarded(blank(rows, dtype=torch.float32))
        emu.launch(sum_live, rows, dict(values=values, counts=given["counts"], out=out, MOST=64))
        return {"out": out}

    def expected(self):
        values, counts = self.inputs().values()
        live = torch.arange(64) < counts[:, None]
        return {"out": torch.where(live, values, 0).sum(1)}


CASES = {"move": Move(), "ragged": Ragged()}
