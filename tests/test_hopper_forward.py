"""The hopper forward: order and schedule against their specification, the kernel in the emulator and on a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moeloom.errors import ArgumentError, ToolchainError

try:
    import moeloom.compat
except ToolchainError as error:
    pytest.skip(str(error), allow_module_level=True)

from moeloom import MoEConfig, SharedExperts, backends, moe
from moeloom.backends import hopper
from moeloom.backends.call import Request
from moeloom.backends.hopper import backward_pass, forward_pass
from moeloom.backends.hopper.backward_pass import rows_of
from moeloom.backends.hopper.forward_pass import wave_rows
from moeloom.backends.torch.routing import sort_routes
from moeloom.cli import doctor
from moeloom.config import ROW_BLOCK
from moeloom.emulator import Emulator, sweep
from moeloom.errors import KernelTimeout
from moeloom.kernels import schedule as device_schedule
from moeloom.kernels.forward import dispatch, kernel, load, math, order, parts, store
from moeloom.runtime import launch as launching
from moeloom.runtime import trouble
from moeloom.runtime.launch import Bound
from moeloom.runtime.plan import MOST_PLANS, CallKind, ForwardPlan, plan_for
from moeloom.runtime.tuning import Tuning
from moeloom.runtime.workspace import Shape, WorkspacePool, make_workspace
from moeloom.schedule import build_schedule
from tests.cases import ROUTINGS, Case, route, run
from tests.hopper import Inputs, Layout, Prepared, Sizes, answer, make_inputs, poison
from tests.oracle import dense, relative_l2

#: Rounding of the result to bf16 is what is left beside the answer.
TOLERANCE = 4e-3


# --------------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("blocks, minibatch, gate_up, down", [(0, 2, 1, 1), (1, 4, 2, 1), (7, 2, 3, 2), (8, 4, 1, 3)])
def test_every_tile_is_one_task_behind_what_it_needs(blocks, minibatch, gate_up, down):
    sums = 3
    total = blocks * (gate_up + down) + sums
    tasks = [order.find_task(t, blocks, minibatch, gate_up, down) for t in range(total)]
    want = {(order.GATE_UP, b, n) for b in range(blocks) for n in range(gate_up)}
    want |= {(order.DOWN, b, n) for b in range(blocks) for n in range(down)}
    assert len(set(tasks)) == total and set(tasks) == want | {(order.SUM, s, 0) for s in range(sums)}
    place = {task: at for at, task in enumerate(tasks)}
    ring = 2 * minibatch
    for (kind, block, _), at in place.items():
        if kind == order.DOWN:
            assert all(place[order.GATE_UP, block, n] < at for n in range(gate_up))
        if kind == order.GATE_UP and block >= ring:
            # The ring's slot: its token rows and its hidden rows are done with before.
            assert all(place[order.DOWN, block - ring, n] < at for n in range(down))
        if kind == order.SUM:
            assert at >= total - sums


def test_the_example_of_the_order():
    tasks = [order.find_task(t, 3, 2, 1, 2) for t in range(10)]
    assert tasks[4] == (order.DOWN, 1, 0) and tasks[9] == (order.SUM, 0, 0)


# ------------------------------------------------------------------------------------------------------------ schedule


def check_schedule(ids: torch.Tensor, experts: int, rank: int, seed: int) -> None:
    """Compare all tables of one rank with the specification."""
    ranks, tokens, top_k = ids.shape
    shape = Shape(torch.device("cpu"), 64, 64, experts // ranks, ranks, top_k, 256)
    workspace = make_workspace(shape, tokens)
    poison(workspace)
    blocks = shape.capacity_blocks(tokens)
    routes, local = ids.numel(), experts // ranks
    programs = device_schedule.num_programs(routes, local)
    x, rows_per_expert = torch.zeros(8, dtype=torch.bfloat16), torch.full((local,), -5)
    common = dict(ids=ids.flatten(), counts=workspace.counts, num_routes=routes, first_expert=rank * local)
    common |= dict(run=device_schedule.run_length(routes, programs), experts=local)
    common |= dict(EXPERTS=device_schedule.padded_experts(local))
    tables = {
        name: getattr(workspace, name) for name in ("row_rank", "row_slot", "block_expert", "block_rows", "facts")
    }
    tables |= dict(counters=workspace.counters, pointers=workspace.pointers[0], x=x, slots=tokens * top_k)
    tables |= dict(rows_per_expert=rows_per_expert, capacity_blocks=blocks, num_counters=len(workspace.counters))
    emu = Emulator(seed)
    emu.launch(device_schedule.count_routes, programs, common, num_warps=device_schedule.WARPS)
    emu.launch(device_schedule.place_routes, programs, common | tables | dict(rank=rank), num_warps=8)
    emu.run()
    want = build_schedule(ids, num_experts=experts, rank=rank)
    assert torch.equal(workspace.row_rank, want.source_rank)
    assert torch.equal(workspace.row_slot.long(), want.source_slot)
    assert torch.equal(workspace.block_expert, want.block_expert)
    assert torch.equal(workspace.block_rows, want.block_rows)
    assert torch.equal(rows_per_expert, want.rows_per_expert)
    assert workspace.facts[0] * ROW_BLOCK == want.num_rows[rank]
    assert not workspace.counters.any() and workspace.pointers[0, rank] == x.data_ptr()


@pytest.mark.parametrize("ranks, tokens, top_k, experts, rank", [(1, 90, 3, 8, 0), (2, 80, 2, 8, 1), (1, 1, 1, 1, 0)])
def test_schedule_equals_its_specification(ranks, tokens, top_k, experts, rank):
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts + 1, (ranks, tokens, top_k), generator=g)
    ids[0, 0, 0] += 2**40
    check_schedule(ids, experts, rank, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("routing", ROUTINGS)
def test_schedule_equals_its_specification_on_many(routing, seed):
    g = torch.Generator().manual_seed(seed)
    ranks = (1, 2, 4)[seed % 3]
    tokens, top_k = int(torch.randint(1, 400, (), generator=g)), int(torch.randint(1, 5, (), generator=g))
    experts = ranks * int(torch.randint(top_k, 70, (), generator=g))
    ids = torch.stack([route(routing, tokens, experts, top_k, g) for _ in range(ranks)])
    check_schedule(ids, experts, int(torch.randint(ranks, (), generator=g)), seed)


def test_sorted_rows_find_their_rows():
    ids = make_inputs(Sizes(tokens=200, experts=5, top_k=3)).ids
    routes, want = sort_routes(ids, 5), build_schedule(ids[None], num_experts=5, rank=0)
    rows = rows_of(routes, want.rows_per_expert, want.source_slot.numel())
    live = int(want.rows_per_expert.sum())
    assert torch.equal(want.source_slot[rows[:live]], routes.order[:live])


# ----------------------------------------------------------------------------------------------- kernel, in the emulator


def emulated(sizes: Sizes, layout: Layout, seeds=range(1), kernel=None, same_bits=True, **options) -> dict:
    """Run a call under many schedules; return its outputs."""
    given = make_inputs(sizes)
    build = lambda emu: Prepared(given, sizes, layout).emulate(emu, kernel)  # noqa: E731
    report = sweep(build, seeds, same_bits=same_bits, processes=1, **options)
    report.raise_first()
    return report.outputs


def check_emulated(sizes: Sizes, layouts: list[tuple[Layout, dict]], seeds=range(1)) -> None:
    """Hold a call against its answer, and the bits of all layouts against each other."""
    given = make_inputs(sizes)
    want = answer(given, sizes.limit)
    first = None
    for layout, options in layouts:
        got = emulated(sizes, layout, seeds, **options)
        first = got if first is None else first
        assert torch.equal(got["out"], first["out"]), (layout, options)
        if layout.saved_rows:
            check_saved(given, got["gate_up"])
    if want.norm():
        assert relative_l2(first["out"], want) < TOLERANCE
    else:
        assert not first["out"].any()


def check_saved(given, gate_up: torch.Tensor) -> None:
    """Compare saved pre-activations, row by row, with what they are."""
    experts = given.gate_up.shape[0]
    schedule = build_schedule(given.ids[None], num_experts=experts, rank=0)
    top_k, checked = given.ids.shape[1], 0
    for row, slot in enumerate(schedule.source_slot[: len(gate_up)].tolist()):
        if slot >= 0:
            expert = int(schedule.block_expert[row // ROW_BLOCK])
            want = given.gate_up[expert].double() @ given.x[slot // top_k].double()
            assert relative_l2(gate_up[row], want) < TOLERANCE
            checked += 1
    assert checked == int((schedule.source_slot[: len(gate_up)] >= 0).sum())


SMALL = Sizes()
START = Sizes(tokens=30, hidden=576, top_k=3, start=True)
UNEVEN = Sizes(tokens=40, hidden=320, inner=192, experts=6, top_k=3, limit=1.0, nan_neighbours=True)
PLAIN = Layout()
#: What bits do not depend on: ring and minibatch, saved rows, CTAs and how many of them are resident, tuning.
LAYOUTS = [
    (PLAIN, {}),
    (replace(PLAIN, ring_rows=512, minibatch_rows=256, saved_rows=256, num_sms=1), {}),
    (replace(PLAIN, saved_rows=128, num_sms=5, deadline_s=30.0), dict(resident=2)),
    (replace(PLAIN, ring_rows=1024, tuning=Tuning(stages=2, slots=5, piece=16)), dict(resident=1)),
    (replace(PLAIN, num_sms=7, tuning=Tuning(stages=3, slots=5, store_warps=1, dispatch_warps=2)), dict(resident=4)),
]


def test_small_layer_and_its_layouts():
    check_emulated(SMALL, LAYOUTS[:2])


def test_partial_tiles_beside_nan():
    check_emulated(replace(UNEVEN, tokens=20), [LAYOUTS[2]])


@pytest.mark.parametrize(
    "sizes",
    [Sizes(tokens=1, top_k=1), Sizes(tokens=9, routing="none"), Sizes(tokens=9, routing="one-route", start=True)],
    ids=["one", "none", "start"],
)
def test_one_token_and_no_route(sizes):
    check_emulated(sizes, [LAYOUTS[0]])


@pytest.mark.slow
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "sizes", [SMALL, UNEVEN, START, Sizes(tokens=300, experts=2)], ids=["small", "uneven", "start", "long"]
)
def test_all_layouts(sizes, routing):
    check_emulated(replace(sizes, routing=routing), LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SMALL, UNEVEN], ids=["small", "uneven"])
def test_many_schedules(sizes):
    check_emulated(sizes, LAYOUTS, range(20))


@pytest.mark.slow
def test_shallow_stages():
    """In a layout of its own, because the emulator's sums depend on the depth of a product; a GPU's do not."""
    check_emulated(UNEVEN, [(replace(PLAIN, tuning=Tuning(depth=32, stages=6, slots=5)), {})])


@pytest.mark.slow
def test_beside_a_kernel_that_holds_sms():
    sizes = replace(SMALL, tokens=150, experts=2)
    want = emulated(sizes, PLAIN)
    given = make_inputs(sizes)

    def build(emu):
        emu.hold_sms(3)
        return Prepared(given, sizes, replace(PLAIN, num_sms=6)).emulate(emu)

    report = sweep(build, range(10), resident=4)
    report.raise_first()
    assert torch.equal(report.outputs["out"], want["out"])


def test_a_lost_piece_ends_in_nan_and_a_record(tmp_path):
    """A row block that never comes: every role gives up, the kernel ends, the output is NaN, the host is told."""
    broken = planted(tmp_path, "dispatch", "publish(counters.x_ready + block, 1", "publish(counters.x_ready + block, 0")
    prepared = []

    def build(emu):
        prepared.append(Prepared(make_inputs(SMALL), SMALL, replace(PLAIN, deadline_s=0.5)))
        return prepared[-1].emulate(emu, broken)

    sweep(build, [0]).raise_first()
    assert prepared[-1].outputs["out"].isnan().all()
    with pytest.raises(KernelTimeout, match="load waited for the rows of a task .row block 0 first"):
        trouble.check(prepared[-1].workspace)
    trouble.check(prepared[-1].workspace)


# -------------------------------------------------------------------------------------------------------- planted bugs

_MODULES = {m.__name__.split(".")[-1]: m for m in (dispatch, load, math, order, parts, store, kernel)}
_number = itertools.count()
#: What a read that nothing orders may be called.
RACES = {"unordered", "uninitialised", "slot-reuse", "acquire", "release"}


def planted(folder: Path, stem: str, old: str, new: str):
    """The layer's kernel with one edit in one of its modules; the old text is there exactly once."""

    def module(name: str, text: str):
        path = folder / f"planted_{next(_number)}_{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return path.stem

    text = Path(_MODULES[stem].__file__).read_text()
    assert text.count(old) == 1, f"{text.count(old)} times: {old!r}"
    edited = module(stem, text.replace(old, new))
    if stem != "kernel":
        text = Path(kernel.__file__).read_text()
        edited = module("kernel", text.replace(f"from moeloom.kernels.forward.{stem} import", f"from {edited} import"))
    return sys.modules[edited].forward


