"""The emulator under the newest Triton: its own quick tests again, in a process that has no other one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the emulator takes the names of the language from triton")
pytest.importorskip("greenlet", reason="the emulator's partitions are greenlets")

from moeloom.compile import versions

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quick_tests_pass_under_the_newest_triton():
    newest = versions.resolve("newest", print)
    paths = [str(newest.folder)] if newest.folder else []
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", str(HERE)]
    shown = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"], env=env, capture_output=True, text=True
    )
    assert shown.stdout.strip() == newest.version
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=HERE.parent.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
