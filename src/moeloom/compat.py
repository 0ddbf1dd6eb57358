"""Gluon under one name for each verb, whatever Triton from 3.6 to 3.9 calls it. The only module that imports Triton.

Every kernel, the emulator and ``moeloom compile`` take Triton from here and nowhere else; ``import moeloom`` does not
come here. Verbs are used inside ``@gluon.jit`` functions. What moved between the versions:

| here | what it was |
| --- | --- |
| ``tma_load``, ``tma_store`` | ``async_load``, ``async_store``; before 3.8 ``async_copy_global_to_shared``, ... |
| ``cp_async`` | ``async_copy.async_load``; before 3.8 ``async_copy.async_copy_global_to_shared`` |
| ``thread_barrier`` | ``gl.barrier``; before 3.7 ``gl.thread_barrier`` |
| ``bulk_wait_writes`` | ``store_wait(read_only=False)``; before 3.8 there was none, so inline PTX |
| ``aggregate`` | ``gluon.aggregate``; before 3.8 private |
| ``reinterpret`` | ``memory.reinterpret``; before 3.9 ``memory._reinterpret`` |
| ``GluonASTSource`` | ``gluon.GluonASTSource``; before 3.9 private |

A partition here means the warps that run one function of ``warp_specialize``, or the whole CTA outside of it. Each
verb made of inline PTX is executed by all threads of the partition, and is not pure: it is neither removed nor merged.

Raises:
    ToolchainError: Triton is absent, or none of the versions above.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from moeloom.errors import ToolchainError
from moeloom.toolchain import check_version

try:
    import triton
except ImportError as error:
    raise ToolchainError(
        "triton must be importable for moeloom's kernels; it is not in this Python. It comes with CUDA builds of "
        "PyTorch on Linux; on a machine without a GPU: pip install 'triton==3.6.0'. The reference needs no Triton."
    ) from error

#: Version of the Triton in use, for example ``(3, 6, 0)``.
TRITON_VERSION = check_version(triton.__version__)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia import ampere, hopper  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: E402
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402
from triton.runtime.jit import ConstexprFunction, JITFunction  # noqa: E402

_tma, _copies = hopper.tma, hopper.async_copy

if TRITON_VERSION >= (3, 9):
    GluonASTSource = gluon.GluonASTSource
else:
    from triton.experimental.gluon._runtime import GluonASTSource

if TRITON_VERSION >= (3, 8):
    aggregate = gluon.aggregate
    tma_load, tma_store, cp_async = _tma.async_load, _tma.async_store, _copies.async_load
else:
    from triton.language.core import _aggregate as aggregate

    tma_load, tma_store = _tma.async_copy_global_to_shared, _tma.async_copy_shared_to_global
    cp_async = _copies.async_copy_global_to_shared

# ---------------------------------------------------------------- what the host does


def prepared_launch(kernel: object, grid: tuple[int, int, int], device: int) -> tuple[Callable, Callable]:
    """Return ``(launch, expand)`` for a compiled kernel.

    ``launch(arguments)`` launches on the current stream of the device, which must be the current one: a flat list for
    the kernel's parameters in order, constants included, where pointers may be integers and every descriptor is
    replaced by the list that ``expand(n, descriptor)`` makes of the n-th one. By Triton's own path a descriptor is
    encoded anew in every launch, which is most of what a launch costs the host; where Triton's launcher is not built
    as in 3.6, that path is taken all the same.
    """
    found = _c_launcher(kernel.run)
    if found is None:
        launch = kernel[grid]
        return lambda arguments: launch(*arguments), lambda _, descriptor: [descriptor]
    function, metas = found
    own = kernel.function, kernel.run.launch_cooperative_grid, kernel.run.launch_pdl, None, None, kernel.packed_metadata
    runtime = triton.knobs.runtime

    def launch(arguments: list) -> None:
        stream = triton.runtime.driver.active.get_current_stream(device)
        hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
        # What a profiler's hooks are told.
        metadata = kernel.launch_metadata(grid, stream)
        function(*grid, stream, *own, metadata, *hooks, *arguments)

    def expand(number: int, descriptor: TensorDescriptor) -> list:
        return triton.backends.nvidia.driver.make_tensordesc_arg(descriptor, metas[number])

    return launch, expand


def _c_launcher(run: object) -> tuple[Callable, list] | None:
    """Return the C function that Triton 3.6 wraps, and how it wants each descriptor; None if it is not as expected."""
    if TRITON_VERSION[:2] != (3, 6):
        return None
    try:
        function, metas = run.launch, []
        if inspect.isfunction(function):
            inner = inspect.getclosurevars(function).nonlocals
            function, metas = inner["launcher"], inner["tensordesc_meta"]
        plain = inspect.isbuiltin(function) and not (run.global_scratch_size or run.profile_scratch_size)
    except (AttributeError, KeyError, TypeError):
        return None
    return (function, metas) if plain else None


# ---------------------------------------------------------------- verbs that are the language's own

#: ``thread_barrier()``: all threads of the partition meet, and see each other's earlier memory accesses.
thread_barrier = gl.barrier if TRITON_VERSION >= (3, 7) else gl.thread_barrier
#: ``warp_specialize([(function, args), ...], worker_num_warps, worker_num_regs)``; the first function gets the warps
#: of the launch, and returns nothing.
warp_specialize = gl.warp_specialize
make_tensor_descriptor = _tma.make_tensor_descriptor
cp_async_commit, cp_async_wait, cp_async_arrive = _copies.commit_group, _copies.wait_group, _copies.mbarrier_arrive
#: ``bulk_wait(n)``: until at most ``n`` groups of this partition's bulk stores still *read* their shared memory, which
#: may then be written again. Says nothing about the stores having arrived: see :func:`bulk_wait_writes`.
bulk_wait = _tma.store_wait


@gluon.jit
def alloc_mbarriers(count: gl.constexpr):
    """Allocate ``count`` mbarriers in shared memory; ``.index(i)`` is one of them. Each needs ``mbarrier.init``."""
    return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())


if TRITON_VERSION >= (3, 9):

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """Return the same shared memory under another dtype, shape and layout."""
        return memory.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """Return the same shared memory under another dtype, shape and layout."""
        return memory._reinterpret(dtype, shape, layout)


# ---------------------------------------------------------------- verbs in inline PTX

# The "memory" clobber keeps LLVM from moving its own loads and stores (shared memory) across.


@gluon.constexpr_function
def _then_zero(instruction):
    # Inline assembly must return something; this costs nothing, as nobody reads it.
    return instruction + "; mov.u32 $0, 0;"


@gluon.constexpr_function
def _one_of(scope):
    scope = getattr(scope, "value", scope)
    assert scope in ("cta", "gpu", "sys"), f"scope must be 'cta', 'gpu' or 'sys'; got {scope!r}. Fix the name."
    return scope


@gluon.constexpr_function
def _bulk_wait_group(n):
    return f"cp.async.bulk.wait_group {getattr(n, 'value', n)}"


@gluon.jit
def _run(ASM: gl.constexpr):
    PTX: gl.constexpr = _then_zero(ASM)
    gl.inline_asm_elementwise(PTX, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


if TRITON_VERSION >= (3, 8):

    @gluon.jit
    def bulk_wait_writes(n: gl.constexpr):
        """Wait until at most ``n`` groups of this partition's bulk stores are not wholly written to memory.

        ``cp.async.bulk.wait_group n``: orders the writes before what the *issuing* thread does next. The issuer is one
        elected thread, so other threads know of it only behind a ``thread_barrier``.
        """
        _tma.store_wait(n, read_only=False)

else:

    @gluon.jit
    def bulk_wait_writes(n: gl.constexpr):
        """Wait until at most ``n`` groups of this partition's bulk stores are not wholly written to memory.

        ``cp.async.bulk.wait_group n``: orders the writes before what the *issuing* thread does next. The issuer is one
        elected thread, so other threads know of it only behind a ``thread_barrier``.
        """
        # These versions have only the ``.read`` form as a verb. It comes second, at no cost, so that the compiler
        # knows that the shared memory is free again.
        WAIT: gl.constexpr = _bulk_wait_group(n)
        _run(WAIT)
        _tma.store_wait(n)


@gluon.jit
def fence_proxy_async():
    """``fence.proxy.async``: order earlier ordinary accesses before later bulk ones, and the other way round.

    All address spaces; of the calling threads only, so all threads call it. ``fence_async_shared`` is the weaker form
    for shared memory alone.
    """
    _run("fence.proxy.async")


@gluon.jit
def fence_acq_rel(SCOPE: gl.constexpr):
    """``fence.acq_rel``: what the calling thread read before has acquired; its writes after it release.

    Args:
        SCOPE: ``"cta"``, ``"gpu"`` or ``"sys"``: who may be on the other side.
    """
    PTX: gl.constexpr = "fence.acq_rel." + _one_of(SCOPE)
    _run(PTX)


@gluon.jit
def nanosleep(ns):
    """``nanosleep.u32``: give the issue slots to other warps for about ``ns`` (int32) nanoseconds, 0 to twice that."""
    gl.inline_asm_elementwise(
        "nanosleep.u32 $1; mov.u32 $0, 0;", "=r,r,~{memory}", [ns], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def global_timer():
    """Return ``%globaltimer`` as int64: nanoseconds on a clock that all SMs of a GPU share.

    Each thread reads its own: the value is fit for storing, not for branching. See :func:`partition_timer`.
    """
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,~{memory}", [], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def thread_timers():
    """Return the ``%globaltimer`` of every thread of the partition, int64, one element a thread."""
    THREADS: gl.constexpr = 32 * gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    each = gl.full([THREADS], 0, gl.int64, layout)
    # The operand only makes the instruction run for each element, that is for each thread.
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer; add.u64 $0, $0, $1;",
        "=&l,l,~{memory}",
        [each],
        dtype=gl.int64,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def partition_timer():
    """Return the latest ``%globaltimer`` that a thread of the partition read, int64: one value for all its threads.

    A branch on a value that differs between threads would tear a partition apart at its next barrier, so this one is
    reduced over the threads; with several warps that costs barriers.
    """
    return gl.max(thread_timers(), 0)


__all__ = [
    "TRITON_VERSION",
    "ConstexprFunction",
    "GPUTarget",
    "GluonASTSource",
    "JITFunction",
    "TensorDescriptor",
    "aggregate",
    "alloc_mbarriers",
    "ampere",
    "bulk_wait",
    "bulk_wait_writes",
    "cp_async",
    "cp_async_arrive",
    "cp_async_commit",
    "cp_async_wait",
    "fence_acq_rel",
    "fence_async_shared",
    "fence_proxy_async",
    "gl",
    "global_timer",
    "gluon",
    "hopper",
    "make_tensor_descriptor",
    "mbarrier",
    "nanosleep",
    "prepared_launch",
    "reinterpret",
    "partition_timer",
    "thread_barrier",
    "thread_timers",
    "tma_load",
    "tma_store",
    "triton",
    "warp_specialize",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]
