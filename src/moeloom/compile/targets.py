"""Which kernels there are, and how each is compiled. Imports no Triton: names lead to the kernels when they are built.

A kernel of one's own is a :class:`KernelSpec` in a list, in any Python file:

    SPECS = [KernelSpec("copy", kernel=copy, signature={"source": "*bf16:16", "target": "*bf16:16", "n": "i32"})]

and ``moeloom compile --kernel path/to/file.py:SPECS`` builds it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moeloom.errors import ArgumentError, complain

#: Architectures by name; the number is what Triton calls them.
ARCHITECTURES = {"90a": 90, "100a": 100, "103a": 103}
#: Bytes of shared memory that one CTA can have on all of them.
SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True)
class Descriptor:
    """The type of a tensor descriptor argument, with the layout of shared memory that fits its block by default.

    Attributes:
        dtype: as in a signature, for example ``"bf16"``.
        block: extents of a box.
    """

    dtype: str
    block: tuple[int, ...]


@dataclass(frozen=True)
class KernelSpec:
    """One kernel with one choice of its compile-time arguments.

    Attributes:
        name: unique; names of several variants start alike, ``"forward/kimi"``.
        kernel: the ``@gluon.jit`` function, or where to find it: ``"package.module:function"``, or the name of a
            function in the file of the list.
        signature: Triton type of each run-time parameter: ``"i32"``, ``"*bf16"``, with ``":16"`` behind it if the
            value is always a multiple of 16 (which pointers of torch are), or a :class:`Descriptor`.
        constexprs: value of each compile-time parameter.
        num_warps: of the launch, without those of ``warp_specialize``.
        maxnreg: limit of registers for a thread, or None.
        architectures: those it is meant for.
        tensor_core: SASS instruction that must occur, such as ``"HGMMA"``; by architecture if they differ; None: none.
        fp_fusion: whether multiplications and additions may be contracted, which changes bits.
        known_spills: most bytes of registers that may be spilled, by minor version of Triton such as ``"3.9"``: a
            shortcoming that is known and shown, not passed over. All other versions must spill none.
        pending_bulk_groups: groups of bulk stores that may be in flight at a release, because it publishes older ones.
    """

    name: str
    kernel: object
    signature: Mapping[str, str | Descriptor]
    constexprs: Mapping[str, object] = field(default_factory=dict)
    num_warps: int = 4
    maxnreg: int | None = None
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)
    tensor_core: str | Mapping[str, str] | None = None
    fp_fusion: bool = False
    known_spills: Mapping[str, int] = field(default_factory=dict)
    pending_bulk_groups: int = 0

    def expected_instruction(self, architecture: str) -> str | None:
        """The tensor core instruction that must occur on an architecture, or None."""
        if isinstance(self.tensor_core, Mapping):
            return self.tensor_core.get(architecture)
        return self.tensor_core


_SCHEDULE_INPUTS = {
    "ids": "*i64:16",
    "counts": "*i32:16",
    "num_routes": "i32",
    "run": "i32",
    "first_expert": "i32",
    "experts": "i32",
}
_SCHEDULE_TABLES = {
    "row_rank": "*i32:16",
    "row_slot": "*i32:16",
    "block_expert": "*i32:16",
    "block_rows": "*i32:16",
    "rows_per_expert": "*i64:16",
    "facts": "*i32:16",
    "counters": "*i32:16",
    "pointers": "*i64:16",
    "x": "*bf16:16",
    "slots": "i32",
    "capacity_blocks": "i32",
    "num_counters": "i32",
    "rank": "i32",
}
_FORWARD = {
    "x_ring_desc": Descriptor("bf16", (128, 64)),
    "hidden_ring_desc": Descriptor("bf16", (128, 64)),
    "hidden_out_desc": Descriptor("bf16", (128, 64)),
    "gate_up_proj": Descriptor("bf16", (1, 128, 64)),
    "down_proj": Descriptor("bf16", (1, 256, 64)),
    "gate_up": Descriptor("bf16", (128, 1, 64)),
    "x_ring": "*bf16:16",
    "x_pointers": "*i64:16",
    "slot_pointers": "*i64:16",
    "row_rank": "*i32:16",
    "row_slot": "*i32:16",
    "block_expert": "*i32:16",
    "facts": "*i32:16",
    "counters": "*i32:16",
    "trouble": "*i32:16",
    "alarm": "*i64:16",
    "topk_ids": "*i64:16",
    "topk_weights": "*fp32:16",
    "start": "*fp32:16",
    "out": "*bf16:16",
    "deadline_us": "i32",
    "limit": "fp32",
    "rank": "i32",
    "tokens": "i32",
    "H": "i32:16",
    "I": "i32:16",
    "experts": "i32",
    "capacity": "i32",
    "minibatch": "i32",
    "ring": "i32",
    "saved": "i32",
    "has_start": "i32",
}
#: As :class:`moeloom.runtime.tuning.Tuning` has it by default.
_FORWARD_FIXED = {
    "RANKS": 1,
    "DEPTH": 64,
    "STAGES": 4,
    "SLOTS": 2,
    "PIECE": 4,
    "STORE_WARPS": 2,
    "DISPATCH_WARPS": 1,
    "REGISTERS": 104,
    "DISPATCH": True,
    "PUSH": True,
    "SUMS": True,
}

#: Every kernel of this package.
REGISTRY: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="handshake",
        kernel="moeloom.kernels.handshake:handshake",
        signature={
            "ring_desc": Descriptor("i32", (128, 32)),
            "ring": "*i32:16",
            "tickets": "*i32:16",
            "ready": "*i32:16",
            "taken": "*i32:16",
            "trouble": "*i32:16",
            "blocks": "i32",
            "deadline_ns": "i64",
        },
        constexprs={"SLOTS": 64},
    ),
    *(
        KernelSpec(
            name=f"schedule/{name}_{experts}",
            kernel=f"moeloom.kernels.schedule:{name}_routes",
            signature=_SCHEDULE_INPUTS | more,
            constexprs={"EXPERTS": experts},
            num_warps=8,
        )
        for name, more in (("count", {}), ("place", _SCHEDULE_TABLES))
        for experts in (64, 512)
    ),
    *(
        KernelSpec(
            name=f"forward/{name}",
            kernel="moeloom.kernels.forward.kernel:forward",
            # Measured: 324 to 532 bytes under 3.9.0, none under 3.6.0, which is what the kernel is tuned and run with.
            known_spills={"3.9": 600},
            signature=_FORWARD,
            constexprs=_FORWARD_FIXED | {"TOP_K": top_k, "CLAMP": clamp, "HEIGHT": 4096 // width, "WIDTH": width},
            num_warps=8,
            maxnreg=168,
            architectures=("90a",),
            tensor_core="HGMMA",
        )
        for name, top_k, clamp, width in (
            ("kimi", 8, False, 1024),
            ("glm", 8, False, 2048),
            ("qwen", 10, False, 4096),
            ("deepseek", 6, True, 1024),
        )
    ),
)


def check_architectures(names: list[str]) -> list[str]:
    """Return the names.

    Raises:
        ArgumentError: one is unknown.
    """
    for name in names:
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ArgumentError(complain("--arch", f"be one of {known}", repr(name), "Separate several by commas."))
    return names


def split_selector(selector: str) -> tuple[str, str] | None:
    """Return file and name of the list for ``path/to/file.py:SPECS``; None for a name of the registry."""
    path, _, attribute = selector.rpartition(":")
    return (path, attribute) if path.endswith(".py") else None


def check_selector(selector: str) -> str:
    """Return a selector that can be resolved, as far as this can be told without Triton.

    Raises:
        ArgumentError: no such kernel or file.
    """
    parts = split_selector(selector)
    if parts is None:
        named(selector)
    elif not Path(parts[0]).is_file():
        raise ArgumentError(complain("--kernel", "name a file that exists", repr(parts[0]), "Fix the path."))
    return selector


def named(name: str) -> list[KernelSpec]:
    """Return the specs of the registry of that name, or whose names begin with it and ``/``.

    Raises:
        ArgumentError: there are none.
    """
    found = [s for s in REGISTRY if s.name == name or s.name.startswith(name + "/")]
    if not found:
        known = ", ".join(s.name for s in REGISTRY)
        rule = "be a kernel of the registry or path/to/file.py:LIST"
        raise ArgumentError(complain("--kernel", rule, repr(name), f"There are: {known}."))
    return found


def load(selector: str | None) -> list[tuple[KernelSpec, object]]:
    """Return specs with their kernels; importing these imports Triton.

    Args:
        selector: None for the registry, a name in it, or ``path/to/file.py:LIST``.

    Raises:
        ArgumentError: no such kernel, file or list.
    """
    parts = split_selector(selector) if selector else None
    if parts is None:
        specs, module = (named(selector) if selector else list(REGISTRY)), None
    else:
        module = _import_file(Path(parts[0]))
        specs = getattr(module, parts[1], None)
        if not isinstance(specs, (list, tuple)) or not all(isinstance(s, KernelSpec) for s in specs):
            rule = "name a list of KernelSpec in the file"
            raise ArgumentError(complain("--kernel", rule, repr(selector), "Fix the name behind the colon."))
    return [(spec, _kernel(spec.kernel, module)) for spec in specs]


def _import_file(path: Path) -> object:
    if not path.is_file():
        raise ArgumentError(complain("--kernel", "name a file that exists", repr(str(path)), "Fix the path."))
    name = "moeloom_kernels_" + path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _kernel(kernel: object, module: object) -> object:
    if not isinstance(kernel, str):
        return kernel
    where, _, name = kernel.rpartition(":")
    return getattr(importlib.import_module(where) if where else module, name)