#: What is wrong; module, text, what stands there instead; the kinds of alarm that are right for it.
PLANTS = [
    ("a piece is not published", "dispatch", "x_ready + block, 1,", "x_ready + block, 0,", {"deadlock"}),
    (
        "dispatch does not wait for the ring's slot",
        "dispatch",
        "if block >= sizes.ring:",
        "if block >= sizes.capacity:",
        {"slot-reuse", "unordered"},
    ),
    ("rows are read one piece too early", "load", "x_ready + block, PIECES,", "x_ready + block, PIECES - 1,", RACES),
    (
        "no proxy fence before bulk loads of rows",
        "load",
        'PIECES, counters.deadline_ns, off, "gpu", True',
        'PIECES, counters.deadline_ns, off, "gpu", False',
        {"proxy-fence"},
    ),
    (
        "hidden rows are read one tile too early",
        "load",
        "h_ready + block, sizes.gate_up_tiles,",
        "h_ready + block, sizes.gate_up_tiles - 1,",
        RACES,
    ),
    ("sums do not wait", "load", "target = sizes.blocks * sizes.down_tiles", "target = 0", RACES),
    ("the ring has one slot less for the loader", "load", "block % sizes.ring)", "block % (sizes.ring - 1))", RACES),
    (
        "a stage is given back while it is read",
        "math",
        "a.empty.index((step + a.count - 1) % a.count), pred=k > 0",
        "a.empty.index(step % a.count), pred=k > 0",
        {"slot-reuse", "mbarrier", "deadlock"},
    ),
    (
        "no fence before the store warps' bulk stores",
        "math",
        "    fence_async_shared()\n",
        "    pass\n",
        {"proxy-fence"},
    ),
    ("the sum is not waited for by wgmma", "math", "mma_wait(0, deps", "mma_wait(1, deps", {"before-wait"}),
    (
        "hidden rows are published before they are written",
        "store",
        'publish(counters.h_ready + block, 1, "gpu", True)',
        'publish(counters.h_ready + block, 1, "gpu", False)',
        {"bulk-wait", "publish-order"},
    ),
    (
        "a down tile is not counted",
        "store",
        "publish(counters.d_done + block, 1,",
        "publish(counters.d_done + block, 0,",
        {"deadlock"},
    ),
    (
        "store does not wait for the ring's slot",
        "store",
        "if block >= sizes.ring:",
        "if block >= sizes.capacity:",
        {"slot-reuse", "unordered"},
    ),
    (
        "an output buffer is given back while it is read",
        "store",
        "        bulk_wait(0)\n        outbox.release(out)\n        out += 1\n    return out\n\n\n@gluon.jit\ndef _write_saved",
        "        outbox.release(out)\n        out += 1\n    return out\n\n\n@gluon.jit\ndef _write_saved",
        {"bulk-buffer", "slot-reuse"},
    ),
    ("padding rows are pushed", "store", "hidden, (slot >= 0) &", "hidden, (slot >= -1) &", {"assertion", *RACES}),
    ("one reader of the mail", "kernel", "init_ring(mail, 2)", "init_ring(mail, 1)", {"mbarrier", "deadlock", *RACES}),
]
FAST_PLANTS = ("dispatch does not wait for the ring's slot", "hidden rows are published before they are written")


