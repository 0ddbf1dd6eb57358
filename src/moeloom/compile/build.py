"""Compiling one kernel for one architecture, with no GPU, in a process that holds one Triton version.

``python -m moeloom.compile.build JOB`` is that process; :mod:`moeloom.compile.runner` starts it. The job is a JSON file
(see :class:`Job`); results are appended to a file of JSON lines, so that a compiler that crashes loses one kernel only.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from moeloom.compile.inspection import Compiled, Tools, inspect
from moeloom.compile.targets import ARCHITECTURES, Descriptor, KernelSpec, load


@dataclass(frozen=True)
class Job:
    """What one process is to compile.

    Attributes:
        selectors: see :func:`moeloom.compile.targets.load`; empty: the registry.
        architectures: names; specs that are not meant for one are left out.
        shard, shards: of all pairs (spec, architecture), take those whose number is ``shard`` modulo ``shards``.
        skip: keys that are done.
        folder: where ``<kernel>.sm_<arch>.{ptx,cubin,sass,ttgir}`` are kept.
        results: file to append JSON lines to.
        disassemblers: ``nvdisasm`` programs to try, newest first.
    """

    selectors: list[str]
    architectures: list[str]
    shard: int
    shards: int
    skip: list[str]
    folder: str
    results: str
    disassemblers: list[str]


def _type(value: str | Descriptor) -> tuple[str, list]:
    """Triton's name of a type, and its attributes."""
    from moeloom.compat import gl

    if isinstance(value, Descriptor):
        dtypes = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32, "fp8e4nv": gl.float8e4nv}
        dtypes |= {"i8": gl.int8, "u8": gl.uint8, "i32": gl.int32}
        layout = gl.NVMMASharedLayout.get_default_for(list(value.block), dtypes[value.dtype])
        return f"tensordesc<{value.dtype}[{', '.join(map(str, value.block))}],{layout!r}>", []
    name, _, multiple = value.partition(":")
    return name, [["tt.divisibility", int(multiple)]] if multiple else []


def compile_spec(spec: KernelSpec, kernel: object, architecture: str) -> tuple[object, str]:
    """Compile one spec.

    Returns:
        Triton's compiled kernel, and what ptxas said.

    Raises:
        ValueError: signature and constexprs do not name the kernel's parameters.
    """
    from moeloom.compat import GluonASTSource, GPUTarget, triton

    names = list(kernel.arg_names)
    given = {*spec.signature, *spec.constexprs}
    if given != set(names) or len(spec.signature) + len(spec.constexprs) != len(names):
        raise ValueError(f"{spec.name}: signature and constexprs name {sorted(given)}; the kernel takes {names}")
    types = {name: _type(value) for name, value in spec.signature.items()}
    signature = {name: types[name][0] if name in types else "constexpr" for name in names}
    attributes = {(names.index(name),): attrs for name, (_, attrs) in types.items() if attrs}
    constexprs = {(names.index(name),): value for name, value in spec.constexprs.items()}
    source = GluonASTSource(kernel, signature, constexprs, attributes)
    options = dict(num_warps=spec.num_warps, maxnreg=spec.maxnreg, enable_fp_fusion=spec.fp_fusion)
    target = GPUTarget("cuda", ARCHITECTURES[architecture], 32)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        out = triton.compile(source, target=target, options=options)
    return out, said.getvalue()


def _compile(spec: KernelSpec, kernel: object, architecture: str, job: Job) -> dict:
    """Compile, keep the files, inspect them."""
    began = time.perf_counter()
    compiled, said = compile_spec(spec, kernel, architecture)
    seconds = time.perf_counter() - began
    stem = Path(job.folder) / f"{spec.name.replace('/', '_')}.sm_{architecture}"
    for kind in ("ttgir", "ptx", "cubin"):
        content = compiled.asm[kind]
        stem.with_suffix(stem.suffix + "." + kind).write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    facts = Compiled(stem, compiled.asm["ptx"], said, compiled.metadata.shared, compiled.metadata.num_warps)
    return {"seconds": round(seconds, 2), **asdict(inspect(facts, spec, architecture, Tools(job.disassemblers)))}


def key_of(spec_name: str, architecture: str) -> str:
    """Name one pair of kernel and architecture."""
    return f"{spec_name} sm_{architecture}"


def work(job: Job) -> None:
    """Do a job, line by line."""
    from moeloom.compat import triton

    pairs = [
        (spec, kernel, architecture)
        for selector in job.selectors or [None]
        for spec, kernel in load(selector)
        for architecture in spec.architectures
        if architecture in job.architectures
    ]
    with open(job.results, "a", encoding="utf-8") as out:

        def tell(**line: object) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        tell(pairs=len(pairs), triton=triton.__version__)
        for number, (spec, kernel, architecture) in enumerate(pairs):
            key = key_of(spec.name, architecture)
            if number % job.shards != job.shard or key in job.skip:
                continue
            head = dict(key=key, kernel=spec.name, architecture=architecture)
            tell(begins=head)
            try:
                tell(result=head | _compile(spec, kernel, architecture, job))
            except Exception as error:  # a kernel that does not compile must not hide the others
                text = "".join(traceback.format_exception_only(error)).strip()
                tell(result=head | {"error": text, "problems": ["does not compile"]})


def main(path: str) -> None:
    """Do the job in a JSON file; what ends it is appended to its results."""
    job = Job(**json.loads(Path(path).read_text()))
    try:
        work(job)
    except Exception as error:
        with open(job.results, "a", encoding="utf-8") as out:
            out.write(json.dumps({"fatal": "".join(traceback.format_exception_only(error)).strip()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
