"""Small kernels that release memory rightly and wrongly, for the tests of ``moeloom compile``."""

from __future__ import annotations

from moeloom.compat import (
    alloc_mbarriers,
    bulk_wait,
    bulk_wait_writes,
    fence_acq_rel,
    fence_async_shared,
    fence_proxy_async,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma_load,
    tma_store,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from moeloom.compile.targets import Descriptor, KernelSpec


@gluon.jit
def _store(data):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    gl.store(data + gl.arange(0, 1024, layout), gl.full([1024], 1, gl.int32, layout))


@gluon.jit
def plain(data, flag, HOW: gl.constexpr):
    """Ordinary stores, then a release."""
    if HOW == "loop":
        # The barrier stands in front of the stores: right in the first turn, wrong from the second on.
        for _ in range(3):
            thread_barrier()
            _store(data)
        gl.atomic_add(flag, 1, sem="release", scope="gpu")
    elif HOW == "branch":
        _store(data)
        if gl.load(data) > 0:
            thread_barrier()
        gl.atomic_add(flag, 1, sem="release", scope="gpu")
    elif HOW == "fence":
        _store(data)
        fence_acq_rel("gpu")
        gl.atomic_add(flag, 1, sem="relaxed", scope="gpu")
    elif HOW == "fence and barrier":
        _store(data)
        thread_barrier()
        fence_acq_rel("gpu")
        gl.atomic_add(flag, 1, sem="relaxed", scope="gpu")
    else:
        _store(data)
        if HOW == "barrier":
            thread_barrier()
        gl.atomic_add(flag, 1, sem="release", scope="gpu")


@gluon.jit
def bulk(desc, flag, HOW: gl.constexpr):
    """A bulk store, then a release."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    buffer = gl.allocate_shared_memory(gl.int32, [128, 32], desc.layout)
    buffer.store(gl.full([128, 32], 1, gl.int32, layout))
    fence_async_shared()
    thread_barrier()
    tma_store(desc, [0, 0], buffer)
    if HOW == "read":
        bulk_wait(0)
    elif HOW == "pending":
        bulk_wait_writes(1)
    elif HOW != "no wait":
        bulk_wait_writes(0)
    if HOW == "late fence":
        thread_barrier()
        fence_proxy_async()
    else:
        if HOW != "no fence":
            fence_proxy_async()
        thread_barrier()
    gl.atomic_add(flag, 1, sem="release", scope="gpu")
    if HOW == "read" or HOW == "no wait" or HOW == "pending":
        bulk_wait(0)


@gluon.jit
def fetch(desc, flag, out, HOW: gl.constexpr):
    """An acquire, then a bulk load."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    buffer = gl.allocate_shared_memory(gl.int32, [128, 32], desc.layout)
    full = alloc_mbarriers(1)
    mbarrier.init(full.index(0), 1)
    fence_async_shared()
    thread_barrier()
    if HOW == "no barrier" or HOW == "relaxed":
        seen = gl.atomic_add(flag, 0, sem="relaxed", scope="gpu")
        fence_acq_rel("gpu")
        if HOW == "relaxed":
            thread_barrier()
    else:
        seen = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    if HOW != "unused":
        gl.store(out + 1, seen)
    thread_barrier()
    if HOW != "no fence":
        fence_proxy_async()
    mbarrier.expect(full.index(0), 128 * 32 * 4)
    tma_load(desc, [0, 0], full.index(0), buffer)
    mbarrier.wait(full.index(0), 0)
    gl.store(out, gl.sum(gl.sum(buffer.load(layout), 1), 0))


@gluon.jit
def _role(data, flag, BARRIER: gl.constexpr):
    _store(data)
    if BARRIER:
        thread_barrier()
    gl.atomic_add(flag, 1, sem="release", scope="sys")


@gluon.jit
def roles(data, flag, BARRIERS: gl.constexpr):
    """Three partitions of 4, 1 and 4 warps; one letter for each says whether it has its barrier."""
    warp_specialize(
        [
            (_role, (data, flag, BARRIERS[0] == "b")),
            (_role, (data + 1024, flag, BARRIERS[1] == "b")),
            (_role, (data + 2048, flag, BARRIERS[2] == "b")),
        ],
        [1, 4],
        [64, 64],
    )


@gluon.jit
def _fill(data, buffer, full):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    buffer.store(gl.load(data + gl.arange(0, 1024, layout)))
    mbarrier.arrive(full.index(0))


@gluon.jit
def _drain(out, buffer, full):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(full.index(0), 0)
    gl.store(out + gl.arange(0, 1024, layout), buffer.load(layout))


@gluon.jit
def arrive(data, out):
    """One partition fills shared memory for another."""
    buffer = gl.allocate_shared_memory(gl.int32, [1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = alloc_mbarriers(1)
    mbarrier.init(full.index(0), 1)
    thread_barrier()
    warp_specialize([(_fill, (data, buffer, full)), (_drain, (out, buffer, full))], [4], [64])


@gluon.jit
def product(a_desc, b_desc, out):
    """One product on tensor cores."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], a_desc.layout)
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 64], b_desc.layout)
    full = alloc_mbarriers(1)
    mbarrier.init(full.index(0), 1)
    fence_async_shared()
    thread_barrier()
    mbarrier.expect(full.index(0), 2 * 64 * 64 * 2)
    tma_load(a_desc, [0, 0], full.index(0), a)
    tma_load(b_desc, [0, 0], full.index(0), b)
    mbarrier.wait(full.index(0), 0)
    acc = warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, layout), is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(out + rows[:, None] * 64 + columns[None, :], acc)


@gluon.jit
def heavy(data, COUNT: gl.constexpr):
    """Holds more numbers than registers."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = data + gl.arange(0, COUNT, layout)
    x = gl.load(at)
    thread_barrier()
    gl.store(at, x * gl.load(at + COUNT) + x)


_PLAIN = {"data": "*i32:16", "flag": "*i32:16"}
_BLOCK = Descriptor("i32", (128, 32))
_HOPPER = dict(architectures=("90a",))


def _variants(kernel: object, signature: dict, names: tuple[str, ...], parameter: str = "HOW") -> list[KernelSpec]:
    return [KernelSpec(f"{kernel.__name__}/{n}", kernel, signature, {parameter: n}, **_HOPPER) for n in names]


_FETCH = {"desc": _BLOCK, "flag": "*i32:16", "out": "*i32:16"}
_BULK = {"desc": _BLOCK, "flag": "*i32:16"}
GOOD = [
    *_variants(plain, _PLAIN, ("barrier", "fence and barrier")),
    *_variants(bulk, _BULK, ("right",)),
    *_variants(fetch, _FETCH, ("acquire", "relaxed")),
    *_variants(roles, _PLAIN, ("bbb",), "BARRIERS"),
]
BAD = [
    *_variants(plain, _PLAIN, ("none", "loop", "branch", "fence")),
    *_variants(bulk, _BULK, ("no wait", "read", "pending", "no fence", "late fence")),
    *_variants(fetch, _FETCH, ("no fence", "no barrier")),
    *_variants(roles, _PLAIN, ("-bb", "b-b", "bb-"), "BARRIERS"),
]
#: What docs/compile.md shows of them.
WITNESSES = [
    *_variants(plain, _PLAIN, ("none",)),
    *_variants(bulk, _BULK, ("read",)),
    *_variants(fetch, _FETCH, ("unused", "relaxed", "no fence")),
    KernelSpec("arrive", arrive, {"data": "*i32:16", "out": "*i32:16"}, **_HOPPER),
]
_MATRICES = {"a_desc": Descriptor("bf16", (64, 64)), "b_desc": Descriptor("bf16", (64, 64)), "out": "*fp32:16"}
GATES = [
    KernelSpec("product/right", product, _MATRICES, tensor_core="HGMMA", **_HOPPER),
    KernelSpec("product/other", product, _MATRICES, tensor_core="QGMMA", **_HOPPER),
    KernelSpec("heavy/spills", heavy, {"data": "*fp32:16"}, {"COUNT": 1 << 15}, maxnreg=64, **_HOPPER),
    KernelSpec("heavy/fits", heavy, {"data": "*fp32:16"}, {"COUNT": 1 << 10}, maxnreg=64, **_HOPPER),
    KernelSpec("heavy/unknown", heavy, {"data": "*fp32:16"}, {"COUNT": 100}, **_HOPPER),
    KernelSpec("heavy/misnamed", heavy, {"date": "*fp32:16"}, {"COUNT": 1 << 10}, **_HOPPER),
    KernelSpec("bulk/pending allowed", bulk, _BULK, {"HOW": "pending"}, pending_bulk_groups=1, **_HOPPER),
]
