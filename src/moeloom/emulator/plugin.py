"""The pytest fixture ``emulate``. In a ``conftest.py``: ``pytest_plugins = ["moeloom.emulator.plugin"]``."""

from __future__ import annotations

import pytest


@pytest.fixture
def emulate():
    """``emulate(kernel, grid, args, seeds=range(10), num_warps=4, **options)``, as :func:`moeloom.emulator.emulate`."""
    from moeloom.emulator import emulate as run

    return run
