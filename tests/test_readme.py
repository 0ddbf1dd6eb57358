"""What the README shows is run: its Python, its commands' options, its links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


@pytest.mark.parametrize("number", [n for n, block in enumerate(BLOCKS) if "torchrun" not in block])
def test_python_block_runs(number, tmp_path):
    done = subprocess.run([sys.executable, "-c", BLOCKS[number]], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [n for n, block in enumerate(BLOCKS) if "torchrun" in block])
def test_torchrun_block_runs(number, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[number])
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29519", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr


def test_options_in_commands_exist():
    shown = set(re.findall(r"run\.py (train|generate|eval|doctor)([^\n#`]*)", README))
    assert {verb for verb, _ in shown} == {"train", "generate", "eval", "doctor"}
    for verb, rest in shown:
        known = subprocess.run(
            [sys.executable, "-m", "moeloom", verb, "--help"],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "300"},
        ).stdout
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in known, f"{verb} {option}"


@pytest.mark.parametrize(
    "document", ["README.md", "DESIGN.md", "CONTRIBUTING.md", "docs/public-reports.md", "docs/benchmarks.md"]
)
def test_links_and_names_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", re.sub(r"`[^`]*`", "", text)):
        assert target.startswith("http") or (ROOT / target).exists(), target
    for name in re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", text):
        found = list((ROOT / "tests").rglob(name[0]))
        assert found and name[1] in found[0].read_text(), name
    for word in re.findall(r"`((?:backends|runtime|train|cli|kernels|emulator|compile|bench)/[\w./]+)`", text):
        assert (ROOT / "src" / "moeloom" / word).exists() or (ROOT / "src" / "moeloom" / f"{word}.py").exists(), word
    assert "@" not in re.sub(r"\S+@\S+\.\S+", "", text), "a number was not filled in"
