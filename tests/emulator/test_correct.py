"""Correct kernels give no alarm, the right numbers and the same bits, under every schedule."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton", reason="the emulator takes the names of the language from triton")
pytest.importorskip("greenlet", reason="the emulator's partitions are greenlets")

from moeloom.emulator import sweep
from tests.emulator import harness

FILES = sorted(path.stem for path in (harness.FOLDER / "kernels").glob("[a-z]*.py")) + ["fused_forward"]
CASES = [f"{stem}.{name}" for stem in FILES for name in harness.load(stem).CASES]
#: All of scheduling that an option can fix: how partitions are chosen, and when pending operations take effect.
SCHEDULES = list(itertools.product(("random", "pct"), ("early", "random", "late")))


def run(path: str, seeds: range, **options) -> None:
    one = harness.case(path)
    report = sweep(one.build, seeds, check=one.check, same_bits=one.same_bits, **one.options | options)
    report.raise_first()
    assert report.seeds == list(seeds)


@pytest.mark.parametrize("path", CASES)
def test_no_alarm(path):
    run(path, range(2), processes=1)


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES)
def test_no_alarm_in_many_seeds_of_every_schedule(path):
    for strategy, lag in SCHEDULES:
        run(path, range(30 if harness.ALL_SEEDS else 4), strategy=strategy, lag=lag)


@pytest.mark.parametrize("path", ["gemm.shared", "turnstile.turnstile", "fused_forward.one_rank"])
def test_a_wrong_answer_would_be_seen(path):
    one = harness.case(path)
    outputs = {name: want.clone() for name, want in one.answer.items()}
    one.check(outputs)
    name = next(iter(outputs))
    outputs[name].view(-1)[3] += 100
    with pytest.raises(AssertionError):
        one.check(outputs)
