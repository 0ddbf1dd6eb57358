"""Skips what this machine cannot run, and names at the end of a run all that did not run."""

from __future__ import annotations

from collections import Counter

import pytest

LARGE_BYTES = 48e9
MARKERS = ("large", "gpu", "slow")


def _device_memory() -> float | None:
    """Return the memory of the first CUDA device in bytes, or None without a device."""
    # Only asked if a test needs it: runs of tests that need no torch stay fast.
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu or large where the device is missing or too small."""
    wanting = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("large")]
    if not wanting:
        return
    memory = _device_memory()
    for item in wanting:
        large = item.get_closest_marker("large")
        if memory is None:
            item.add_marker(pytest.mark.skip(reason=f"marker {'large' if large else 'gpu'}: no CUDA device"))
        elif large and memory < LARGE_BYTES:
            item.add_marker(pytest.mark.skip(reason=f"marker large: {memory / 1e9:.0f} GB of device memory, needs 48"))


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return "skipped, " + reason.removeprefix("Skipped: ")


def _deselect_reason(item: pytest.Item) -> str:
    for name in MARKERS:
        if item.get_closest_marker(name):
            return f"not selected, marker {name}" + (" (run.py test --all runs it)" if name == "slow" else "")
    return "not selected by -k or -m"


def pytest_terminal_summary(terminalreporter) -> None:
    """Count and name, by reason, the tests that were collected and did not run."""
    left: dict[str, Counter[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        left.setdefault(_skip_reason(report), Counter())[report.nodeid.split("[")[0]] += 1
    for item in terminalreporter.stats.get("deselected", []):
        left.setdefault(_deselect_reason(item), Counter())[item.nodeid.split("[")[0]] += 1
    if not left:
        return
    total = sum(sum(names.values()) for names in left.values())
    terminalreporter.section(f"not run here: {total}")
    for reason, names in sorted(left.items()):
        terminalreporter.write_line(f"{sum(names.values())} {reason}")
        for name, count in sorted(names.items()):
            terminalreporter.write_line(f"    {name}" + (f" ({count} cases)" if count > 1 else ""))


@pytest.fixture
def poison():
    """Fill memory that torch hands out uninitialised with NaN (integers: their largest value) during the test."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
