#!/usr/bin/env python3
"""Start moeloom from a clone: make ``.venv``, install the tested versions, run. Standard library only.

    python3 run.py train [OPTIONS]       train the small language model
    python3 run.py test [--all] [...]    run the tests; more arguments go to pytest
    python3 run.py doctor|generate|eval [OPTIONS]

The first call installs (minutes); later calls start at once. The system Python is never changed.
This file has to parse on Python 3.6, so that an old Python gets a message and not a syntax error.
"""

import ctypes
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
WINDOWS = os.name == "nt"
OLDEST = (3, 10)
TESTED = "3.10 to 3.13"

TORCH = "torch==2.13.0"
# Measured for the pin above on Linux x86-64: the wheel alone from the CPU index, and with CUDA from the default index.
CPU_DOWNLOAD = "about 0.2 GB"
CUDA_DOWNLOAD = "about 2.7 GB"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 3
ROOM_NEEDED = 1_500_000_000
PIP_WITH_REPORTS = (23, 2)
PIP = "pip==26.3"

MODULE_VERBS = ("train", "doctor", "generate", "eval")
DEFAULT_MARKERS = "not slow and not gpu and not large"
SETS = {"train": ["train"], "test": ["train", "test"]}
FIRST_IMPORT = {
    "train": "torch, torch._dynamo, numpy, safetensors.torch, typer, rich.live, matplotlib.backends.backend_agg",
    "test": "pytest, pytest_timeout, hypothesis.extra.numpy, torch.testing, greenlet",
}


class LauncherError(Exception):
    """A reason to stop that the user can act on; its text is the whole message."""


class Terminated(BaseException):
    """SIGTERM arrived while the environment was being prepared."""


