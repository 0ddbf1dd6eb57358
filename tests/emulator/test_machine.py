"""The emulator's own behaviour: arithmetic as on the GPU, replay, options, streams, sweeps, reports."""

from __future__ import annotations

import re
import runpy
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from moeloom.compat import (
    TensorDescriptor,
    fence_proxy_async,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma_load,
    tma_store,
)
from moeloom.emulator import KINDS, Deadlock, Emulator, Fault, NotEmulated, Race, sweep
from moeloom.emulator.dtypes import FP8, decode, encode

LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
BOX = gl.NVMMASharedLayout.get_default_for([16, 64], gl.bfloat16)


# ------------------------------------------------------------------------------------------------------- arithmetic


@gluon.jit
def integers(out, a, b):
    gl.store(out + 0, a // b)
    gl.store(out + 1, a % b)
    gl.store(out + 2, a + 2147483647)
    gl.store(out + 3, (a >> 1) ^ (b << 2))
    gl.store(out + 4, gl.where(a < b, 7, 8))
    gl.store(out + 5, (a.to(gl.int64) * 3000000000 // 1000000000).to(gl.int32))


@pytest.mark.parametrize("a, b", [(7, 2), (-7, 2), (7, -2), (-7, -2), (0, 5)])
def test_integers_divide_and_wrap_as_in_c(a, b):
    out = torch.zeros(6, dtype=torch.int32)
    emu = Emulator(0)
    emu.launch(integers, 1, (out, a, b))
    emu.run()
    wrapped = np.array(a, np.int32) + np.array(2147483647, np.int32)
    quotient = int(a / b)
    assert out.tolist() == [
        quotient,
        a - quotient * b,
        int(wrapped),
        (a >> 1) ^ (b << 2),
        7 if a < b else 8,
        int(a * 3000000000 / 1000000000),
    ]


@gluon.jit
def floats(out, x, y):
    i = gl.arange(0, 128, LAYOUT)
    a = gl.load(x + i)
    b = gl.load(y + i)
    gl.store(out + i, a * b + a)
    gl.store(out + 128 + i, (a.to(gl.float32) * b).to(gl.bfloat16))


def test_bf16_is_rounded_after_every_operation():
    x, y = (torch.randn(128, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    out = torch.full((256,), float("nan"), dtype=torch.bfloat16)
    emu = Emulator(0)
    emu.launch(floats, 1, (out, x, y))
    emu.run()
    assert torch.equal(out[:128], x * y + x)
    assert torch.equal(out[128:], (x.float() * y.float()).bfloat16())


@pytest.mark.parametrize("name, dtype", [("fp8e4nv", torch.float8_e4m3fn), ("fp8e5", torch.float8_e5m2)])
def test_fp8_rounds_to_nearest_even_and_saturates(name, dtype):
    largest = torch.finfo(dtype).max
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(20000, generator=generator) * torch.logspace(-6, 3, 20000)
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    middles = (codes[:126] + codes[1:127]) / 2
    values = torch.cat([random, middles, -middles, torch.tensor([0.0, -0.0, float("nan")])]).clamp(-largest, largest)
    mine = torch.from_numpy(FP8[name].encode(values.numpy()))
    theirs = values.to(dtype).view(torch.uint8)
    number = ~values.isnan()
    assert torch.equal(mine[number], theirs[number])
    assert (
        FP8[name].encode(np.array([1e9, -1e9], np.float32)).tolist()
        == FP8[name].encode(np.array([largest, -largest], np.float32)).tolist()
    )


def test_bf16_storage_round_trip():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    bits = encode(values.numpy(), gl.bfloat16)
    assert torch.equal(torch.from_numpy(decode(bits, gl.bfloat16)), values.bfloat16().float())


# ------------------------------------------------------------------------------------------- a flag between two CTAs


@gluon.jit
def hand_over(data, flag, out, N: gl.constexpr, SEM: gl.constexpr):
    i = gl.arange(0, 128, LAYOUT)
    if gl.program_id(0) == 0:
        for k in range(N):
            gl.store(data + k * 128 + i, i + k)
        thread_barrier()
        gl.atomic_add(flag, 1, sem=SEM, scope="gpu")
    else:
        seen = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
        while seen < 1:
            seen = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
        for k in range(N):
            gl.store(out + k * 128 + i, gl.load(data + k * 128 + i))


def handed(sem="release", n=3):
    def build(emu):
        data, out = (torch.full((n * 128,), -1, dtype=torch.int32) for _ in range(2))
        emu.launch(hand_over, 2, (data, torch.zeros(1, dtype=torch.int32), out, n, sem))
        return {"out": out}

    return build


def test_a_seed_replays():
    def trace(seed):
        emu = Emulator(seed)
        handed()(emu)
        emu.run()
        return emu.steps, emu.time, emu.strategy, emu.lag, emu.switch

    assert trace(3) == trace(3)
    assert len({trace(seed) for seed in range(8)}) > 4


def test_sweep_in_processes_finds_what_one_process_finds():
    alone = sweep(handed("relaxed"), range(6), processes=1, stop_at_first=False)
    together = sweep(handed("relaxed"), range(6), processes=2, stop_at_first=False)
    assert [(s, a.kind, str(a)) for s, a in alone.alarms] == [(s, a.kind, str(a)) for s, a in together.alarms]
    assert len(alone.alarms) == 6
    clean = sweep(handed(), range(6), processes=2, check=lambda o: None)
    assert not clean.alarms and clean.seeds == list(range(6)) and clean.same_bits
    assert torch.equal(clean.outputs["out"][128:256], torch.arange(1, 129, dtype=torch.int32))


def test_a_sweep_ends_at_the_first_alarm_and_raises_it():
    report = sweep(handed("relaxed"), range(50), processes=1)
    assert report.seeds == [0]
    with pytest.raises(Race) as caught:
        report.raise_first()
    assert caught.value.kind == "release" and caught.value.seed == 0
    assert caught.value.findings[0].kind == "release"


def test_a_wrong_result_fails_the_sweep():
    def check(outputs):
        assert outputs["out"].sum() == 0, "wrong sum"

    with pytest.raises(AssertionError, match="wrong sum"):
        sweep(handed(), range(3), check=check)


@gluon.jit
def take_numbers(counter, out):
    gl.store(out + gl.program_id(0), gl.atomic_add(counter, 1, sem="relaxed", scope="gpu"))


def unordered_tickets(emu):
    out = torch.full((4,), -1, dtype=torch.int32)
    emu.launch(take_numbers, 4, (torch.zeros(1, dtype=torch.int32), out))
    return {"out": out}


@pytest.mark.parametrize("processes", [1, 2])
def test_bits_that_depend_on_the_schedule_fail_the_sweep(processes):
    with pytest.raises(AssertionError, match="depend on the schedule"):
        sweep(unordered_tickets, range(12), processes=processes)

    def check(outputs):
        assert sorted(outputs["out"].tolist()) == [0, 1, 2, 3]

    assert not sweep(unordered_tickets, range(12), processes=processes, same_bits=False, check=check).alarms


def test_an_error_in_a_worker_process_is_shown():
    def build(emu):
        if emu.seed == 3:
            raise KeyError("of the test")
        return unordered_tickets(emu)

    with pytest.raises(RuntimeError, match=r"seed 3 failed in a worker process:[\s\S]*of the test"):
        sweep(build, range(4), processes=2, same_bits=False)


# ----------------------------------------------------------------------------------------------------------- reports


def test_a_race_report_names_both_lines_and_the_reason():
    report = sweep(handed("relaxed"), range(1))
    text = str(report.alarms[0][1])
    assert "race (release) on r0.data + " in text
    assert "the writer's side publishes without release semantics" in text
    assert "first  write by r0.cta0.main at test_machine.py:" in text
    assert "gl.store(data + k * 128 + i, i + k)" in text
    assert "second read by r0.cta1.main" in text and "gl.load(data + k * 128 + i)" in text


@gluon.jit
def too_many_bytes(desc, out, N: gl.constexpr):
    box = gl.allocate_shared_memory(gl.bfloat16, [16, 64], desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), 1)
    mbarrier.expect(ready.index(0), N)
    tma_load(desc, [0, 0], ready.index(0), box)
    mbarrier.wait(ready.index(0), 0)


def test_a_deadlock_report_names_who_waits_for_what():
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    emu = Emulator(0)
    emu.launch(too_many_bytes, 1, (TensorDescriptor.from_tensor(x, [16, 64], BOX), x, 16 * 64 * 2 + 16))
    with pytest.raises(Deadlock) as caught:
        emu.run()
    text = str(caught.value)
    assert caught.value.kind == "deadlock"
    assert "r0.cta0.main waits for mbarrier r0.cta0.ready[0], parity 0" in text
    assert "0 of 1 arrivals and 16 bytes are missing" in text
    assert "mbarrier.wait(ready.index(0), 0)" in text


@gluon.jit
def wait_for_flag(flag, target):
    seen = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    while seen < target:
        seen = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")


def test_a_poll_that_nobody_ends_is_a_deadlock_with_the_values():
    emu = Emulator(0)
    emu.launch(wait_for_flag, 1, (torch.tensor([3], dtype=torch.int32), 5))
    with pytest.raises(Deadlock) as caught:
        emu.run()
    assert "a change of r0.flag[0], which is 3" in str(caught.value)


@gluon.jit
def in_turn(flag, n):
    pid = gl.program_id(0)
    seen = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    while seen < n - 1 - pid:
        seen = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    gl.atomic_add(flag, 1, sem="release", scope="gpu")


def chained(emu):
    flag = torch.zeros(1, dtype=torch.int32)
    emu.launch(in_turn, 4, (flag, 4))
    return {"flag": flag}


def test_a_wait_for_ctas_that_cannot_start_is_named():
    assert not sweep(chained, range(5)).alarms
    kinds = {alarm.kind for _, alarm in sweep(chained, range(10), resident=2, stop_at_first=False).alarms}
    assert kinds == {"residency"}


def test_a_foreign_kernel_takes_room():
    def build(emu):
        emu.hold_sms(1, until="end")
        return chained(emu)

    assert not sweep(chained, range(5), resident=4).alarms
    assert sweep(build, range(10), resident=4, stop_at_first=False).alarms

    def for_a_while(emu):
        emu.hold_sms(4, until="random")
        return chained(emu)

    assert not sweep(for_a_while, range(5), resident=4).alarms


@gluon.jit
def beyond(x, n):
    gl.store(x + n, 1)


def test_an_address_out_of_bounds_names_the_tensor():
    emu = Emulator(0)
    emu.launch(beyond, 1, (torch.zeros(4, dtype=torch.int32), 4))
    with pytest.raises(Fault, match=r"gl.store\(x \+ n, 1\).*4 bytes at r0.x \+ 16, whose size is 16 bytes") as caught:
        emu.run()
    assert caught.value.kind == "bounds"


# ----------------------------------------------------------------------------------------------------------- streams


@gluon.jit
def double(x):
    i = gl.arange(0, 128, LAYOUT)
    gl.store(x + i, 2 * gl.load(x + i) + 1)


@pytest.mark.parametrize("ordered", [True, False])
def test_streams(ordered):
    def build(emu):
        x = torch.zeros(128, dtype=torch.int32)
        emu.launch(double, 1, (x,), stream="a")
        emu.fill(x, 5, stream="a")
        if ordered:
            emu.wait_stream("b", "a")
        emu.launch(double, 1, (x,), stream="b")
        return {"x": x}

    if ordered:
        report = sweep(build, range(10), check=lambda o: None)
        assert not report.alarms and set(report.outputs["x"].tolist()) == {11}
    else:
        report = sweep(build, range(10), stop_at_first=False, same_bits=False)
        assert report.alarms and {a.kind for _, a in report.alarms} <= {"unordered", "slot-reuse"}


@gluon.jit
def with_bulk_store(desc, x, out):
    box = gl.allocate_shared_memory(gl.bfloat16, [16, 64], desc.layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    box.store(gl.full([16, 64], 1.0, gl.bfloat16, layout))
    fence_proxy_async()
    tma_store(desc, [0, 0], box)
    if gl.load(x) > 0:
        from_here = 0
        gl.store(out, from_here)
    else:
        gl.nvidia.hopper.tma.store_wait(0)


def test_a_cta_may_not_end_while_a_bulk_store_reads():
    for flag, alarm in ((0, False), (1, True)):
        x = torch.zeros(16, 64, dtype=torch.bfloat16)
        args = (TensorDescriptor.from_tensor(x, [16, 64], BOX), torch.tensor([flag], dtype=torch.int32))
        emu = Emulator(0)
        emu.launch(with_bulk_store, 1, (*args, torch.zeros(1, dtype=torch.int32)))
        if alarm:
            with pytest.raises(Fault) as caught:
                emu.run()
            assert caught.value.kind == "exit"
        else:
            emu.run()
            assert (x == 1).all()


# ----------------------------------------------------------------------------------------------------------- the rest


@gluon.jit
def uses_scan(x, REVERSE: gl.constexpr):
    i = gl.arange(0, 128, LAYOUT)
    gl.store(x + i, gl.associative_scan(gl.load(x + i), 0, twice_and, REVERSE))


@gluon.jit
def twice_and(a, b):
    return 2 * a + b


def test_scan():
    start = torch.arange(128, dtype=torch.int32) % 5
    for backwards in (False, True):
        x, want, total = start.clone(), [], 0
        for value in reversed(start.tolist()) if backwards else start.tolist():
            total = (2 * total + value) % 2**32
            want.append(total - 2**32 * (total >= 2**31))
        emu = Emulator(0)
        emu.launch(uses_scan, 1, (x, backwards))
        emu.run()
        assert x.tolist() == (want[::-1] if backwards else want)


@gluon.jit
def uses_high_product(x):
    i = gl.arange(0, 128, LAYOUT)
    gl.store(x + i, gl.umulhi(gl.load(x + i), i))


def test_what_is_not_emulated_is_said():
    emu = Emulator(0)
    emu.launch(uses_high_product, 1, (torch.zeros(128, dtype=torch.int32),))
    with pytest.raises(NotEmulated, match="umulhi"):
        emu.run()
    with pytest.raises(NotEmulated, match="no @gluon.jit function"):
        Emulator(0).launch(len, 1, ())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"strategy": "fair"}, "strategy must be one of random, pct, not 'fair'"),
        ({"lag": "never"}, "lag must be one of early, random, late, not 'never'"),
        ({"resident": 0}, "resident must be at least 1, not 0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Emulator(0, **options)


def test_arguments_are_checked():
    emu = Emulator(0)
    with pytest.raises(TypeError, match="hand_over has no parameter dat; it takes data, flag, out, N, SEM"):
        emu.launch(hand_over, 1, {"dat": 1})
    with pytest.raises(TypeError, match="argument target is missing"):
        emu.launch(wait_for_flag, 1, (torch.zeros(1, dtype=torch.int32),))
    with pytest.raises(ValueError, match="must be contiguous"):
        emu.register("x", torch.zeros(4, 4).t()[:2])
    with pytest.raises(ValueError, match="hold_sms needs"):
        emu.hold_sms(1)
    whole = torch.zeros(8)
    emu.register("tail", whole[4:])
    with pytest.raises(ValueError, match="overlaps"):
        emu.register("whole", whole)


def test_fixture_reads_like_a_launch(emulate):
    data, out = (torch.full((384,), -1, dtype=torch.int32) for _ in range(2))
    flag = torch.zeros(1, dtype=torch.int32)
    report = emulate(hand_over, 2, (data, flag, out, 3, "release"), seeds=range(5))
    assert len(report.seeds) == 5 and flag.item() == 1
    assert torch.equal(out.view(3, 128), torch.arange(128, dtype=torch.int32) + torch.arange(3)[:, None].int())
    with pytest.raises(Race):
        emulate(hand_over, 2, (data, flag.zero_(), out, 3, "relaxed"), seeds=range(5))


def test_the_first_seed_sees_fresh_arguments_too(emulate):
    # A counter that starts at 0 in every seed: if arguments were not set back, the second run would see 4.
    counter, out = torch.zeros(1, dtype=torch.int32), torch.full((1,), -1, dtype=torch.int32)
    emulate(take_numbers, 1, (counter, out), seeds=range(6))
    assert counter.item() == 1 and out.item() == 0


def test_a_tiny_kernel_takes_little_time():
    build = handed()
    build(Emulator(0))
    started = time.perf_counter()
    for seed in range(5):
        emu = Emulator(seed)
        build(emu)
        emu.run()
    assert (time.perf_counter() - started) / 5 < 0.2


def test_the_examples_of_the_documentation(tmp_path, capsys):
    page = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(examples) == 2
    for code in examples:
        (tmp_path / str(len(code))).mkdir()
        file = tmp_path / str(len(code)) / "example.py"
        file.write_text(code)
        runpy.run_path(str(file))
    assert capsys.readouterr().out == re.search(r"```text\n(.*?)```", page, re.S).group(1)


def test_the_kinds_of_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text()
    table = page[page.index("| kind |") : page.index("`docs/emulator-witness.md`")]
    assert set(re.findall(r"`([\w-]+)`", " ".join(line.split("|")[1] for line in table.splitlines() if line))) == set(
        KINDS
    )
