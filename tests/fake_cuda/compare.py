"""Run in a process of its own: launch by Triton's path and by ours, on the fake driver; compare byte by byte."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time

import torch
import triton
from triton.backends.nvidia.driver import CudaDriver

from moeloom.compat import TRITON_VERSION
from moeloom.runtime.launch import Bound, compiled
from moeloom.runtime.plan import CallKind, ForwardPlan
from moeloom.runtime.tuning import Tuning
from tests.hopper import Layout, Prepared, Sizes, make_inputs

library = ctypes.CDLL(sys.argv[1])
BYTES = {"i64": 8, "u64": 8, "i32": 4, "fp32": 4}


def use_fake_driver() -> None:
    torch.cuda.current_device = lambda: 0
    driver = CudaDriver.__new__(CudaDriver)
    driver.get_current_device = lambda: 0
    driver.get_device_capability = lambda device: (9, 0)
    driver.get_current_stream = lambda device: 0
    CudaDriver.__mro__[1].__init__ = lambda self: None
    driver.__init__()
    triton.runtime.driver.set_active(driver)


def tell_sizes(kernel) -> None:
    """Tell the library how many bytes each parameter of a compiled kernel has."""
    sizes = []
    for kind in kernel.src.signature.values():
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = kind.split("[")[1].split("]")[0].count(",") + 1
            sizes += [128] + [4] * rank + [8] * rank
        elif kind != "constexpr":
            sizes.append(8 if kind[0] == "*" else BYTES[kind])
    library.fake_sizes((ctypes.c_int * len(sizes))(*sizes), len(sizes))


def kept() -> tuple[int, int, bytes]:
    buffer = ctypes.create_string_buffer(128 * 128)
    count = library.fake_kept(buffer)
    return library.fake_launches(), library.fake_grid(), buffer.raw[:count]


def median_us(function) -> float:
    times = []
    for _ in range(500):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    use_fake_driver()
    sizes, layout = Sizes(start=True), Layout(saved_rows=256)
    first, second = (Prepared(make_inputs(sizes), sizes, layout) for _ in range(2))
    wanted = []
    for launch in second.launches_in(first.workspace, layout):
        tell_sizes(compiled(launch))
        launch.run()
        wanted.append(kept()[1:])
    assert len({bytes(w[1]) for w in wanted}) == 3 and all(len(w[1]) >= 32 for w in wanted)
    names = (
        {"ids": second.operands.topk_ids},
        {"ids": second.operands.topk_ids, "x": second.operands.x, "rows_per_expert": second.operands.rows_per_expert},
        {n: getattr(second.operands, n) for n in ("gate_up_proj", "down_proj", "topk_ids", "topk_weights", "out")}
        | {n: getattr(second.operands, n) for n in ("gate_up", "start")},
    )
    for launch, changed, want in zip(first.launches, names, wanted, strict=True):
        bound = Bound(launch)
        tell_sizes(compiled(launch))
        for turn in range(2):
            encoded, launches = library.fake_encoded(), library.fake_launches()
            bound.run(**{name: tensor.data_ptr() for name, tensor in changed.items()})
            assert kept()[0] == launches + 1 and kept()[1:] == want, launch.kernel.__name__
            again = turn == 1 and TRITON_VERSION[:2] == (3, 6)
            assert not again or library.fake_encoded() == encoded, "a descriptor was made again"
    library.fake_sizes((ctypes.c_int * 0)(), 0)
    kind = CallKind(sizes.tokens, layout.minibatch_rows, layout.num_sms, 0.0, Tuning(), layout.saved_rows, None, True)
    plan = ForwardPlan(kind, first.operands, first.workspace)
    ours = median_us(lambda: plan.run(second.operands))
    theirs = median_us(lambda: [launch.run() for launch in second.launches])
    print(f"equal; three launches by Triton's path {theirs:.0f} us, by ours {ours:.0f} us")


if __name__ == "__main__":
    main()
