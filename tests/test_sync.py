"""publish and await_ in the emulator: they hand memory over, and without any one of their lines they do not."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch

from moeloom.errors import ToolchainError

try:
    from moeloom.compat import gl, gluon
except ToolchainError as error:
    pytest.skip(str(error), allow_module_level=True)

from moeloom.compile import order, targets
from moeloom.compile.build import compile_spec
from moeloom.emulator import Deadlock, Emulator, sweep
from moeloom.kernels import handshake as handshake_module
from moeloom.kernels import sync
from moeloom.kernels.sync import await_, publish

_number = itertools.count()
ROWS, COLUMNS = handshake_module.ROWS.value, handshake_module.COLUMNS.value


def handshake(emu: Emulator, kernel=handshake_module.handshake, *, grid=2, blocks=8, slots=2, deadline_s=0.0, **change):
    given = handshake_module.arguments(blocks, slots, deadline_s, "cpu")
    for name, value in change.items():
        given[name][:] = torch.tensor(value, dtype=torch.int32)
    emu.launch(kernel, (grid,), given, num_warps=4)
    return {name: given[name] for name in ("ring", "ready", "taken", "trouble")}


def right(out: dict[str, torch.Tensor]) -> None:
    blocks, slots = len(out["ready"]), len(out["ring"]) // ROWS
    assert out["trouble"].tolist() == [0, 0]
    assert out["ready"].tolist() == out["taken"].tolist() == [1] * blocks
    last = torch.arange(blocks - slots, blocks)
    numbers = torch.arange(ROWS * COLUMNS) + last[:, None] * ROWS * COLUMNS
    assert torch.equal(out["ring"].view(slots, -1)[last % slots].long(), numbers)


# ------------------------------------------------------------------------------------------------------- all is there


@pytest.mark.parametrize("grid, slots, resident", [(1, 2, None), (3, 2, None), (3, 4, 1)])
def test_the_handshake_is_right(grid, slots, resident):
    report = sweep(lambda emu: handshake(emu, grid=grid, slots=slots), range(3), check=right, resident=resident)
    report.raise_first()
    assert len(report.digests) == 3


@pytest.mark.slow
@pytest.mark.parametrize("lag", ["early", "late", "random"])
@pytest.mark.parametrize("strategy", ["random", "pct"])
def test_the_handshake_is_right_under_many_schedules(strategy, lag):
    build = lambda emu: handshake(emu, grid=4, blocks=16, slots=4)  # noqa: E731
    sweep(build, range(40), check=right, strategy=strategy, lag=lag).raise_first()


# ------------------------------------------------------------------------------------------------ each line is needed


def edited(folder: Path, of_sync: list[tuple[str, str]]) -> object:
    """The handshake kernel over a copy of sync.py with (old, new) edits; each old text is there exactly once."""

    def copy(module, edits) -> object:
        text = Path(module.__file__).read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{text.count(old)} times: {old!r}"
            text = text.replace(old, new)
        name = f"planted_{next(_number)}_{module.__name__.split('.')[-1]}"
        path = folder / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    planted = copy(sync, of_sync)
    return copy(handshake_module, [("from moeloom.kernels.sync import", f"from {planted.__name__} import")]).handshake


def drop(line: str, behind: str = "") -> tuple[str, str]:
    """An edit that drops a line, named by some text of it and of what follows."""
    return line + behind, "pass" + behind


RELEASE = 'gl.atomic_add(ptr, amount, sem="release", scope=SCOPE)'
BEHIND_FENCE = "\n    if BULK:\n        # What was acquired"
#: What each line is for: the edit that spoils it, and the kind of alarm that names it.
LINES = {
    "publish does not wait for bulk stores": ([drop("bulk_wait_writes(0)", "\n        # Bulk")], "bulk-wait"),
    "publish lets a bulk store fly on": ([("bulk_wait_writes(0)\n        # Bulk", "bulk_wait_writes(1)\n        # Bulk")], "bulk-wait"),
    "publish without its barrier": ([drop("thread_barrier()", "\n\n\n@gluon.jit\ndef publish(")], "barrier"),
    "publish does not release": ([(RELEASE, RELEASE.replace("release", "relaxed"))], "release"),
    "publish releases to its CTA only": ([(RELEASE, RELEASE.replace("SCOPE", '"cta"'))], "scope"),
    "await_ does not acquire": ([drop("fence_acq_rel(SCOPE)", "\n    # Thread 0")], "acquire"),
    "await_ without its proxy fence": ([drop("fence_proxy_async()", "\n    return off")], "proxy-fence"),
    "await_ polls once": ([("while (seen", "if (seen")], "unordered"),
    "await_ is content with one too few": ([("    if (seen - target < 0)", "    target -= 1\n    if (seen - target < 0)")], "unordered"),
}  # fmt: skip
#: What the emulator cannot see, because it takes the threads of a partition for one, or the fence for implied.
THREADS = {
    "publish without its proxy fence": ([drop("fence_proxy_async()", "\n    # The release")], "no fence.proxy.async between"),
    "publish with its barrier first": (
        [
            drop("thread_barrier()", "\n\n\n@gluon.jit\ndef publish("),
            ("    if BULK:\n        # The ``.read``", "    thread_barrier()\n    if BULK:\n        # The ``.read``"),
        ],
        "no barrier of the partition behind the fence",
    ),
    "await_ without its barrier": ([drop("thread_barrier()", BEHIND_FENCE)], "an acquire of some threads only"),
}  # fmt: skip
QUICK = {"publish without its barrier", "await_ does not acquire"}


def kinds(kernel: object, seeds: int) -> set[str]:
    report = sweep(lambda emu: handshake(emu, kernel), range(seeds), same_bits=False, stop_at_first=False, processes=1)
    return {alarm.kind for _, alarm in report.alarms}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LINES])
def test_no_line_can_be_left_out(tmp_path, name):
    edits, expected = LINES[name]
    assert expected in kinds(edited(tmp_path, edits), seeds=3 if name in QUICK else 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", THREADS)
def test_no_line_between_threads_can_be_left_out(tmp_path, name):
    edits, expected = THREADS[name]
    spec = targets.named("handshake")[0]
    found = order.check(compile_spec(spec, edited(tmp_path, edits), "90a")[0].asm["ptx"]).violations
    assert found and all(expected in v.why for v in found)
    assert not order.check(compile_spec(spec, edited(tmp_path, []), "90a")[0].asm["ptx"]).violations


# -------------------------------------------------------------------------------------------------- deadlines and wraps


@gluon.jit
def waiter(flag, data, out, target, step, deadline_ns, off, SCOPE: gl.constexpr):
    """Program 0 waits and reads, the others write and publish."""
    if gl.program_id(0) == 0:
        gave_up = await_(flag, target, deadline_ns, off, SCOPE, False)
        gl.store(out, gave_up)
        if gave_up == 0:
            gl.store(out + 1, gl.load(data))
    else:
        gl.store(data, 7)
        publish(flag, step, SCOPE, False)


def wait(emu: Emulator, *, grid=2, target=1, start=0, deadline_ns=0, off=0, scope="gpu", **launch) -> dict:
    flag, data, out = (torch.tensor(v, dtype=torch.int32) for v in ([start], [0], [-1, -1]))
    step = (target - start) % 2**32  # what brings the flag there, beyond the largest int32 too
    step -= 2**32 * (step >= 2**31)
    args = dict(flag=flag, data=data, out=out, target=target, step=step, deadline_ns=deadline_ns, off=off, SCOPE=scope)
    emu.launch(waiter, (grid,), args, num_warps=1, **launch)
    return {"out": out}


def test_a_call_number_wraps_around():
    for start, target in [(2**31 - 1, -(2**31)), (2**31 - 2, -(2**31) + 5), (-1, 0)]:
        report = sweep(lambda emu, s=start, t=target: wait(emu, start=s, target=t), range(5))
        report.raise_first()
        assert report.outputs["out"].tolist() == [0, 7]


def test_a_flag_that_is_ahead_is_no_wait():
    report = sweep(lambda emu: wait(emu, grid=1, start=-(2**31) + 3, target=2**31 - 1), range(2))
    report.raise_first()
    assert report.outputs["out"].tolist() == [0, 0]


def test_a_deadline_ends_a_wait():
    report = sweep(lambda emu: wait(emu, grid=1, deadline_ns=50), range(3))
    report.raise_first()
    assert report.outputs["out"].tolist() == [1, -1]


def test_without_a_deadline_a_wait_has_no_end():
    with pytest.raises(Deadlock, match="flag"):
        sweep(lambda emu: wait(emu, grid=1), range(1)).raise_first()


def test_who_has_given_up_does_not_wait_again():
    report = sweep(lambda emu: wait(emu, grid=1, off=1), range(1))
    report.raise_first()
    assert report.outputs["out"].tolist() == [1, -1]


@pytest.mark.parametrize("scope, kind", [("sys", None), ("gpu", "scope")])
def test_ranks_need_the_scope_of_the_system(scope, kind):
    report = sweep(lambda emu: wait(emu, scope=scope, rank=lambda program: program), range(3), same_bits=False)
    if kind is None:
        report.raise_first()
        assert report.outputs["out"].tolist() == [0, 7]
    else:
        assert report.alarms and report.alarms[0][1].kind == kind


def test_consumers_give_up_when_producers_are_gone():
    """All tickets to write are taken by nobody: the consumers time out once each, and the launch ends."""
    report = sweep(lambda emu: handshake(emu, deadline_s=1e-7, tickets=[8, 0]), range(3))
    report.raise_first()
    assert report.outputs["trouble"].tolist() == [0, 2]
    assert not report.outputs["ready"].any() and not report.outputs["taken"].any()


# ----------------------------------------------------------------------------------------------------------- the device


@pytest.mark.gpu
def test_the_handshake_is_right_on_the_device():
    for slots in (1, 4, 64):
        out = handshake_module.check(torch.device("cuda", 0), slots=slots)
        assert (out.wrong, out.gave_up) == (0, 0) and out.elements == 1 << 27
