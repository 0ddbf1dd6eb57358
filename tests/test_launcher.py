"""run.py: what it checks, what it installs, and that a cut-off installation never passes for a whole one."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
COPIED = ("run.py", "pyproject.toml", "requirements")


def load(root: Path):
    spec = importlib.util.spec_from_file_location("launcher", root / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_tree(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source = REPOSITORY / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, root / name)
    package = root / "src" / "moeloom"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import sys\nif 'import' in sys.argv: import torch, numpy, safetensors, typer, rich, matplotlib\n"
        "print(sys.argv[1:])\nsys.exit(7 if 'fail' in sys.argv else 0)\n"
    )
    return root


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """run.py in a copy of the tree; pip and the network answer only what a test sets up."""
    monkeypatch.delenv("MOELOOM_TORCH", raising=False)
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    module = load(copy_tree(tmp_path / "clone"))
    monkeypatch.setattr(module, "answers", lambda url, seconds: False)
    monkeypatch.setattr(module, "ask_pip", lambda spec: None)
    monkeypatch.setattr(module, "first_import", lambda kind: None)
    monkeypatch.setattr(module, "check_venv_modules", lambda: None)
    return module


@pytest.fixture
def prepared(launcher, monkeypatch):
    """The launcher with a stand-in for the environment; ``.calls`` holds the pip calls."""
    launcher.calls = []

    def make_venv(base):
        launcher.clear_venv()
        os.makedirs(os.path.join(launcher.VENV, "bin"))
        launcher.set_state(base, busy=True)
        os.symlink(sys.executable, launcher.venv_python(launcher.VENV))
        os.makedirs(os.path.join(launcher.VENV, "lib", "torch"))
        return {"site": "lib", "pip": [99, 0]}

    def run_pip(arguments, fd=None):
        launcher.calls.append(arguments)
        return 0, ""

    monkeypatch.setattr(launcher, "make_venv", make_venv)

    def inspect_venv():
        return {"site": "lib", "pip": [99, 0]} if os.path.exists(launcher.venv_python(launcher.VENV)) else None

    monkeypatch.setattr(launcher, "inspect_venv", inspect_venv)
    monkeypatch.setattr(launcher, "run_pip", run_pip)
    return launcher


def valid(launcher, kind="train", driver=False):
    return launcher.ready(kind, launcher.stamp_digest(kind, os.environ, driver))


# ---------------------------------------------------------------- the Python that runs it


@pytest.mark.parametrize("version", [(3, 6, 15), (3, 9, 18), (2, 7, 18)])
def test_an_old_python_gets_a_message(launcher, version, monkeypatch):
    monkeypatch.setattr(launcher, "newer_python", lambda: "python3.12")
    with pytest.raises(launcher.LauncherError) as caught:
        launcher.check_python(version)
    assert "needs Python 3.10 or newer, this is " + ".".join(map(str, version)) in str(caught.value)
    assert "python3.12 run.py" in str(caught.value)


@pytest.mark.parametrize("version", [(3, 10, 0), (3, 13, 1), (4, 0, 0)])
def test_a_new_python_passes(launcher, version):
    launcher.check_python(version)


def test_a_python_that_only_lies_on_path_is_not_named(launcher, tmp_path, monkeypatch):
    shim = tmp_path / "bin" / "python3.13"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(shim.parent))
    assert launcher.newer_python() is None
    shim.write_text("#!/bin/sh\nexit 0\n")
    assert launcher.newer_python() == "python3.13"


def test_run_py_has_no_syntax_newer_than_python_3_6():
    tree = ast.parse((REPOSITORY / "run.py").read_text(), feature_version=(3, 6))
    newer = (ast.NamedExpr, getattr(ast, "Match", ast.NamedExpr))
    assert not [node for node in ast.walk(tree) if isinstance(node, newer)]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]


@pytest.mark.parametrize("lost", [["ensurepip"], ["venv", "ensurepip"]])
def test_a_python_without_venv_says_what_to_install(tmp_path, monkeypatch, lost):
    launcher = load(copy_tree(tmp_path))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in lost else find(name))
    with pytest.raises(launcher.LauncherError) as caught:
        launcher.make_venv("base")
    assert " and ".join(lost) in str(caught.value) and "-venv" in str(caught.value)
    assert not (tmp_path / ".venv").exists()


# ---------------------------------------------------------------- torch


@pytest.mark.parametrize(
    ("platform", "driver", "environ", "wanted"),
    [
        ("linux", False, {}, True),
        ("linux", True, {}, False),
        ("linux", False, {"PIP_NO_INDEX": "1"}, False),
        ("linux", False, {"PIP_NO_INDEX": "0"}, True),
        ("linux", False, {"MOELOOM_TORCH": "torch==2.10.0"}, True),
        ("darwin", False, {}, False),
        ("win32", False, {}, False),
    ],
)
def test_when_the_cpu_index_is_asked(launcher, platform, driver, environ, wanted):
    assert launcher.wants_cpu_index(driver, platform, environ) is wanted


def test_the_command_lines_for_torch(launcher):
    pin = launcher.TORCH
    first = launcher.torch_arguments(pin, cpu_index=True)
    assert first[-1] == pin
    assert first[first.index("--index-url") + 1] == "https://download.pytorch.org/whl/cpu"
    assert first[first.index("--retries") + 1] == "0"
    then = launcher.torch_arguments(pin, cpu_index=False)
    assert then[0] == pin and "--index-url" not in then and "-c" in then
    assert launcher.torch_arguments("torch==2.10.0", cpu_index=False) == ["torch==2.10.0"]


def test_moeloom_torch_replaces_the_pin(launcher):
    assert launcher.torch_spec({}) == launcher.TORCH
    assert launcher.torch_spec({"MOELOOM_TORCH": " torch==2.10.0 "}) == "torch==2.10.0"


@pytest.mark.parametrize("driver", [False, True])
def test_a_blocked_cpu_index_falls_back_to_the_same_pin(prepared, driver, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    prepared.prepare("train", driver)
    torch = [call for call in prepared.calls if prepared.TORCH in call]
    assert len(torch) == 1 and "--index-url" not in torch[0]
    said = capsys.readouterr().err
    assert prepared.CUDA_DOWNLOAD in said
    assert ("they would lie idle" in said) is not driver


def test_a_cpu_index_that_answers_is_used_alone(prepared, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(prepared, "answers", lambda url, seconds: True)
    prepared.prepare("train", False)
    torch = [call for call in prepared.calls if prepared.TORCH in call]
    assert len(torch) == 1 and prepared.TORCH_CPU_INDEX in torch[0]
    assert prepared.CUDA_DOWNLOAD not in capsys.readouterr().err


def test_a_cpu_index_that_fails_is_followed_by_the_default_index(prepared, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(prepared, "answers", lambda url, seconds: True)
    record = prepared.run_pip

    def run_pip(arguments, fd=None):
        record(arguments)
        return (1, "ERROR: no matching distribution") if prepared.TORCH_CPU_INDEX in arguments else (0, "")

    monkeypatch.setattr(prepared, "run_pip", run_pip)
    prepared.prepare("train", False)
    torch = [call for call in prepared.calls if prepared.TORCH in call]
    assert ["--index-url" in call for call in torch] == [True, False]
    assert valid(prepared)


def test_cuda_is_told_from_the_metadata(launcher):
    def report(*needs):
        return {"install": [{"metadata": {"version": "2.13.0", "requires_dist": list(needs)}}]}

    cuda = 'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"'
    assert launcher.brings_cuda(report("filelock", cuda), "linux")
    assert not launcher.brings_cuda(report("filelock", cuda), "darwin")
    assert not launcher.brings_cuda(report("filelock", 'cuda-bindings; extra == "x"'), "linux")
    assert not launcher.brings_cuda({}, "linux")


def test_an_address_that_does_not_answer_costs_at_most_the_limit(tmp_path):
    launcher = load(copy_tree(tmp_path))
    start = time.monotonic()
    assert launcher.answers("http://127.0.0.1:9/", 1) is False
    assert time.monotonic() - start < 2


# ---------------------------------------------------------------- stamps


def test_a_finished_installation_starts_at_once(prepared):
    prepared.prepare("test", False)
    assert valid(prepared, "train") and valid(prepared, "test")
    count = len(prepared.calls)
    prepared.prepare("train", False)
    prepared.prepare("test", False)
    assert len(prepared.calls) == count


def test_tests_come_on_top_of_training(prepared):
    prepared.prepare("train", False)
    assert valid(prepared, "train") and not valid(prepared, "test")
    prepared.calls.clear()
    prepared.prepare("test", False)
    assert valid(prepared, "test")
    assert not [call for call in prepared.calls if prepared.TORCH in call]


@pytest.mark.parametrize("own", [False, True])
def test_a_triton_that_torch_brings_is_kept(prepared, own, monkeypatch, capsys):
    monkeypatch.setattr(prepared, "torch_pins_triton", lambda: own)
    prepared.prepare("test", False)
    last = [call for call in prepared.calls if call[0] == "install"][-1]
    assert ("-r" in last) is not own and "--no-deps" in last
    if own:
        pins = (REPOSITORY / "requirements" / "test.txt").read_text().splitlines()
        left_out = {p for p in pins if p.startswith(("#", "-r", "triton=="))}
        assert {p for p in pins if p} - left_out <= set(last) and not left_out & set(last)
    assert ("torch brings its own triton" in capsys.readouterr().err) is own


@pytest.mark.parametrize(
    ("requires", "own"),
    [
        ("filelock\nsympy>=1.13", False),
        ('triton==3.7.1; platform_system == "Linux"', True),
        ('triton>=3; extra == "more"', False),
        ("tritonclient==1", False),
    ],
)
def test_whether_torch_brings_a_triton_is_read_from_its_metadata(prepared, requires, own, monkeypatch):
    monkeypatch.setattr(prepared.subprocess, "check_output", lambda *_, **__: requires.encode())
    assert prepared.torch_pins_triton() is own


@pytest.mark.parametrize("change", ["requirements", "pyproject", "driver", "torch", "python", "package", "interpreter"])
def test_any_change_voids_the_stamp(prepared, change, monkeypatch):
    prepared.prepare("train", False)
    assert valid(prepared)
    root, driver = Path(prepared.ROOT), False
    if change == "requirements":
        (root / "requirements" / "train.txt").write_text("numpy==1.0\n")
    elif change == "pyproject":
        (root / "pyproject.toml").write_text("")
    elif change == "driver":
        driver = True
    elif change == "torch":
        monkeypatch.setenv("MOELOOM_TORCH", "torch==2.10.0")
    elif change == "python":
        monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    elif change == "package":
        os.rmdir(os.path.join(prepared.VENV, "lib", "torch"))
    else:
        os.remove(prepared.venv_python(prepared.VENV))
    assert not valid(prepared, driver=driver)
    prepared.prepare("train", driver)
    assert valid(prepared, driver=driver)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"digest": 3}'])
def test_a_cut_off_stamp_is_no_stamp(prepared, text):
    prepared.prepare("train", False)
    Path(prepared.stamp_path("train")).write_text(text)
    assert not valid(prepared)


@pytest.mark.parametrize("at", range(3))
def test_an_interrupted_installation_leaves_no_stamp_and_is_repaired(prepared, at, monkeypatch, capsys):
    record = prepared.run_pip

    def interrupted(arguments, fd=None):
        record(arguments)
        if len(prepared.calls) > at:
            raise KeyboardInterrupt
        return 0, ""

    monkeypatch.setattr(prepared, "run_pip", interrupted)
    monkeypatch.setattr(prepared, "has_nvidia_driver", lambda: False)
    assert prepared.main(["train"]) == 130
    assert not valid(prepared)
    half = os.path.join(prepared.VENV, "lib", "half")
    os.mkdir(half)
    monkeypatch.setattr(prepared, "run_pip", record)
    prepared.prepare("train", False)
    assert valid(prepared)
    assert not os.path.exists(half)
    assert "cut off" in capsys.readouterr().err


def test_a_foreign_venv_is_kept_aside(prepared, capsys):
    os.mkdir(prepared.VENV)
    Path(prepared.VENV, "mine").write_text("x")
    prepared.prepare("train", False)
    assert valid(prepared)
    assert Path(prepared.VENV + ".old1", "mine").read_text() == "x"


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: [Errno 13] Permission denied: '/x'", "no permission"),
        ("WARNING: Retrying after connection broken by NewConnectionError", "does not answer"),
        ("ERROR: No matching distribution found for torch==2.13.0", "has no build for this Python"),
        ("ERROR: something else", "message is above"),
    ],
)
def test_a_failing_pip_gives_one_message_and_code_1(prepared, text, word, monkeypatch, capsys):
    monkeypatch.setattr(prepared, "run_pip", lambda arguments, fd=None: (1, text))
    assert prepared.main(["train"]) == 1
    said = capsys.readouterr().err
    assert word in said and "The next call repairs" in said and "Traceback" not in said
    assert not valid(prepared)


def test_a_folder_without_write_permission_gives_a_message(prepared, monkeypatch, capsys):
    def refuse(base):
        raise PermissionError(13, "Permission denied", prepared.VENV)

    monkeypatch.setattr(prepared, "make_venv", refuse)
    assert prepared.main(["train"]) == 1
    assert "Permission denied" in capsys.readouterr().err


def test_too_little_room_stops_before_anything_is_made(launcher, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**10, 10**10, 10**6))
    assert launcher.main(["train"]) == 1
    assert "too full" in capsys.readouterr().err
    assert not os.path.exists(launcher.VENV)


def test_an_installation_that_does_not_import_is_no_installation(prepared, monkeypatch, capsys):
    def broken(kind):
        raise prepared.LauncherError("the installed packages cannot be imported: libx is missing")

    monkeypatch.setattr(prepared, "first_import", broken)
    assert prepared.main(["train"]) == 1
    assert not valid(prepared)


# ---------------------------------------------------------------- lock


@pytest.mark.skipif(os.name == "nt", reason="holds the lock with POSIX calls")
def test_the_lock_waits_for_a_living_holder_and_not_for_a_dead_one(launcher, tmp_path, capsys):
    path = str(tmp_path / "lock")
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "f.write('4711'); f.flush(); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        threading.Timer(0.5, holder.kill).start()
        start = time.monotonic()
        with launcher.Lock(path):
            assert 0.3 < time.monotonic() - start < 10
    finally:
        holder.kill()
        holder.wait()
    assert "process 4711" in capsys.readouterr().err
    start = time.monotonic()
    with launcher.Lock(path):
        assert time.monotonic() - start < 0.2


# ---------------------------------------------------------------- commands


def test_what_each_verb_starts(launcher):
    kind, command, folder = launcher.command_for("train", ["--steps", "3"])
    assert (kind, command[1:], folder) == ("train", ["-m", "moeloom", "train", "--steps", "3"], None)
    kind, command, folder = launcher.command_for("test", ["-k", "x"])
    assert kind == "test" and folder == launcher.ROOT
    assert command[1:] == ["-m", "pytest", "--durations=10", "-m", launcher.DEFAULT_MARKERS, "-k", "x"]
    kind, command, folder = launcher.command_for("test", ["--all", "-k", "x"])
    assert command[1:] == ["-m", "pytest", "--durations=10", "-k", "x"]


def test_help_and_unknown_verbs(launcher, capsys):
    assert launcher.main(["--help"]) == 0
    assert "run.py train" in capsys.readouterr().out
    assert launcher.main([]) == 2
    assert launcher.main(["dance"]) == 2
    assert "'dance'" in capsys.readouterr().err


def test_the_environment_keeps_packages_inside_venv(launcher):
    env = launcher.pip_environment({"PIP_USER": "1", "PIP_TARGET": "/x", "PIP_NO_INDEX": "1", "PIP_INDEX_URL": "u"})
    assert env == {"PIP_USER": "0", "PIP_NO_INDEX": "1", "PIP_INDEX_URL": "u"}


@pytest.mark.skipif(os.name == "nt", reason="uses POSIX links and scripts")
def test_exit_codes_and_the_console_script_pass_through(prepared):
    """The real process, in an environment that is stamped as finished."""
    prepared.prepare("train", prepared.has_nvidia_driver())
    site = Path(prepared.VENV, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    site.mkdir(parents=True)
    shutil.copy(Path(prepared.VENV, "lib", "moeloom-src.pth"), site)
    Path(site, "moeloom-src.pth").write_text(os.path.join(prepared.ROOT, "src") + "\n")
    Path(prepared.VENV, "pyvenv.cfg").write_text(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    run = [sys.executable, os.path.join(prepared.ROOT, "run.py"), "eval"]
    done = subprocess.run([*run, "fail"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "['eval', 'fail']\n"), done.stderr
    assert subprocess.run(run, capture_output=True).returncode == 0
    script = subprocess.run([os.path.join(prepared.VENV, "bin", "moeloom"), "fail"], capture_output=True)
    assert script.returncode == 7


# ---------------------------------------------------------------- the real thing


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fresh_clone_gets_a_small_environment_that_starts_fast(tmp_path):
    root = copy_tree(tmp_path / "fresh clone")
    run = [sys.executable, "run.py", "eval"]
    done = subprocess.run([*run, "import"], cwd=root, capture_output=True, text=True)
    if "CUDA libraries" in done.stderr:
        pytest.skip("no CPU build of torch can be reached from here, so the size says nothing")
    assert done.returncode == 0, done.stderr
    files = (os.lstat(os.path.join(at, name)) for at, _, names in os.walk(root / ".venv") for name in names)
    assert sum(file.st_blocks * 512 for file in files) <= 1.2e9
    start = time.monotonic()
    assert subprocess.run(run, cwd=root, capture_output=True).returncode == 0
    assert time.monotonic() - start < 2
    check = subprocess.run([root / ".venv/bin/python", "-m", "pip", "check"], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout
    installed = subprocess.run([root / ".venv/bin/python", "-m", "pip", "list", "--format=json"], capture_output=True)
    names = {item["name"].lower() for item in json.loads(installed.stdout)}
    assert not {name for name in names if name.startswith(("nvidia", "cuda", "pytest"))}
