"""Bugs of every kind in the minimal kernels."""

from __future__ import annotations

from tests.emulator.plant import bug, without

#: Tasks by CTA number instead of by ticket.
BY_NUMBER = (
    (
        'ticket = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")\n    while',
        "ticket = gl.program_id(0)\n    while",
    ),
    (
        '        ticket = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")\n',
        "        ticket += gl.num_programs(0)\n",
    ),
)
#: The correct kernels end within these steps, which are single operations.
ENDLESS = {"switch": 1.0, "max_steps": 3_000}

MINIMAL = [
    # ---- bounds
    bug(
        "masked rows are read all the same",
        "bounds",
        "gather.move",
        ("num_cols + col[None, :], mask=live, other=0.0)", "num_cols + col[None, :], mask=(col < num_cols)[None, :])"),
    ),
    bug("the last block is not masked", "bounds", "cp_async.groups", ("src + where, mask=where < n)", "src + where)")),
    bug(
        "the buffer's number is not wrapped",
        "bounds",
        "copy.line",
        ("bufs.index(s))\n        # The", "bufs.index(j))\n        # The"),
    ),
    bug(
        "scattered one row too far",
        "bounds",
        "gather.move",
        ("gl.store(dst + target[:, None] * num_cols", "gl.store(dst + num_cols + target[:, None] * num_cols"),
    ),
    # ---- uninitialised
    bug(
        "all entries are summed, not only those that were written",
        "uninitialised",
        "gather.ragged",
        (
            "value = gl.load(values + row * MOST + at, mask=at < count, other=0.0)",
            "value = gl.load(values + row * MOST + at)",
        ),
    ),
    bug(
        "an empty buffer is stored",
        "uninitialised",
        "copy.boxes3",
        without("outbox.store((inbox.load(LAYOUT).to(gl.float32) + 1.0).to(gl.bfloat16))"),
    ),
    bug(
        "the operand of the last step is never loaded",
        "uninitialised",
        "gemm.shared",
        ("tma_load(b, [col, k * BK], full.index(s), b_bufs.index(s), pred=pred)", "pass"),
        ("(BM + BN) * BK * a.dtype", "BM * BK * a.dtype"),
    ),
    # ---- mbarrier
    bug(
        "a buffer's barrier is not initialised",
        "mbarrier",
        "pipeline.tiles",
        without("mbarrier.init(empty.index(i), 1)"),
    ),
    bug(
        "more arrivals than the barrier's count",
        "mbarrier",
        "pipeline.tiles",
        ("mbarrier.arrive(empty.index(place.index))", "mbarrier.arrive(empty.index(place.index), count=2)"),
    ),
    bug("more bytes come than are expected", "mbarrier", "copy.line", ("BLOCK * 2, pred=pred)", "BLOCK, pred=pred)")),
    bug(
        "the phase is a running number",
        "mbarrier",
        "ring.two_ctas",
        ("mbarrier.wait(full, i & 1)\n        until(used", "mbarrier.wait(full, i)\n        until(used"),
    ),
    bug(
        "places keep the phase of the first lap",
        "mbarrier",
        "pipeline.tiles",
        ("gl.where(last, self.phase ^ 1, self.phase)", "self.phase"),
        also=("deadlock", "unordered", "slot-reuse", "bulk-buffer"),
    ),
    # ---- before-wait
    bug(
        "one wgmma may be in flight when the result is used",
        "before-wait",
        "gemm.shared",
        ("acc = warpgroup_mma_wait(0, deps=(acc,))", "acc = warpgroup_mma_wait(1, deps=(acc,))"),
    ),
    bug(
        "the same, tile after tile",
        "before-wait",
        "persistent.all",
        ("acc = warpgroup_mma_wait(0, deps=(acc,))", "acc = warpgroup_mma_wait(1, deps=(acc,))"),
    ),
    # ---- exit
    bug(
        "the last bulk stores are not waited for",
        "exit",
        "copy.line",
        ("pred=j + 1 < count)\n    bulk_wait(0)", "pred=j + 1 < count)"),
    ),
    bug(
        "the copies of the last block are not waited for",
        "exit",
        "cp_async.groups",
        ("for j in range(count):", "for j in range(count - 1):"),
        without("cp_async_wait(0)"),
    ),
    bug("one step too many is loaded", "exit", "gemm.shared", ("pred=ahead < num_k)", "pred=ahead <= num_k)")),
    bug(
        "a box is stored and left",
        "exit",
        "copy.boxes2",
        without("store_box(dst, c0, c1, c2, c3, c4, outbox, AXES)\n    bulk_wait(0)"),
        ("pass", "store_box(dst, c0, c1, c2, c3, c4, outbox, AXES)"),
    ),
    # ---- assertion
    bug("a row number that is too large", "assertion", "gather.move", ("take[::5] = -1", "take[::5] = self.rows")),
    bug("no tiles along N", "assertion", "gemm.shared", ("tiles_n=self.n // 64", "tiles_n=self.n // 256")),
    # ---- deadlock
    bug(
        "the loader waits for the wrong phase",
        "deadlock",
        "specialised.gemm",
        ("((step // STAGES) & 1) ^ 1)", "(step // STAGES) & 1)"),
    ),
    bug(
        "more bytes are expected than come", "deadlock", "copy.line", ("BLOCK * 2, pred=pred)", "BLOCK * 4, pred=pred)")
    ),
    bug(
        "the token is not passed on",
        "deadlock",
        "turnstile.turnstile",
        ("gl.atomic_add(turn, 1,", "gl.atomic_add(turn, 0,"),
    ),
    bug(
        "the lock is not given back",
        "deadlock",
        "turnstile.lock",
        ("gl.atomic_xchg(lock, 0,", "gl.atomic_xchg(lock, 1,"),
    ),
    bug(
        "the ring has one slot less than the producer counts on",
        "deadlock",
        "ring.two_ctas",
        (
            ('until(used, i - SLOTS + 1)\n        fence_acq_rel("gpu")\n        thread_barrier()\n        fence'),
            ('until(used, i + 1)\n        fence_acq_rel("gpu")\n        thread_barrier()\n        fence'),
        ),
    ),
    bug(
        "the turn is not handed over",
        "deadlock",
        "ping_pong.gemm",
        without("mbarrier.arrive(may_write.index(1 - WHO))"),
    ),
    bug(
        "tasks are taken from the end",
        "deadlock",
        "tickets.all",
        ("return ticket\n", "return num_tasks - 1 - ticket\n"),
    ),
    bug(
        "a rank is counted too much",
        "deadlock",
        "ranks.launch_each",
        ("epoch * RANKS * CTAS", "epoch * RANKS * CTAS + 1"),
    ),
    bug(
        "the deadline is not looked at",
        "deadlock",
        "polling.late",
        ("while (seen < 1) & (partition_timer() < end):", "while seen < 1:"),
    ),
    # ---- residency
    bug("producer and consumer do not fit together", "residency", "ring.two_ctas", options={"resident": 1}),
    bug("tasks belong to CTAs, one of which fits", "residency", "tickets.one", *BY_NUMBER),
    bug("tasks belong to CTAs, and a foreign kernel holds SMs", "residency", "tickets.held", *BY_NUMBER),
    bug("the CTAs of a rank do not fit together", "residency", "ranks.launch_each", options={"resident": 1}),
    # ---- livelock
    bug(
        "looking at the turn changes it",
        "livelock",
        "turnstile.turnstile",
        ("gl.atomic_add(turn, 0,", "gl.atomic_add(turn, 2,"),
        options=ENDLESS,
    ),
    bug(
        "the same ticket again and again",
        "livelock",
        "tickets.one",
        ("        ticket = gl.atomic_add(counter, 1, sem", "        ticket = gl.atomic_add(counter, 0, sem"),
        options=ENDLESS,
    ),
    # ---- release
    bug(
        "the token is passed without release",
        "release",
        "turnstile.turnstile",
        ('gl.atomic_add(turn, 1, sem="release"', 'gl.atomic_add(turn, 1, sem="relaxed"'),
    ),
    bug(
        "the lock is given back without release",
        "release",
        "turnstile.lock",
        ('gl.atomic_xchg(lock, 0, sem="release"', 'gl.atomic_xchg(lock, 0, sem="relaxed"'),
    ),
    bug("the flag is set without release", "release", "polling.arrives", ('sem="release"', 'sem="relaxed"')),
    bug("peers are told without release", "release", "ranks.launch_all", ('sem="release"', 'sem="relaxed"')),
    # ---- acquire
    bug(
        "the token is taken without acquire",
        "acquire",
        "turnstile.turnstile",
        ('gl.atomic_add(turn, 0, sem="acquire"', 'gl.atomic_add(turn, 0, sem="relaxed"'),
    ),
    bug(
        "the lock is taken without acquire",
        "acquire",
        "turnstile.lock",
        ('gl.atomic_cas(lock, 0, 1, sem="acquire"', 'gl.atomic_cas(lock, 0, 1, sem="relaxed"'),
    ),
    bug("relaxed polling without a fence", "acquire", "polling.arrives", without('fence_acq_rel("gpu")')),
    bug("peers are heard without acquire", "acquire", "ranks.launch_each", ('sem="acquire"', 'sem="relaxed"')),
    # ---- barrier
    bug(
        "the token is passed before all have written",
        "barrier",
        "turnstile.turnstile",
        (("% 1009)\n    # One thread releases what all threads have stored.\n    thread_barrier()"), "% 1009)"),
    ),
    bug(
        "the lock is given back before all have written",
        "barrier",
        "turnstile.lock",
        ("thread_barrier()\n    gl.atomic_xchg", "gl.atomic_xchg"),
    ),
    bug(
        "the flag is set before all have written", "barrier", "polling.arrives", ("* 2)\n    thread_barrier()", "* 2)")
    ),
    bug("peers are told before all have written", "barrier", "ranks.launch_each", without("thread_barrier()")),
    bug(
        "ordinary stores are published before all have written",
        "barrier",
        "ring.two_proxies",
        ("value)\n        thread_barrier()", "value)"),
    ),
    bug(
        "all warps read what one thread has acquired",
        "barrier",
        "polling.arrives",
        without(
            "# The fence orders the polling thread alone; the others follow it through the barrier.\n    thread_barrier()"
        ),
    ),
    bug(
        "all warps write where one thread has acquired",
        "barrier",
        "ring.two_proxies",
        ('fence_acq_rel("gpu")\n        thread_barrier()\n        gl.store', 'fence_acq_rel("gpu")\n        gl.store'),
    ),
    # ---- proxy-fence
    bug("registers to a bulk store", "proxy-fence", "copy.boxes2", without("fence_async_shared()")),
    bug("the result of a GEMM to a bulk store", "proxy-fence", "gemm.shared", without("fence_async_shared()")),
    bug("a result ring between partitions", "proxy-fence", "specialised.gemm", without("fence_async_shared()")),
    bug(
        "ordinary stores are read by bulk loads",
        "proxy-fence",
        "ring.two_proxies",
        ("fence_proxy_async()\n        mbarrier.expect(full, ROWS", "mbarrier.expect(full, ROWS"),
    ),
    # ---- scope
    bug(
        "peers are told at gpu scope",
        "scope",
        "ranks.launch_each",
        ('sem="release", scope="sys"', 'sem="release", scope="gpu"'),
    ),
    bug(
        "peers are heard at gpu scope",
        "scope",
        "ranks.launch_all",
        ('sem="acquire", scope="sys"', 'sem="acquire", scope="gpu"'),
    ),
    bug(
        "the token is passed at cta scope",
        "scope",
        "turnstile.turnstile",
        ('gl.atomic_add(turn, 1, sem="release", scope="gpu"', 'gl.atomic_add(turn, 1, sem="release", scope="cta"'),
    ),
    bug(
        "the fence after polling is of cta scope",
        "scope",
        "polling.arrives",
        ('fence_acq_rel("gpu")', 'fence_acq_rel("cta")'),
    ),
    # ---- bulk-wait
    bug(
        "published when the buffer was read",
        "bulk-wait",
        "ring.two_ctas",
        ("bulk_wait_writes(0)\n        fence", "bulk_wait(0)\n        fence"),
    ),
    bug(
        "the same between partitions of a CTA",
        "bulk-wait",
        "ring.one_cta",
        ("bulk_wait_writes(0)\n        fence", "bulk_wait(0)\n        fence"),
    ),
    bug(
        "the newest store may be in flight",
        "bulk-wait",
        "ring.two_ctas",
        (
            (
                "bulk_wait_writes(0)\n"
                "        fence_proxy_async()\n"
                "        thread_barrier()\n"
                '        gl.atomic_add(made, 1, sem="release", scope="gpu")'
            ),
            (
                "bulk_wait_writes(1)\n"
                "        fence_proxy_async()\n"
                "        thread_barrier()\n"
                '        gl.atomic_add(made, 1, sem="release", scope="gpu")\n'
                "        bulk_wait(0)"
            ),
        ),
    ),
    # ---- publish-order
    bug(
        "barrier after release",
        "publish-order",
        "polling.arrives",
        (
            ('thread_barrier()\n    gl.atomic_add(flag, 1, sem="release", scope="gpu")'),
            ('gl.atomic_add(flag, 1, sem="release", scope="gpu")\n    thread_barrier()'),
        ),
    ),
    bug(
        "barrier after release, in turns",
        "publish-order",
        "turnstile.turnstile",
        (
            ('thread_barrier()\n    gl.atomic_add(turn, 1, sem="release", scope="gpu")'),
            ('gl.atomic_add(turn, 1, sem="release", scope="gpu")\n    thread_barrier()'),
        ),
    ),
    bug(
        "completion awaited after release",
        "publish-order",
        "ring.two_ctas",
        (
            (
                "bulk_wait_writes(0)\n"
                "        fence_proxy_async()\n"
                "        thread_barrier()\n"
                '        gl.atomic_add(made, 1, sem="release", scope="gpu")'
            ),
            (
                "thread_barrier()\n"
                '        gl.atomic_add(made, 1, sem="release", scope="gpu")\n'
                "        bulk_wait_writes(0)\n"
                "        fence_proxy_async()"
            ),
        ),
    ),
    bug(
        "barrier after release, read by bulk loads",
        "publish-order",
        "ring.two_proxies",
        (
            (
                "thread_barrier()\n"
                '        gl.atomic_add(made, 1, sem="release", scope="gpu")\n'
                "\n"
                "\n"
                "@gluon.jit\n"
                "def consume"
            ),
            (
                'gl.atomic_add(made, 1, sem="release", scope="gpu")\n'
                "        thread_barrier()\n"
                "\n"
                "\n"
                "@gluon.jit\n"
                "def consume"
            ),
        ),
    ),
    # ---- slot-reuse
    bug(
        "a stage is freed while it is multiplied",
        "slot-reuse",
        "specialised.gemm",
        (
            "mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)",
            "mbarrier.arrive(empty.index(step % STAGES))",
        ),
        (("deps=(acc,))\n        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))"), "deps=(acc,))"),
    ),
    bug(
        "the loader does not wait for a free stage",
        "slot-reuse",
        "ping_pong.gemm",
        without("mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)"),
        also=("unordered", "deadlock", "mbarrier"),
    ),
    bug(
        "a buffer is freed before it is read",
        "slot-reuse",
        "cp_async.gather",
        (
            ("value = bufs.index(s).load(layout)\n        mbarrier.arrive(empty.index(s))"),
            ("mbarrier.arrive(empty.index(s))\n        value = bufs.index(s).load(layout)"),
        ),
    ),
    bug(
        "the ring has no back-pressure",
        "slot-reuse",
        "ring.two_ctas",
        (
            ('until(used, i - SLOTS + 1)\n        fence_acq_rel("gpu")\n        thread_barrier()\n        fence'),
            "fence",
        ),
    ),
    bug(
        "a slot is freed while it is loaded",
        "slot-reuse",
        "ring.two_proxies",
        (
            (
                "mbarrier.wait(full, i & 1)\n"
                "        thread_barrier()\n"
                '        gl.atomic_add(used, 1, sem="release", scope="gpu")'
            ),
            (
                "thread_barrier()\n"
                '        gl.atomic_add(used, 1, sem="release", scope="gpu")\n'
                "        mbarrier.wait(full, i & 1)"
            ),
        ),
    ),
    bug(
        "one stage is loaded too early",
        "slot-reuse",
        "gemm.shared",
        ("ahead = k + STAGES - 1", "ahead = k + STAGES"),
        ("for i in gl.static_range(STAGES - 1):", "for i in gl.static_range(STAGES):"),
    ),
    # ---- bulk-buffer
    bug("loaded again while it is stored", "bulk-buffer", "copy.line", without("bulk_wait(STAGES - 1)")),
    bug(
        "the next tile's result comes too early",
        "bulk-buffer",
        "persistent.all",
        ("bulk_wait(0)\n        c_buf", "c_buf"),
    ),
    bug(
        "the result buffer is handed over while it is stored",
        "bulk-buffer",
        "ping_pong.gemm",
        (
            ("bulk_wait(0)\n        mbarrier.arrive(may_write.index(1 - WHO))"),
            ("mbarrier.arrive(may_write.index(1 - WHO))\n        bulk_wait(0)"),
        ),
    ),
    bug(
        "a result buffer is freed while it is stored",
        "bulk-buffer",
        "specialised.gemm",
        (
            ("bulk_wait(0)\n        mbarrier.arrive(c_empty.index(turn % 2))"),
            ("mbarrier.arrive(c_empty.index(turn % 2))\n        bulk_wait(0)"),
        ),
    ),
    bug("waits for one store too few", "bulk-buffer", "copy.line", ("bulk_wait(STAGES - 1)", "bulk_wait(STAGES)")),
    # ---- unordered
    bug("a stream does not wait for the other", "unordered", "streams.two", without('emu.wait_stream("one", "two")')),
    bug(
        "the stream waits, but not the other way round",
        "unordered",
        "streams.two",
        without('emu.wait_stream("two", "one")'),
        also=("slot-reuse",),
    ),
    bug(
        "nobody waits for its turn",
        "unordered",
        "turnstile.turnstile",
        without('while gl.atomic_add(turn, 0, sem="acquire", scope="gpu") != ticket:\n        pass'),
    ),
    bug(
        "a buffer is stored before it is loaded",
        "unordered",
        "copy.line",
        without("mbarrier.wait(full.index(s), (j // STAGES) & 1)"),
        also=("uninitialised",),
    ),
    bug(
        "one group of copies may be in flight",
        "unordered",
        "cp_async.groups",
        ("cp_async_wait(STAGES - 1)", "cp_async_wait(STAGES)"),
        also=("uninitialised",),
    ),
    bug(
        "copies are not committed",
        "unordered",
        "cp_async.groups",
        ("mask=where < n)\n        cp_async_commit()", "mask=where < n)"),
        also=("uninitialised", "exit"),
    ),
    bug(
        "counted without atomics",
        "unordered",
        "atomics.bins",
        (
            'gl.atomic_add(counts + bin, one, mask=live, sem="relaxed", scope="gpu")',
            "gl.store(counts + bin, gl.load(counts + bin, mask=live) + one, mask=live)",
        ),
    ),
    bug(
        "the flag is not waited for",
        "unordered",
        "polling.arrives",
        (('seen = gl.atomic_add(flag, 0, sem="relaxed", scope="gpu")\n    while'), "seen = 1\n    while"),
    ),
]
