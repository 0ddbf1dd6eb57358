"""What the emulator's tests share: cases, kernels loaded with textual edits, and compilation for a GPU that is not here.

A *case* is a kernel with its inputs and its answer. Each file in `kernels/` ends with ``CASES``, a dict of them by name. A
planted bug is an edited copy of such a file, so the same case finds the edited kernel.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import itertools
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType

import torch

from moeloom.compat import GluonASTSource, GPUTarget, TensorDescriptor, gl, triton

FOLDER = Path(__file__).parent
GUARD_BYTES = 4096
#: ``run.py test --all`` takes a share of the seeds, so that it stays within its half hour; this takes them all.
ALL_SEEDS = os.environ.get("MOELOOM_SEEDS") == "all"
TORCH_TO_GLUON = {
    torch.bfloat16: (gl.bfloat16, "bf16"),
    torch.float32: (gl.float32, "fp32"),
    torch.float8_e4m3fn: (gl.float8e4nv, "fp8e4nv"),
    torch.int32: (gl.int32, "i32"),
    torch.int64: (gl.int64, "i64"),
}


class Case:
    """A kernel with inputs and an answer.

    Subclasses give ``inputs``, ``build`` and ``expected``; ``options`` are those of the emulator that the case needs.
    """

    options: dict = {}
    #: False: the order of unordered atomics may show in the output, so bits differ over seeds.
    same_bits = True

    def inputs(self) -> dict[str, torch.Tensor]:
        """Fresh input tensors, the same at every call."""
        raise NotImplementedError

    def build(self, emu) -> dict[str, torch.Tensor]:
        """Launch the kernel on fresh tensors and return those it will have written after ``emu.run()``."""
        raise NotImplementedError

    def expected(self) -> dict[str, torch.Tensor]:
        """The right outputs, computed by torch from ``inputs()``."""
        raise NotImplementedError

    @cached_property
    def answer(self) -> dict[str, torch.Tensor]:
        """``expected()``, computed once."""
        return self.expected()

    def check(self, outputs: dict[str, torch.Tensor]) -> None:
        """Raise AssertionError if an output is wrong: exactly, or by relative L2 where the answer is fp32."""
        assert outputs.keys() == self.answer.keys()
        for name, want in self.answer.items():
            got = outputs[name]
            if want.dtype == torch.float32 and got.dtype != torch.float32:
                error = relative_l2(got, want)
                assert error < 5e-3, f"{name}: relative error {error:.2e}"
            else:
                assert torch.equal(got, want), f"{name}: {int((got != want).sum())} elements differ"


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ``|got - want| / |want|`` in fp64; NaN counts as infinitely wrong."""
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return error if error == error else float("inf")


def rng(seed: int = 0) -> torch.Generator:
    """A generator for inputs."""
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16):
    """Normal random numbers."""
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Memory for results: NaN, or -1 for integers."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=torch.float32).to(dtype)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to memory with nothing else near it, so that an access beside it hits no other tensor by chance."""
    size = tensor.numel() * tensor.element_size()
    whole = torch.zeros(size + 2 * GUARD_BYTES, dtype=torch.uint8)
    inside = whole[GUARD_BYTES : GUARD_BYTES + size].view(tensor.dtype).view(tensor.shape)
    return inside.copy_(tensor)


def box(tensor: torch.Tensor, *block: int) -> TensorDescriptor:
    """Describe a tensor for bulk copies of boxes of that shape."""
    block = list(block)
    return TensorDescriptor.from_tensor(tensor, block, smem_layout(block, tensor.dtype))