def check_plant(folder: Path, stem: str, old: str, new: str, kinds: set[str]) -> None:
    sizes = Sizes(tokens=40, inner=192, experts=6)
    given, broken = make_inputs(sizes), planted(folder, stem, old, new)
    build = lambda emu: Prepared(given, sizes, PLAIN).emulate(emu, broken)  # noqa: E731
    report = sweep(build, range(12), same_bits=False, processes=1, max_steps=200_000)
    assert report.alarms, "not caught"
    assert report.alarms[0][1].kind in kinds, report.alarms[0][1]


@pytest.mark.parametrize("plant", [p for p in PLANTS if p[0] in FAST_PLANTS], ids=lambda p: p[0])
def test_planted_bugs_are_caught(plant, tmp_path):
    check_plant(tmp_path, *plant[1:])


@pytest.mark.slow
@pytest.mark.parametrize("plant", [p for p in PLANTS if p[0] not in FAST_PLANTS], ids=lambda p: p[0])
def test_all_planted_bugs_are_caught(plant, tmp_path):
    check_plant(tmp_path, *plant[1:])


# -------------------------------------------------------------------------------------------------------- the backend


def request(**change) -> Request:
    facts = dict(device=torch.device("cpu"), dtype=torch.bfloat16, hidden=128, inner=64, local_experts=4, top_k=2)
    return Request(**(facts | dict(ranks=1, shared=False) | change))


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(), None),
        (dict(dtype=torch.float32), "operands are torch.float32"),
        (dict(hidden=96), "H = 96 is no multiple of 64"),
        (dict(inner=32), "I = 32"),
        (dict(top_k=17), "top_k = 17"),
        (dict(local_experts=513), "513 experts"),
        (dict(ranks=2), "2 ranks"),
        (dict(shared=True), None),
    ],
)
def test_what_the_backend_takes(change, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    asked = request(device=torch.device("cuda"), **change)
    found = hopper.why_unsupported(asked)
    assert found is None if reason is None else reason in found
    assert backends.automatic("cuda", asked)[0] == ("hopper" if reason is None else "torch")
    if reason:
        with pytest.raises(ArgumentError, match="backend must be able to run this call; got 'hopper': .*Use backend"):
            backends.choose("hopper", "cuda", asked)


def test_other_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert "10.0, not 9.0" in hopper.why_unsupported(request(device=torch.device("cuda")))
    x, ids = torch.zeros(3, 128, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64)
    weights = torch.zeros(4, 128, 128, dtype=torch.bfloat16), torch.zeros(4, 128, 64, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="the device is 'cpu', not CUDA"):
        moe(x, ids, torch.ones(3, 1), *weights, config=MoEConfig(backend="hopper"))


@pytest.mark.parametrize(
    "capability, compiler, lines",
    [
        (None, "/bin/gcc", {"hopper": "cannot run here: no GPU", "triton": "C compiler: /bin/gcc"}),
        ((9, 0), None, {"hopper on GPU 0": "can run", "triton": "C compiler: none: kernels"}),
        ((10, 0), "gcc", {"hopper on GPU 0": "cannot run: .*10.0, not 9.0", "kernels": "'hopper': forward"}),
    ],
)
def test_doctor_says_whether_the_kernels_can_run(capability, compiler, lines, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(launching, "c_compiler", lambda: compiler)
    found = dict(doctor._kernels())
    for name, text in lines.items():
        assert re.search(text, found[name]), found


def emulated_run(call, keep: int, start=None):
    """What :func:`moeloom.backends.hopper.forward_pass.run` does, in the emulator."""
    given = Inputs(call.x, call.topk_ids, call.topk_weights, call.gate_up_proj, call.down_proj, start)
    prepared = Prepared(given, Sizes(limit=call.swiglu_limit), replace(PLAIN, saved_rows=keep))
    emu = Emulator(0, races=False)
    prepared.emulate(emu)
    emu.run()
    return prepared.outputs["out"], prepared.operands.rows_per_expert, prepared.outputs.get("gate_up")


@pytest.mark.parametrize("shared", [{}, dict(shared=40, shared_gate=True)], ids=["routed", "shared"])
def test_gradients_whatever_is_saved(shared, monkeypatch, poison):
    """Through the function that users call, with the kernels in the emulator."""
    monkeypatch.setattr(backends, "choose", lambda *_: hopper)
    for module in (forward_pass, backward_pass):
        monkeypatch.setattr(module, "run", emulated_run)
    case = Case(tokens=24, hidden=128, inner=64, experts=3, top_k=2, routing="ragged", dtype=torch.bfloat16, **shared)
    want, first = dense(case.make()), None
    for saved_rows in (None, 0):
        got = run(case.make(), config=MoEConfig(backend="hopper", saved_rows=saved_rows))
        first = got if first is None else first
        for name in want:
            assert relative_l2(got[name], want[name]) < 2e-2, name
            assert torch.equal(got[name], first[name]), name


@pytest.mark.parametrize("grad, saves", [(True, True), (False, False)])
def test_nothing_is_saved_without_gradients(grad, saves, monkeypatch):
    """Also where the weights would have gradients."""
    seen = []

    class Backend:
        @staticmethod
        def forward(call, *, save):
            seen.append(save)
            return torch.zeros_like(call.x), None

    monkeypatch.setattr(backends, "choose", lambda *_: Backend)
    monkeypatch.setattr(backends, "number", lambda _: 0)
    inputs = Case(tokens=3).make()
    inputs.gate_up.requires_grad_()
    with torch.set_grad_enabled(grad):
        moe(inputs.x, inputs.ids, inputs.topk_weights, inputs.gate_up, inputs.down)
    assert seen == [saves]


def test_tuning_and_minibatches():
    assert wave_rows(2048, 132) == 8 * ROW_BLOCK and wave_rows(1024, 132) == 16 * ROW_BLOCK
    assert wave_rows(3072, 132) == wave_rows(1 << 20, 132) == 8 * ROW_BLOCK
    assert Tuning().copy_box(7168) == (4, 1024) and Tuning().copy_box(4096) == (1, 4096)
    assert Tuning(piece=1).copy_box(64) == (1, 256)
    for wrong in (dict(depth=16), dict(stages=5), dict(piece=3), dict(registers=100)):
        with pytest.raises(ArgumentError, match="tuning"):
            Tuning(**wrong)


def test_workspaces_grow_and_are_shared():
    pool, shape = WorkspacePool(), Shape(torch.device("cpu"), 64, 64, 2, 1, 2, 256)
    small = pool.take(shape, 10)
    assert pool.take(shape, 3) is small and pool.take(replace(shape, ring_rows=512), 3) is not small
    large = pool.take(shape, 20)
    assert large is not small and large.max_tokens == 20 and pool.take(shape, 10) is large
    assert small.slots.shape == (20, 64) and small.bytes > 20 * 64 * 2


# ------------------------------------------------------------------------------------------------------------ launching


class RecordedKernel:
    """In place of a compiled kernel: what it is launched with, by Triton's ordinary path."""

    run = None

    def __init__(self, name: str, log: list) -> None:
        self.name, self.log = name, log

    def __getitem__(self, grid):
        return lambda *args: self.log.append((self.name, grid, [_seen(a) for a in args]))


def _seen(value: object) -> object:
    """An argument as a launch sees it: descriptors by address, shape and box."""
    if isinstance(value, moeloom.compat.TensorDescriptor):
        return "descriptor", value.base.data_ptr(), value.shape, value.strides, value.block_shape
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


@pytest.fixture
def launched(monkeypatch):
    """Launches of compiled kernels in a list, instead of on a GPU."""
    log = []
    monkeypatch.setattr(launching, "compiled", lambda it: RecordedKernel(it.kernel.__name__, log))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return log


def kind_of(sizes: Sizes, layout: Layout, **change) -> CallKind:
    facts = dict(tokens=sizes.tokens, minibatch_rows=layout.minibatch_rows, num_sms=layout.num_sms, deadline_s=0.0)
    facts |= dict(tuning=layout.tuning, saved_rows=layout.saved_rows, limit=sizes.limit, has_start=sizes.start)
    return CallKind(**(facts | change))


@pytest.mark.parametrize("sizes, saved", [(SMALL, 0), (START, 256)], ids=["small", "start"])
def test_a_plan_launches_what_a_call_would(sizes, saved, launched):
    """The second call, with all tensors at other places, has the arguments that were worked out anew for it."""
    layout = replace(PLAIN, saved_rows=saved)
    first, second = (Prepared(make_inputs(replace(sizes, seed=seed)), sizes, layout) for seed in (0, 1))
    workspace = first.workspace
    plan_for(kind_of(sizes, layout), first.operands, workspace).run(first.operands)
    launched.clear()
    plan_for(kind_of(sizes, layout), second.operands, workspace).run(second.operands)
    got, wanted = list(launched), second.launches_in(workspace, layout)
    assert len(workspace.plans) == 1 and len(got) == 3
    for (name, grid, args), want in zip(got, wanted, strict=True):
        assert (name, grid) == (want.kernel.__name__, (want.grid, 1, 1))
        assert args == [_seen(want.args[p.name]) for p in want.kernel.params], name


def test_plans_keep_no_tensor_and_are_few(launched):
    sizes, layout = START, replace(PLAIN, saved_rows=128)
    call = Prepared(make_inputs(sizes), sizes, layout)
    kinds = [kind_of(sizes, layout, deadline_s=float(n)) for n in range(MOST_PLANS + 2)]
    plans = [plan_for(kind, call.operands, call.workspace) for kind in kinds]
    assert list(call.workspace.plans) == kinds[2:]
    assert plan_for(kinds[2], call.operands, call.workspace) is plans[2]
    assert plan_for(kinds[1], call.operands, call.workspace) is not plans[1]
    assert kinds[2] in call.workspace.plans and kinds[3] not in call.workspace.plans
    for plan in plans[:1]:
        for bound in vars(plan).values():
            held = [a.base if isinstance(a, moeloom.compat.TensorDescriptor) else a for a in bound._args]
            assert not any(isinstance(a, torch.Tensor) for a in held)


def test_kernels_are_announced_once(monkeypatch, caplog):
    monkeypatch.setattr(launching, "_COMPILED", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    warmed = []
    monkeypatch.setattr(
        moeloom.compat.JITFunction,
        "warmup",
        lambda self, **kw: warmed.append(self.__name__) or RecordedKernel(self.__name__, []),
    )
    caplog.set_level("INFO", logger="moeloom")
    call = Prepared(make_inputs(SMALL), SMALL, PLAIN)
    for tokens in (SMALL.tokens, SMALL.tokens - 1):
        ForwardPlan(kind_of(SMALL, PLAIN, tokens=tokens), call.operands, call.workspace)
    assert warmed == ["count_routes", "place_routes", "forward"]
    (line,) = caplog.messages
    assert "compiling count_routes, place_routes, forward" in line


@pytest.mark.parametrize("named", [None, "no-such-compiler"])
def test_a_missing_compiler_is_one_clear_error(named, monkeypatch, tmp_path):
    """Triton's own words become ours, but only if there is no compiler; and nothing is said if nothing fails."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launching, "_COMPILED", {})
    launch = Prepared(make_inputs(SMALL), SMALL, PLAIN).launches[0]

    def fails(self, **kw):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(moeloom.compat.JITFunction, "warmup", fails)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(launching.shutil, "which", lambda name: f"/bin/{name}")
    with pytest.raises(RuntimeError, match="Failed to find"):
        Bound(launch)
    monkeypatch.setattr(launching.shutil, "which", lambda name: None)
    if named:
        monkeypatch.setenv("CC", named)
    with pytest.raises(ToolchainError, match=f"C compiler must be found.*{named or 'neither CC'}.*Install gcc"):
        Bound(launch)
    monkeypatch.setattr(moeloom.compat.JITFunction, "warmup", lambda self, **kw: RecordedKernel("", []))
    Bound(launch).run()


@pytest.mark.slow
@pytest.mark.skipif(not launching.c_compiler(), reason="no C compiler")
def test_launches_as_triton_would(tmp_path):
    """Triton's own launcher, on a driver that keeps what it is given: the same bytes as by Triton's own path."""
    folder = Path(__file__).parent / "fake_cuda"
    library = tmp_path / "libcuda.so.1"
    subprocess.run([launching.c_compiler(), "-shared", "-fPIC", "-O1", "-o", library, folder / "libcuda.c"], check=True)
    paths = dict(LD_LIBRARY_PATH=str(tmp_path), TRITON_LIBCUDA_PATH=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda.compare", str(library)],
        cwd=folder.parent.parent,
        env=os.environ | paths,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("equal")


# ------------------------------------------------------------------------------------------------------------ on a GPU

GPU = Layout(num_sms=132, deadline_s=20.0, saved_rows=256)


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(tokens=300, hidden=320, inner=192, experts=6, top_k=3, limit=1.0, nan_neighbours=True),
        Sizes(tokens=200, hidden=576, inner=1088, experts=16, top_k=4),
        Sizes(tokens=150, hidden=256, inner=64, experts=300, top_k=8),
    ],
    ids=["uneven", "wide", "many"],
)
def test_answer_on_the_gpu(sizes, routing):
    sizes = replace(sizes, routing=routing)
    given = make_inputs(sizes)
    want, got = answer(given, sizes.limit), Prepared(given.to("cuda"), sizes, GPU).run()
    assert relative_l2(got["out"].cpu(), want) < TOLERANCE


@pytest.mark.gpu
def test_bits_on_the_gpu():
    """1,000 runs beside another stream; layouts, tunings and numbers of CTAs."""
    sizes = Sizes(tokens=300, hidden=512, inner=256, experts=8, top_k=4)
    given = make_inputs(sizes).to("cuda")
    call = Prepared(given, sizes, GPU)
    want = call.run()["out"].clone()
    side, other = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(1000):
        with torch.cuda.stream(side):
            other.mul_(1.0)
        call.outputs["out"].fill_(float("nan"))
        assert torch.equal(call.run()["out"], want)
    layouts = [replace(layout, deadline_s=20.0) for layout, _ in LAYOUTS]
    layouts += [replace(GPU, num_sms=n) for n in (1, 7, 78, 114)]
    layouts += [replace(GPU, tuning=Tuning(depth=32, stages=6, slots=5))]
    for layout in layouts:
        assert torch.equal(Prepared(given, sizes, layout).run()["out"], want), layout


@pytest.mark.gpu
def test_graph_replays_with_other_routes():
    sizes = Sizes(tokens=300, hidden=512, inner=256, experts=8, top_k=4)
    given = make_inputs(sizes).to("cuda")
    call = Prepared(given, sizes, GPU)
    call.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    for seed, routing in enumerate(ROUTINGS):
        new = make_inputs(replace(sizes, seed=seed, routing=routing)).to("cuda")
        for name, tensor in vars(new).items():
            if tensor is not None:
                getattr(given, name).copy_(tensor)
        graph.replay()
        got = call.outputs["out"].clone()
        assert torch.equal(got, Prepared(new, sizes, GPU).run()["out"])


@pytest.mark.gpu
@pytest.mark.parametrize("saved_rows", [None, 0])
@pytest.mark.parametrize(
    "shared",
    [{}, dict(shared=96), dict(shared=33, shared_gate=True)],
    ids=["routed", "shared", "odd width and gate"],
)
def test_layer_on_the_gpu(shared, saved_rows, poison):
    """All gradients, through the function that users call, against fp64; equal whatever is saved."""
    case = Case(tokens=300, hidden=256, inner=192, experts=8, top_k=3, routing="ragged", dtype=torch.bfloat16, **shared)
    inputs = case.make()
    moved = replace(inputs, **{n: v.cuda() for n, v in vars(inputs).items() if isinstance(v, torch.Tensor)})
    config = MoEConfig(backend="hopper", saved_rows=saved_rows)
    got, want, all_saved = run(moved, config=config), dense(inputs), run(moved, config=MoEConfig(backend="hopper"))
    for name in want:
        assert relative_l2(got[name].cpu(), want[name]) < 2e-2, name
        assert torch.equal(got[name], all_saved[name]), name


@pytest.mark.gpu
def test_layer_in_a_graph():
    """Captured after one call, with a shared expert; replayed with fewer live tokens, and NaN behind them."""
    case = Case(tokens=300, hidden=256, inner=192, experts=8, top_k=3, dtype=torch.bfloat16, shared=96)
    inputs = case.make()
    tensors = [getattr(inputs, n).cuda() for n in ("x", "ids", "topk_weights", "gate_up", "down")]
    shared = SharedExperts(inputs.shared_gate_up.cuda(), inputs.shared_down.cuda())
    layer = lambda: moe(*tensors, shared=shared, config=MoEConfig(backend="hopper"))  # noqa: E731
    want = layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    graph.replay()
    assert torch.equal(out, want)
    x, ids = tensors[:2]
    ids[200:], x[200:] = -1, float("nan")
    graph.replay()
    assert torch.equal(out[:200], want[:200]) and out[200:].isnan().all()


@pytest.mark.gpu
def test_inputs_may_go_right_after_the_call():
    case = Case(tokens=3000, hidden=512, inner=256, experts=8, top_k=4, dtype=torch.bfloat16)
    inputs = case.make()
    tensors = [getattr(inputs, n).cuda() for n in ("x", "ids", "topk_weights", "gate_up", "down")]
    config = MoEConfig(backend="hopper")
    want, busy = moe(*tensors, config=config), torch.randn(8192, 8192, device="cuda")
    torch.mm(busy, busy)
    copies = [t.clone() for t in tensors]
    sizes = [(t.shape, t.dtype) for t in copies]
    got = moe(*copies, config=config)
    del copies
    for shape, dtype in sizes:
        torch.empty(shape, dtype=dtype, device="cuda").fill_(float("nan") if dtype.is_floating_point else 5)
    assert torch.equal(got, want)
