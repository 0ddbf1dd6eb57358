"""The detector is tested by bugs: each must raise an alarm, and one that names what is wrong."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("triton", reason="the emulator takes the names of the language from triton")
pytest.importorskip("greenlet", reason="the emulator's partitions are greenlets")

from moeloom.emulator import KINDS, sweep
from tests.emulator import harness
from tests.emulator.planted import FUSED, MINIMAL, PLANTS

SEEDS = 30 if harness.ALL_SEEDS else 6
#: In the quick suite the fused forward stands for what needs all of it: a bug that only its parts together have.
QUICK_KINDS = ("barrier", "bulk-wait", "proxy-fence", "scope", "slot-reuse")
QUICK_FUSED = list({plant.kind: plant for plant in reversed(FUSED) if plant.kind in QUICK_KINDS}.values())


def identify(plant) -> str:
    return f"{plant.kind}: {plant.name} ({plant.case})"


def alarms(plant, seeds: range, **options) -> list:
    edited, needed = plant.load()
    # Outputs of a broken kernel are not compared: the alarm has to come from the detector.
    return sweep(edited.build, seeds, same_bits=False, stop_at_first=False, **needed | options).alarms


def test_the_list_is_complete():
    minimal = Counter(plant.kind for plant in MINIMAL)
    assert {kind: minimal[kind] for kind in KINDS if minimal[kind] < 2} == {}
    assert set(minimal) == set(KINDS)
    assert len(FUSED) >= 12 and len({plant.kind for plant in FUSED}) >= 10
    assert len({identify(plant) for plant in PLANTS}) == len(PLANTS)
    assert all(kind in KINDS for plant in PLANTS for kind in (plant.kind, *plant.also))


@pytest.mark.parametrize("plant", MINIMAL + QUICK_FUSED, ids=identify)
def test_is_caught(plant):
    kinds = []
    for seed in range(3):
        kinds += [alarm.kind for _, alarm in alarms(plant, range(seed, seed + 1), processes=1)]
        if any(map(plant.is_right, kinds)):
            return
    pytest.fail(f"alarms of three seeds: {kinds}")


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=identify)
def test_is_caught_in_all_seeds_but_one(plant):
    found = alarms(plant, range(SEEDS), diagnose=True)
    right = [seed for seed, alarm in found if plant.is_right(alarm.kind)]
    assert len(right) >= SEEDS - 1, Counter(alarm.kind for _, alarm in found)


@pytest.mark.parametrize("plant", [p for p in PLANTS if p.edits and p.options], ids=identify)
def test_options_of_a_bug_are_no_bug(plant):
    one = harness.case(plant.case)
    report = sweep(one.build, range(3), check=one.check, processes=1, **one.options | plant.options)
    report.raise_first()
