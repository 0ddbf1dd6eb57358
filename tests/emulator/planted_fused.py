"""Bugs."""

from __future__ import annotations

from tests.emulator.plant import bug, without

LAYER = "fused_forward.two_ranks"
IMPORTS = ("    mbarrier,\n    tma_load,", "    fence_proxy_async,\n    mbarrier,\n    thread_barrier,\n    tma_load,")

FUSED = [
    bug(
        "one piece of the row block is enough",
        "unordered",
        LAYER,
        ("await_(x_ready + block, BM // PIECE,", "await_(x_ready + block, 1,"),
        also=("uninitialised", "slot-reuse"),
    ),
    bug(
        "hidden rows are not awaited",
        "uninitialised",
        LAYER,
        ('await_(h_ready + block, F // HALF, 0, 0, "gpu", True)', 'await_(h_ready + block, 0, 0, 0, "gpu", True)'),
        also=("unordered", "slot-reuse"),
    ),
    bug(
        "a counter target that is never reached",
        "deadlock",
        LAYER,
        ("await_(x_ready + block, BM // PIECE,", "await_(x_ready + block, BM // PIECE + 1,"),
    ),
    bug(
        "the math warps wait for the wrong phase",
        "uninitialised",
        LAYER,
        (
            "mbarrier.wait(full.index(s), (step // STAGES) & 1)",
            "mbarrier.wait(full.index(s), ((step // STAGES) & 1) ^ 1)",
        ),
        also=("unordered", "deadlock", "mbarrier"),
    ),
    bug(
        "the store warps wait for the wrong phase",
        "deadlock",
        LAYER,
        ("mbarrier.wait(t_full.index(turn % 2), (turn // 2) & 1)", "mbarrier.wait(t_full.index(turn % 2), 0)"),
        also=("mbarrier", "slot-reuse", "unordered"),
    ),
    bug(
        "a stage is freed while it is multiplied",
        "slot-reuse",
        LAYER,
        (
            "mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)",
            "mbarrier.arrive(empty.index(step % STAGES))",
        ),
        (("deps=(acc,))\n    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))"), "deps=(acc,))"),
    ),
    bug(
        "the loader does not wait for a free stage",
        "mbarrier",
        LAYER,
        (
            (
                "mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)\n"
                "        mbarrier.expect(full.index(s), (BM + BN) * BK * 2)\n"
                "        tma_load(ring"
            ),
            ("mbarrier.expect(full.index(s), (BM + BN) * BK * 2)\n        tma_load(ring"),
        ),
        also=("slot-reuse", "unordered"),
    ),
    bug(
        "sums come before the tiles that they wait for",
        "deadlock",
        LAYER,
        (
            "return tasks + [SUM.value << 28 | tile << 12 for tile in range(token_tiles)]",
            "return [SUM.value << 28 | tile << 12 for tile in range(token_tiles)] + tasks",
        ),
    ),
    bug(
        "the down tiles come too late for the ring",
        "residency",
        "fused_forward.one_cta_each",
        ("range(len(groups) + 1)", "range(len(groups) + 3)"),
        ("if i >= 1:", "if i >= 3:"),
        ("for b in groups[i - 1]", "for b in groups[i - 3]"),
    ),
    bug(
        "pulled rows are loaded without a proxy fence",
        "proxy-fence",
        LAYER,
        (
            'await_(x_ready + block, BM // PIECE, 0, 0, "gpu", True)',
            'await_(x_ready + block, BM // PIECE, 0, 0, "gpu", False)',
        ),
    ),
    bug("results are stored without a proxy fence", "proxy-fence", LAYER, without("fence_async_shared()")),
    bug(
        "rows are published before all warps have pulled",
        "barrier",
        LAYER,
        ('publish(x_ready + block, 1, "gpu", False)', 'gl.atomic_add(x_ready + block, 1, sem="release", scope="gpu")'),
    ),
    bug(
        "the barrier stands after the release",
        "publish-order",
        LAYER,
        IMPORTS,
        (
            'publish(x_ready + block, 1, "gpu", False)',
            ('gl.atomic_add(x_ready + block, 1, sem="release", scope="gpu")\n        thread_barrier()'),
        ),
    ),
    bug(
        "rows are published without release",
        "release",
        LAYER,
        IMPORTS,
        (
            'publish(x_ready + block, 1, "gpu", False)',
            ('thread_barrier()\n        gl.atomic_add(x_ready + block, 1, sem="relaxed", scope="gpu")'),
        ),
    ),
    bug(
        "rows are awaited without acquire",
        "acquire",
        LAYER,
        IMPORTS,
        (
            'await_(x_ready + block, BM // PIECE, 0, 0, "gpu", True)',
            (
                'while gl.atomic_add(x_ready + block, 0, sem="relaxed", scope="gpu") < BM // PIECE:\n'
                "                pass\n"
                "            thread_barrier()\n"
                "            fence_proxy_async()"
            ),
        ),
    ),
    bug(
        "hidden rows are published when their buffer was read",
        "bulk-wait",
        LAYER,
        ('publish(h_ready + block, 1, "gpu", True)', 'publish(h_ready + block, 1, "gpu", False)'),
        also=("uninitialised",),
    ),
    bug(
        "fewer bytes are expected than come",
        "mbarrier",
        LAYER,
        ("(BM + BN) * BK * 2)\n        tma_load(hidden", "BN * BK * 2)\n        tma_load(hidden"),
    ),
    bug(
        "more bytes are expected than come",
        "deadlock",
        LAYER,
        ("(BM + BN) * BK * 2)\n        tma_load(ring", "(BM + BN) * BK * 4)\n        tma_load(ring"),
    ),
    bug(
        "rows of the next block are looked up",
        "bounds",
        LAYER,
        ("gl.load(row_source + block * BM + row)", "gl.load(row_source + (block + 1) * BM + row)"),
    ),
    bug(
        "padding rows are pushed",
        "unordered",
        LAYER,
        ("value, mask=(source >= 0)[:, None] & (col >= 0)[None, :])", "value)"),
        also=("assertion",),
    ),
    bug("peers are told at gpu scope", "scope", LAYER, ('1, "sys", False)', '1, "gpu", False)')),
    bug(
        "peers are heard at gpu scope",
        "scope",
        LAYER,
        ('tiles_of_all, 0, 0, "sys", False)', 'tiles_of_all, 0, 0, "gpu", False)'),
    ),
    bug(
        "the ring of tokens has no back-pressure",
        "slot-reuse",
        LAYER,
        ("if block >= RING:\n            await_(h_ready", "if block < 0:\n            await_(h_ready"),
    ),
    bug(
        "the ring of hidden rows has no back-pressure",
        "slot-reuse",
        LAYER,
        ("if block >= RING:\n                await_(d_done", "if block < 0:\n                await_(d_done"),
    ),
    bug(
        "a hidden tile's buffer is freed while it is stored",
        "bulk-buffer",
        LAYER,
        (
            "bulk_wait(0)\n    mbarrier.arrive(c_empty.index(out % 2))",
            "mbarrier.arrive(c_empty.index(out % 2))\n    bulk_wait(0)",
        ),
    ),
    bug(
        "a result buffer is freed before it is read",
        "slot-reuse",
        LAYER,
        (
            ("value = c_bufs.index(out % 2).load(layout)\n    mbarrier.arrive(c_empty.index(out % 2))"),
            ("mbarrier.arrive(c_empty.index(out % 2))\n    value = c_bufs.index(out % 2).load(layout)"),
        ),
    ),
    bug(
        "the result is used before the last wgmma is done",
        "before-wait",
        LAYER,
        ("acc = warpgroup_mma_wait(0, deps=(acc,))", "acc = warpgroup_mma_wait(1, deps=(acc,))"),
        also=("slot-reuse",),
    ),
    bug(
        "one reader of the task is forgotten",
        "deadlock",
        LAYER,
        ("mbarrier.init(t_empty.index(i), 2)", "mbarrier.init(t_empty.index(i), 1)"),
        also=("unordered", "mbarrier", "slot-reuse"),
    ),
    bug(
        "sums do not wait for the ranks",
        "uninitialised",
        LAYER,
        without('await_(arrived, tiles_of_all, 0, 0, "sys", False)'),
        also=("unordered", "slot-reuse"),
    ),
]