def smem_layout(block: list[int], dtype: torch.dtype = torch.bfloat16) -> gl.NVMMASharedLayout:
    """Return the layout of a box in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(block), TORCH_TO_GLUON[dtype][0])


# ---------------------------------------------------------------------------------------------- loading with edits


_number = itertools.count()
_folder: list[Path] = []


def _edited_folder() -> Path:
    if not _folder:
        _folder.append(Path(tempfile.mkdtemp(prefix="planted_")))
        atexit.register(shutil.rmtree, _folder[0], ignore_errors=True)
    return _folder[0]


def source_path(stem: str) -> Path:
    """Return the file of a kernel module."""
    inside = FOLDER / "kernels" / f"{stem}.py"
    return inside if inside.exists() else FOLDER / f"{stem}.py"


def load(stem: str, edits: tuple[tuple[str, str], ...] = ()) -> ModuleType:
    """Import a kernel module, with edits in a copy of it.

    Args:
        stem: name of the file, without ``.py``.
        edits: (old, new) pairs; each ``old`` must be there exactly once.
    """
    path = source_path(stem)
    if not edits:
        parent = "tests.emulator.kernels" if path.parent.name == "kernels" else "tests.emulator"
        return importlib.import_module(f"{parent}.{stem}")
    text = path.read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{stem}: {text.count(old)} times in the source: {old!r}"
        text = text.replace(old, new)
    name = f"planted_{next(_number)}_{stem}"
    copy = _edited_folder() / f"{name}.py"
    copy.write_text(text)
    spec = importlib.util.spec_from_file_location(name, copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def case(path: str, edits: tuple[tuple[str, str], ...] = ()) -> Case:
    """Return the case ``"stem.name"``, of an edited copy of its file if there are edits."""
    stem, name = path.split(".")
    return load(stem, edits).CASES[name]


# ------------------------------------------------------------------------------------------------------ compiling


@dataclass
class Launch:
    """One launch as a case makes it."""

    kernel: object
    grid: int
    args: dict
    num_warps: int


@dataclass
class Recorder:
    """Stands where an emulator stands, and only writes down what is launched."""

    launches: list[Launch] = field(default_factory=list)

    def launch(self, kernel, grid, args, *, num_warps=4, **_) -> None:
        """Write a launch down."""
        if not isinstance(args, dict):
            args = dict(zip(kernel.arg_names, args, strict=True))
        self.launches.append(Launch(kernel, grid, args, num_warps))

    def ignore(self, *_, **__) -> None:
        """Do nothing."""

    register = fill = wait_stream = hold_sms = ignore


def launches_of(one: Case) -> list[Launch]:
    """Return the different launches of a case."""
    recorder = Recorder()
    one.build(recorder)
    return recorder.launches


def _described(value: object) -> tuple[str, list]:
    """Return (type in a signature, attributes) of an argument."""
    hint = [["tt.divisibility", 16]]
    if isinstance(value, torch.Tensor):
        return "*" + TORCH_TO_GLUON[value.dtype][1], hint if value.data_ptr() % 16 == 0 else []
    if isinstance(value, TensorDescriptor):
        dtype = TORCH_TO_GLUON[value.base.dtype][1]
        return f"tensordesc<{dtype}[{', '.join(map(str, value.block_shape))}],{value.layout!r}>", []
    if isinstance(value, float):
        return "fp32", []
    return "i32" if -(2**31) <= value < 2**31 else "i64", hint if value % 16 == 0 else []


def compiled(launch: Launch, *, arch: int = 90):
    """Compile the kernel of a launch for a GPU architecture; needs no GPU. Returns triton's compiled kernel."""
    names, fixed = launch.kernel.arg_names, {p.name for p in launch.kernel.params if p.is_constexpr}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(names):
        if name in fixed:
            signature[name], constants[(i,)] = "constexpr", launch.args[name]
        else:
            signature[name], hint = _described(launch.args[name])
            if hint:
                attributes[(i,)] = hint
    source = GluonASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": launch.num_warps})


def ptx_of(path: str, edits: tuple[tuple[str, str], ...] = (), number: int = 0) -> str:
    """Return the PTX of a case's launch, compiled for sm_90a."""
    return compiled(launches_of(case(path, edits))[number]).asm["ptx"]