def say(text):
    """Print one line of the launcher's own; stdout belongs to the command that is started."""
    print("moeloom: " + text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the Python that runs this file


def newer_python():
    """Return the name of a Python on PATH that is new enough and starts, or None."""
    for minor in (13, 12, 11, 10):
        name = f"python3.{minor}"
        path = shutil.which(name)
        if not path:
            continue
        try:
            # A version manager may put a name on PATH that only prints an error, so a name alone proves nothing.
            code = subprocess.call([path, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=10)
        except (OSError, subprocess.SubprocessError):
            continue
        if code == 0:
            return name
    return None


def check_python(version):
    """Raise LauncherError if ``version`` (as in ``sys.version_info``) is too old."""
    if tuple(version[:2]) >= OLDEST:
        return
    found = ".".join(map(str, version[:3]))
    text = f"moeloom needs Python 3.10 or newer, this is {found} ({sys.executable})."
    other = newer_python()
    if other:
        text += " This machine has a newer one: " + other + " run.py " + " ".join(sys.argv[1:])
    raise LauncherError(text)


def check_venv_modules():
    """Raise LauncherError if this Python cannot make a virtual environment with pip."""
    lost = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if lost:
        package = "python{}.{}-venv".format(*sys.version_info[:2])
        raise LauncherError(
            "this Python ({}) lacks the standard module{} {}, so .venv cannot be made. On Debian and Ubuntu: "
            "sudo apt install {}. Elsewhere: use a full build of Python (python.org, conda, uv python install). "
            "Nothing was installed.".format(sys.executable, "s" * (len(lost) > 1), " and ".join(lost), package)
        )


def has_nvidia_driver():
    """Tell whether an NVIDIA driver is present, without torch and without starting a process."""
    if sys.platform == "darwin":
        return False
    if os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi"):
        return True
    try:
        ctypes.CDLL("nvcuda.dll" if WINDOWS else "libcuda.so.1")
    except OSError:
        return False
    return True


# ---------------------------------------------------------------- what .venv holds


def venv_python(venv):
    """Return the path of the interpreter inside ``venv``."""
    return os.path.join(venv, "Scripts", "python.exe") if WINDOWS else os.path.join(venv, "bin", "python")


def torch_spec(environ):
    """Return the requirement for torch: the pin, or what MOELOOM_TORCH says."""
    return environ.get("MOELOOM_TORCH", "").strip() or TORCH


def foundation(environ, driver):
    """Return the digest of what cannot be changed inside a finished environment: Python, torch, driver or none."""
    python = [sys.implementation.name, sys.version_info[:2], getattr(sys, "abiflags", ""), sys.platform]
    return hashlib.sha256(json.dumps([python, torch_spec(environ), driver]).encode()).hexdigest()


def stamp_digest(kind, environ, driver):
    """Return the digest that a valid stamp of the requirement set ``kind`` holds."""
    digest = hashlib.sha256(foundation(environ, driver).encode())
    names = [os.path.join("requirements", name + ".txt") for name in SETS[kind]] + ["pyproject.toml"]
    for name in names:
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read() + b"\0")
    return digest.hexdigest()


def read_json(path):
    """Return the dict in a JSON file; an absent, cut-off or foreign file gives an empty one."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_whole(path, text, mode=0o644):
    """Write a file so that a reader sees either all of it or the old one."""
    part = path + ".part"
    with open(part, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
    os.chmod(part, mode)
    os.replace(part, path)


def stamp_path(kind):
    """Return the path of the stamp of a requirement set."""
    return os.path.join(VENV, "moeloom-" + kind + ".json")


def state_path():
    """Return the path of the file that marks ``.venv`` as made here and tells whether an install was cut off."""
    return os.path.join(VENV, "moeloom-env.json")


def entries(site):
    """Return the packages and modules that lie in a site-packages folder."""
    return sorted(n for n in os.listdir(site) if not n.startswith(("~", "_")) and not n.endswith(".dist-info"))


def ready(kind, digest):
    """Tell whether ``.venv`` holds the whole requirement set, by a few file reads and nothing slower."""
    stamp = read_json(stamp_path(kind))
    if stamp.get("digest") != digest or not os.access(venv_python(VENV), os.X_OK):
        return False
    try:
        return set(stamp["entries"]) <= set(entries(os.path.join(VENV, stamp["site"])))
    except (OSError, KeyError, TypeError):
        return False


# ---------------------------------------------------------------- one launcher at a time


class Lock:
    """A file lock that the system itself drops when its holder dies, so a stale one cannot exist."""

    def __init__(self, path):
        """Open (and make) the lock file at ``path``; the lock is taken on entry."""
        self.path = path
        self.fd = None

    def _try(self):
        if WINDOWS:
            import msvcrt

            # Far behind the text: Windows forbids others to read a locked byte.
            os.lseek(self.fd, 4096, os.SEEK_SET)
            msvcrt.locking(self.fd, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __enter__(self):
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        told = False
        while True:
            try:
                self._try()
                break
            except (BlockingIOError, PermissionError):
                if not told:
                    holder = os.pread(self.fd, 32, 0).decode("ascii", "replace").strip() if not WINDOWS else ""
                    say(f"another run.py (process {holder or 'unknown'}) prepares .venv; waiting for it")
                    told = True
                time.sleep(0.2)
        os.lseek(self.fd, 0, os.SEEK_SET)
        os.write(self.fd, str(os.getpid()).encode().ljust(32))
        return self

    def __exit__(self, *_):
        os.close(self.fd)


# ---------------------------------------------------------------- pip


def pip_environment(environ):
    """Return the environment for pip: the user's, less what would send packages outside ``.venv``."""
    env = {k: v for k, v in environ.items() if k not in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER")}
    env["PIP_USER"] = "0"
    return env


def run_pip(arguments, fd=None):
    """Run pip inside ``.venv``, pass its output on, and return (exit code, its error text)."""
    # -I keeps PYTHONPATH out: a package found there would count as installed.
    command = [venv_python(VENV), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"] + arguments
    # The child holds the lock too: if only the launcher is killed, nobody else may touch .venv before pip has ended.
    keep = {} if WINDOWS or fd is None else {"pass_fds": (fd,)}
    child = subprocess.Popen(
        command,
        env=pip_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        **keep,
    )
    lines = []

    def pump():
        for raw in child.stderr:
            line = raw.decode("utf-8", "replace")
            lines.append(line)
            sys.stderr.write(line)
            sys.stderr.flush()

    reader = threading.Thread(target=pump, daemon=True)
    reader.start()
    try:
        code = child.wait()
    except BaseException:
        stop(child)
        raise
    reader.join(5)
    return code, "".join(lines[-200:])


def stop(child):
    """End a child process, gently first."""
    child.terminate()
    try:
        child.wait(10)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()


def install_arguments(terminal):
    """Return the pip arguments that every install shares."""
    # Most of torch's files are never imported, so compiling them all would cost more time than anything else here.
    # Without a terminal a progress bar is noise; with one, pip's own lines show what it does.
    return ["install", "--no-compile"] + (["--progress-bar", "on"] if terminal else ["--quiet"])


def why_pip_failed(what, text):
    """Turn pip's error text into one message with a next step."""
    low = text.lower()
    again = " The next call repairs .venv."
    if "no space left" in low or "disk quota" in low:
        return f"the disk is full: {what} could not be installed. Free some space (training needs 1.2 GB)." + again
    if "permission denied" in low or "read-only file system" in low:
        return f"{what} could not be written into {VENV}: no permission." + again
    network = ("connection", "newconnectionerror", "timed out", "name resolution", "name or service", "proxy", "ssl")
    if any(word in low for word in network):
        return (
            f"{what} could not be downloaded: the network or the package index does not answer (see pip above). "
            "pip's own settings apply, for example HTTPS_PROXY, PIP_INDEX_URL, PIP_FIND_LINKS." + again
        )
    if "no matching distribution" in low:
        return (
            f"{what}: the package index has no build for this Python ({sys.version.split()[0]}, {sys.platform}); "
            f"moeloom is tested on Python {TESTED}." + again
        )
    return f"{what} could not be installed; pip's own message is above." + again


# ---------------------------------------------------------------- torch


def flag(environ, name):
    """Read a pip switch from the environment as pip does."""
    return environ.get(name, "").lower() not in ("", "0", "false", "no", "off", "f", "n")


def wants_cpu_index(driver, platform, environ):
    """Tell whether to ask PyTorch's CPU index first."""
    # Only on Linux does the default index hold builds that pull in CUDA, on x86-64 and on aarch64 alike.
    return platform.startswith("linux") and not driver and not flag(environ, "PIP_NO_INDEX")


def torch_arguments(spec, cpu_index):
    """Return the pip arguments that install torch, after the shared ones."""
    if cpu_index:
        # The pinned requirements bring its dependencies; the CPU index need not hold them.
        return ["--no-deps", "--index-url", TORCH_CPU_INDEX, "--retries", "0", "--timeout", "5", spec]
    # An own torch may need other versions than the pins, so only the pinned one is held to them.
    return [spec] + (["-c", os.path.join(ROOT, "requirements", "train.txt")] if spec == TORCH else [])


def answers(url, seconds):
    """Tell whether a web address answers at all within ``seconds``, through the user's proxy if there is one."""
    result = []

    def ask():
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
            result.append(True)
        except urllib.error.HTTPError:
            result.append(True)
        except OSError as error:
            # pip may know a certificate that this Python does not: that is an answer. The rest is a blocked network.
            blocked = (socket.gaierror, socket.timeout, ConnectionError)
            reason = getattr(error, "reason", error)
            result.append(not isinstance(reason, blocked) and "certificate" in str(reason).lower())

    # Name resolution knows no timeout, hence the thread that may be left behind.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(result and result[0])


def brings_cuda(report, platform):
    """Tell from pip's report on torch whether this build pulls in the CUDA libraries."""
    if not platform.startswith("linux"):
        return False
    needs = [need for item in report.get("install", []) for need in item.get("metadata", {}).get("requires_dist", [])]
    return any(need.startswith(("nvidia-", "cuda-")) and "extra ==" not in need for need in needs)


def ask_pip(spec):
    """Return pip's report on what it would install for torch, or None if it cannot tell cheaply."""
    question = ["install", "--dry-run", "--no-deps", "--retries", "0", "--quiet", "--report", "-", spec]
    try:
        out = subprocess.check_output(
            [venv_python(VENV), "-I", "-m", "pip"] + question,
            env=pip_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return json.loads(out.decode("utf-8"))
    except (subprocess.SubprocessError, ValueError):
        return None


def announce_default(spec, driver, report, platform):
    """Say how large the download from the default index is, before it starts."""
    if report is not None and not brings_cuda(report, platform):
        items = report.get("install", [])
        local = bool(items) and items[0].get("download_info", {}).get("url", "").startswith("file:")
        say(f"{spec} from the default index, a build without CUDA" + (" (a local file)" if local else ""))
        return
    if not platform.startswith("linux"):
        return
    verb = "brings" if report is not None else "may bring"
    say(f"{spec} from the default index {verb} the CUDA libraries: {CUDA_DOWNLOAD} to download.")
    if not driver:
        say("There is no NVIDIA driver here, so they would lie idle. To avoid them: press Ctrl-C, then make")
        say(f"{TORCH_CPU_INDEX} reachable, or put a CPU build of torch in a folder and set PIP_FIND_LINKS to it.")
        if sys.stderr.isatty():
            say("Going on in 10 seconds.")
            time.sleep(10)


# ---------------------------------------------------------------- making .venv


class Steps:
    """Number the steps of an installation and tell how long each took."""

    def __init__(self, total):
        """Start counting towards ``total`` steps."""
        self.total, self.number = total, 0

    def __call__(self, what, action):
        """Run ``action`` as the next step and return its result."""
        self.number += 1
        say(f"[{self.number}/{self.total}] {what} ...")
        start = time.monotonic()
        result = action()
        say(f"[{self.number}/{self.total}] {what}: {time.monotonic() - start:.1f} s")
        return result


def inspect_venv():
    """Return {"site": ..., "pip": [major, minor]} of ``.venv``, or None if it does not run."""
    code = (
        "import json, os, pip, sys, sysconfig; print(json.dumps({'site': os.path.relpath("
        "sysconfig.get_paths()['purelib'], sys.prefix), 'pip': [int(n) for n in pip.__version__.split('.')[:2]]}))"
    )
    try:
        out = subprocess.check_output([venv_python(VENV), "-I", "-c", code], stderr=subprocess.DEVNULL, timeout=120)
        return json.loads(out.decode("utf-8"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def reusable(base):
    """Return ``inspect_venv()`` if packages can be put on top of what ``.venv`` holds, else None, and say why."""
    if not os.path.lexists(VENV):
        return None
    state = read_json(state_path())
    if not state:
        return None
    if state.get("busy"):
        say("an earlier installation was cut off; making .venv anew")
    elif state.get("foundation") != base:
        say("the Python version, the torch version or the driver changed; making .venv anew")
    else:
        stamp = read_json(stamp_path("train"))
        info = inspect_venv()
        whole = info and set(stamp.get("entries", [])) <= set(entries(os.path.join(VENV, info["site"])))
        if whole:
            return info
        say(".venv is damaged; making it anew")
    return None


def clear_venv():
    """Remove the ``.venv`` that this launcher made; set aside one that it did not make."""
    if not os.path.lexists(VENV):
        return
    if os.path.isdir(VENV) and not os.path.islink(VENV) and (read_json(state_path()) or not os.listdir(VENV)):
        shutil.rmtree(VENV)
        return
    number = 1
    while os.path.lexists(f"{VENV}.old{number}"):
        number += 1
    os.rename(VENV, f"{VENV}.old{number}")
    say(f".venv was not made by run.py; it is kept as .venv.old{number}")


def set_state(base, busy):
    """Record what ``.venv`` is made for and whether an installation is going on in it."""
    write_whole(state_path(), json.dumps({"foundation": base, "busy": busy}))


def make_venv(base):
    """Make an empty ``.venv`` and return ``inspect_venv()`` of it."""
    check_venv_modules()
    clear_venv()
    free = shutil.disk_usage(ROOT).free
    if free < ROOM_NEEDED:
        raise LauncherError(
            f"the disk is too full: the environment needs {ROOM_NEEDED / 1e9:.1f} GB while it is made, {ROOT} has "
            f"{free / 1e9:.1f} GB left. Nothing was installed."
        )
    os.mkdir(VENV)
    set_state(base, busy=True)
    done = subprocess.run(
        [sys.executable, "-m", "venv", VENV], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    info = inspect_venv() if done.returncode == 0 else None
    if info is None:
        last = (done.stdout.decode("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
        raise LauncherError(f".venv could not be made by {sys.executable} -m venv: {last}. The next call tries again.")
    return info


def install_torch(spec, driver, pip_version, install, fd):
    """Install torch: from PyTorch's CPU index if that fits and answers, else from the default index."""
    if wants_cpu_index(driver, sys.platform, os.environ):
        if answers(TORCH_CPU_INDEX + "/torch/", PROBE_SECONDS):
            say(f"no NVIDIA driver here: {spec} from PyTorch's CPU index, {CPU_DOWNLOAD} to download")
            code, text = run_pip(install + torch_arguments(spec, cpu_index=True), fd)
            if code == 0:
                return
            if "no space left" in text.lower():
                raise LauncherError(why_pip_failed(spec, text))
        say("PyTorch's CPU index cannot be used from here; taking the default index")
    # An older pip would download the whole build only to tell what it is.
    report = ask_pip(spec) if tuple(pip_version) >= PIP_WITH_REPORTS else None
    announce_default(spec, driver, report, sys.platform)
    code, text = run_pip(install + torch_arguments(spec, cpu_index=False), fd)
    if code:
        raise LauncherError(why_pip_failed(spec, text))


def torch_pins_triton():
    """Tell whether the torch in ``.venv`` names a triton of its own."""
    code = "import importlib.metadata as m; print('\\n'.join(m.requires('torch') or []))"
    try:
        out = subprocess.check_output(
            [venv_python(VENV), "-I", "-c", code], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return any(re.match(r"triton\b", line) and "extra ==" not in line for line in out.decode("utf-8").splitlines())


def install_requirements(name, install, fd):
    """Install one file of pinned requirements."""
    path = os.path.join(ROOT, "requirements", name + ".txt")
    pins = ["-r", path]
    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    # Another triton under a CUDA build of torch would break torch.compile, and the kernels take any from 3.6 to 3.9.
    if any(line.startswith("triton==") for line in lines) and torch_pins_triton():
        say(f"requirements/{name}.txt: torch brings its own triton; it is kept")
        pins = [line for line in lines if line and not line.startswith(("#", "-", "triton=="))]
    # The files hold every dependency, so there is nothing to resolve.
    code, text = run_pip(install + ["--no-deps"] + pins, fd)
    if code:
        raise LauncherError(why_pip_failed(f"requirements/{name}.txt", text))


def first_import(kind):
    """Import what a run imports: it compiles those files once, and shows that the installation works."""
    code = "import " + ", ".join(FIRST_IMPORT[name] for name in SETS[kind])
    done = subprocess.run(
        [venv_python(VENV), "-I", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    if done.returncode:
        last = (done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise LauncherError(f"the installed packages cannot be imported: {last}. The next call makes .venv anew.")


def link_package(site):
    """Make ``import moeloom`` and ``.venv/bin/moeloom`` use the sources of this clone."""
    # Relative paths: the clone can be moved, and a .pth file with other than ASCII letters is not safe everywhere.
    folder = os.path.join(VENV, site)
    write_whole(os.path.join(folder, "moeloom-src.pth"), os.path.relpath(os.path.join(ROOT, "src"), folder) + "\n")
    if WINDOWS:
        script, text = "Scripts\\moeloom.cmd", '@"%~dp0python.exe" -m moeloom %*\n'
    else:
        script, text = "bin/moeloom", '#!/bin/sh\nexec "$(dirname -- "$0")/python" -m moeloom "$@"\n'
    write_whole(os.path.join(VENV, script), text, 0o755)


def prepare(kind, driver):
    """Bring ``.venv`` to the requirement set ``kind``; return at once if it is there already."""
    digest = stamp_digest(kind, os.environ, driver)
    if ready(kind, digest):
        return
    base = foundation(os.environ, driver)
    spec = torch_spec(os.environ)
    install = install_arguments(sys.stderr.isatty())
    with Lock(os.path.join(ROOT, ".venv.lock")) as lock:
        if ready(kind, digest):
            return
        start = time.monotonic()
        info = reusable(base)
        fresh = info is None
        step = Steps(1 + 2 * fresh + len(SETS[kind]))
        if fresh:
            say(f"preparing {VENV} with Python {sys.version.split()[0]} (once; later calls start at once)")
            info = step("make .venv", lambda: make_venv(base))
            if tuple(info["pip"]) < PIP_WITH_REPORTS and run_pip([*install, PIP], lock.fd)[0] == 0:
                info = inspect_venv() or info
        for name in SETS:
            if os.path.exists(stamp_path(name)):
                os.remove(stamp_path(name))
        set_state(base, busy=True)
        if fresh:
            step("PyTorch", lambda: install_torch(spec, driver, info["pip"], install, lock.fd))
        for name in SETS[kind]:
            step(f"requirements/{name}.txt", lambda: install_requirements(name, install, lock.fd))  # noqa: B023
        if run_pip(["check", "--quiet"], lock.fd)[0]:
            say("the versions above do not fit together (MOELOOM_TORCH?); going on")
        step("first import", lambda: first_import(kind))
        link_package(info["site"])
        set_state(base, busy=False)
        have = entries(os.path.join(VENV, info["site"]))
        for name in SETS[kind]:
            stamp = {"digest": stamp_digest(name, os.environ, driver), "site": info["site"], "entries": have}
            write_whole(stamp_path(name), json.dumps(stamp))
        say(f".venv is ready after {time.monotonic() - start:.0f} s")


# ---------------------------------------------------------------- commands


def command_for(verb, rest):
    """Return (requirement set, command line, working folder or None) for a verb of run.py."""
    python = venv_python(VENV)
    if verb in MODULE_VERBS:
        return "train", [python, "-m", "moeloom", verb, *rest], None
    everything = "--all" in rest
    chosen = [] if everything else ["-m", DEFAULT_MARKERS]
    rest = [argument for argument in rest if argument != "--all"]
    return "test", [python, "-m", "pytest", "--durations=10", *chosen, *rest], ROOT


def start(command, folder):
    """Become ``command``, so that its signals and its exit code are the caller's own."""
    if folder:
        os.chdir(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    if WINDOWS:
        raise SystemExit(subprocess.call(command))
    os.execv(command[0], command)


def on_terminate(*_):
    """Turn SIGTERM into an exception, so that pip is ended too."""
    raise Terminated


def main(arguments):
    """Run the launcher and return its exit code; on success it does not return."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__.strip())
        return 0 if arguments else 2
    verb, rest = arguments[0], arguments[1:]
    try:
        check_python(sys.version_info)
        if verb not in MODULE_VERBS + ("test",):
            say("unknown command {!r}; there are: {}, test".format(verb, ", ".join(MODULE_VERBS)))
            return 2
        kind, command, folder = command_for(verb, rest)
        signal.signal(signal.SIGTERM, on_terminate)
        prepare(kind, has_nvidia_driver())
        start(command, folder)
    except LauncherError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("stopped. The next call repairs .venv if it was being made.")
        return 130
    except Terminated:
        say("ended by SIGTERM. The next call repairs .venv if it was being made.")
        return 143
    except OSError as error:
        hint = f" run.py has to write into {ROOT}." if isinstance(error, PermissionError) else ""
        say(f"{error.strerror or error}: {error.filename or ROOT}.{hint} The next call repairs .venv.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
