"""Triton versions side by side: where they lie, and how one is fetched.

The version of this Python is used as it is. Others are whole wheels in ``<prefix>/triton/<version>``, put in front of
the module path of the process that compiles; no environment ever holds two.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moeloom.errors import ArgumentError, ToolchainError, complain
from moeloom.toolchain import check_version, parse_version

#: The newest version that the kernels support and that has a wheel for this Python.
NEWEST = "3.9.0" if sys.version_info >= (3, 11) else "3.8.0"
#: Measured for CPython 3.11 on Linux x86-64: download and unpacked size in MB.
SIZES = {"3.6.0": (188, 673), "3.7.1": (198, 723), "3.8.0": (248, 938), "3.9.0": (286, 1048)}


@dataclass(frozen=True)
class Toolchain:
    """One Triton: its version, and the folder that holds it; None: that of this Python."""

    version: str
    folder: Path | None = None

    @property
    def programs(self) -> Path | None:
        """Folder of the programs that come with it (``ptxas``, ``nvdisasm``), or None."""
        root = self.folder / "triton" if self.folder else _installed_root()
        found = root / "backends" / "nvidia" / "bin" if root else None
        return found if found and found.is_dir() else None


def _installed_root() -> Path | None:
    spec = importlib.util.find_spec("triton")
    return Path(spec.origin).parent if spec and spec.origin else None


def installed() -> Toolchain | None:
    """Return the Triton of this Python, without importing it; None if there is none."""
    if _installed_root() is None:
        return None
    try:
        return Toolchain(importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return Toolchain("unknown")


def home() -> Path:
    """Folder that holds the other versions."""
    return Path(sys.prefix) / "triton"


def fetched() -> list[Toolchain]:
    """Return the versions that lie in :func:`home`, the newest first."""
    found = [Toolchain(folder.name, folder) for folder in home().glob("*") if _version_in(folder) == folder.name]
    return sorted(found, key=lambda t: parse_version(t.version), reverse=True)


def _version_in(folder: Path) -> str | None:
    found = sorted(folder.glob("triton-*.dist-info"))
    return found[0].name.removeprefix("triton-").removesuffix(".dist-info") if found else None


def resolve(name: str, say: Callable[[str], None], *, fetch: bool = True) -> Toolchain:
    """Return the Triton that a name means.

    Args:
        name: ``"installed"``, ``"newest"``, a version such as ``"3.6.0"``, or a folder that holds the package.
        say: called with a line before anything is downloaded.
        fetch: whether to install a version that is not here.

    Raises:
        ArgumentError: the folder holds no Triton.
        ToolchainError: it is not here and cannot be fetched, or the kernels do not support it.
    """
    here = installed()
    if name == "installed":
        if here is None:
            raise ToolchainError(
                "triton must be installed in this Python to compile with it; it is not. Name a version "
                f"(--triton {NEWEST}), or: pip install 'triton==3.6.0' (Linux)."
            )
        return here
    folder = Path(name)
    if folder.is_dir():
        version = _version_in(folder)
        if version is None or not (folder / "triton" / "__init__.py").is_file():
            rule = "be a version, newest, installed, or a folder that pip install --target filled with triton"
            raise ArgumentError(complain("--triton", rule, repr(name), "Fix the path."))
        return Toolchain(version, folder.resolve())
    version = NEWEST if name == "newest" else name
    check_version(version)
    if here is not None and here.version == version:
        return here
    return Toolchain(version, ensure(version, say, fetch=fetch))


def ensure(version: str, say: Callable[[str], None], *, fetch: bool = True) -> Path:
    """Return the folder of a Triton version; install it there if it is not.

    Raises:
        ToolchainError: it is not there and cannot be fetched.
    """
    folder = home() / version
    if _version_in(folder) == version:
        return folder
    if not fetch:
        raise ToolchainError(f"triton {version} is not in {folder}. moeloom compile --triton {version} fetches it.")
    if sys.platform != "linux":
        raise ToolchainError(f"triton {version} has wheels for Linux only; this is {platform.system()}.")
    size = "{} MB to download, {} MB on disk".format(*SIZES[version]) if version in SIZES else "up to 1 GB on disk"
    say(f"triton {version} is fetched once, into {folder}: {size}. Delete that folder to take it back.")
    part = folder.with_name(version + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    command += ["--no-deps", "--no-compile", "--only-binary=:all:", "--target", str(part), f"triton=={version}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode or _version_in(part) != version:
        shutil.rmtree(part, ignore_errors=True)
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ToolchainError(f"triton {version} could not be fetched: {last}. pip's own settings apply.")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return folder
