"""Launching kernels with little work of the host: compiled once, arguments kept in place.

:class:`Launch` names a kernel and its arguments, for the emulator and for Triton's own launch path alike. That path
looks at every argument anew in each call. :class:`Bound` does so once: afterwards a call puts new addresses into a list
and hands it to the compiled kernel. On a driver whose launches cost nothing, the three launches of a forward pass took
166 us by Triton's path and 22 us by this one (``tests/fake_cuda``, one core of a Xeon, Python 3.11, triton 3.6.0).
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moeloom.compat import TensorDescriptor, prepared_launch
from moeloom.errors import ToolchainError

_log = logging.getLogger("moeloom")


@dataclass(frozen=True)
class Launch:
    """One kernel launch: what the emulator and a GPU both need to know."""

    kernel: object
    grid: int
    args: dict
    num_warps: int
    options: dict = field(default_factory=dict)

    def run(self) -> object:
        """Launch on the current device and stream; return what Triton returns."""
        return self.kernel[(self.grid,)](**self.args, **self.all_options())

    def all_options(self) -> dict:
        """Return the options of the compiler."""
        return dict(num_warps=self.num_warps, enable_fp_fusion=False, **self.options)

    def key(self, device: int) -> tuple:
        """Return what decides which compiled kernel is taken, for arguments as this package makes them.

        These are: pointers with the alignment that :mod:`moeloom.runtime.forward` gives, H and I multiples of 64.
        """
        fixed, wide = [], []
        for param in self.kernel.params:
            value = self.args[param.name]
            if param.is_constexpr:
                fixed.append(value)
            elif isinstance(value, int) and value >= 2**31:
                wide.append(param.name)
        return self.kernel, device, tuple(fixed), tuple(wide), self.num_warps, tuple(self.options.items())


class Address:
    """Stands for a tensor in a descriptor without keeping its memory alive."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        """Return the address, as a tensor does."""
        return self.address


class _Descriptors:
    """The launch arguments that stand for one descriptor, for each address that was met lately."""

    def __init__(self, like: TensorDescriptor, expand: Callable[[TensorDescriptor], list]) -> None:
        self._like = replace(like, base=Address(like.base.data_ptr(), like.base.dtype))
        self._expand = expand
        self._known: dict[int, list] = {}

    def at(self, address: int) -> list:
        """Return the arguments for memory of the same shape at another address."""
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= MOST_ADDRESSES:
                self._known.pop(next(iter(self._known)))
            moved = replace(self._like, base=Address(address, self._like.base.dtype))
            found = self._known[address] = self._expand(moved)
        return found


class Bound:
    """A launch whose kernel is compiled and whose arguments stay, except for addresses that differ between calls.

    It keeps no tensor alive: whoever holds it holds the memory that it does not replace.

    Args:
        launch: kernel and arguments; all of its tensors on the current device.

    Raises:
        ToolchainError: there is no working C compiler, and Triton needs one.
    """

    def __init__(self, launch: Launch) -> None:
        kernel = compiled(launch)
        with _CompilerTrouble():
            self._launch, expand = prepared_launch(kernel, (launch.grid, 1, 1), torch.cuda.current_device())
        self._args: list = []
        self._spans: dict[str, slice] = {}
        self._descriptors: dict[str, _Descriptors] = {}
        for param in launch.kernel.params:
            value = launch.args[param.name]
            if isinstance(value, TensorDescriptor):
                number = len(self._descriptors)
                known = self._descriptors[param.name] = _Descriptors(value, functools.partial(expand, number))
                values = known.at(value.base.data_ptr())
            else:
                values = [value.data_ptr() if isinstance(value, Tensor) else value]
            self._spans[param.name] = slice(len(self._args), len(self._args) + len(values))
            self._args += values

    def run(self, **addresses: int) -> None:
        """Launch on the current device and stream, with other addresses in the named arguments."""
        args = self._args
        for name, address in addresses.items():
            known = self._descriptors.get(name)
            args[self._spans[name]] = (address,) if known is None else known.at(address)
        self._launch(args)


#: Addresses of which a descriptor is kept ready: as many as a model has layers, and then some.
MOST_ADDRESSES = 512


def compiled(launch: Launch) -> object:
    """Return the compiled kernel of a launch for the current device; compile it if this process has not yet.

    Raises:
        ToolchainError: there is no working C compiler, and Triton needs one.
    """
    key = launch.key(torch.cuda.current_device())
    found = _COMPILED.get(key)
    if found is None:
        with _CompilerTrouble():
            found = launch.kernel.warmup(**launch.args, grid=(launch.grid,), **launch.all_options())
            # Inside of Triton's asynchronous mode this is a promise.
            found = found.result() if hasattr(found, "result") else found
        _COMPILED[key] = found
    return found


def announce(launches: list[Launch]) -> None:
    """Say once which of some launches have to be compiled, or read from Triton's cache on disk, before they run."""
    device = torch.cuda.current_device()
    fresh = [launch.kernel.__name__ for launch in launches if launch.key(device) not in _COMPILED]
    if fresh:
        _log.info("first call of this kind: compiling %s (seconds; less if Triton's cache has them)", ", ".join(fresh))


#: Compiled kernels of this process by :meth:`Launch.key`.
_COMPILED: dict[tuple, object] = {}


def c_compiler() -> str | None:
    """Return the C compiler that Triton takes, or None if there is none."""
    named = os.environ.get("CC")
    return shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")


class _CompilerTrouble:
    """Turns what Triton raises without a working C compiler into one clear error.

    Triton builds a small launcher in C for every kind of arguments, unless its cache has it; so a missing compiler
    matters only once something fails.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if error is None or isinstance(error, ToolchainError) or not isinstance(error, Exception):
            return
        if c_compiler() is None:
            named = os.environ.get("CC")
            got = f"CC={named!r}, which is no program" if named else "neither CC nor gcc nor clang"
            raise ToolchainError(
                f"a C compiler must be found, because Triton builds a small launcher for each kernel; got {got}. "
                "Install gcc, or set the environment variable CC, or use backend='torch'."
            ) from error
        if isinstance(error, subprocess.CalledProcessError):
            raise ToolchainError(
                f"the C compiler {c_compiler()} must be able to build Triton's launcher; it failed, and said why on "
                "stderr. Often Python's headers are missing (python3-dev). Or use backend='torch'."
            ) from error


__all__ = ["Address", "Bound", "Launch", "announce", "c_compiler", "compiled"]
