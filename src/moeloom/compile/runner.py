"""Starting the processes that compile, one Triton version each, and collecting what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import moeloom
from moeloom.compile.build import Job
from moeloom.compile.versions import Toolchain, fetched
from moeloom.errors import ToolchainError

#: Seconds that one process may take; a kernel takes about one.
PATIENCE = 1800


@dataclass(frozen=True)
class Request:
    """What to compile.

    Attributes:
        selectors: see :func:`moeloom.compile.targets.load`; empty: the registry.
        architectures: names, for example ``["90a"]``.
        toolchains: Triton versions.
        keep: folder for what the compilers wrote, ``<keep>/<version>/``; None: nothing is kept.
        jobs: processes at a time.
    """

    selectors: list[str]
    architectures: list[str]
    toolchains: list[Toolchain]
    keep: Path | None = None
    jobs: int = os.cpu_count() or 1


def run(request: Request) -> list[dict]:
    """Compile and check everything asked for.

    Returns:
        One dictionary for each kernel, architecture and version: ``kernel``, ``architecture``, ``triton``, ``seconds``,
        the fields of :class:`moeloom.compile.inspection.Inspection`, and ``error`` if it does not compile. Sorted.

    Raises:
        ToolchainError: a process could not start its work.
    """
    shards = max(1, request.jobs // max(1, len(request.toolchains)))
    with tempfile.TemporaryDirectory(prefix="moeloom-compile-") as scratch:
        parts = [(t, shard) for t in request.toolchains for shard in range(shards)]
        with ThreadPoolExecutor(max(1, request.jobs)) as pool:
            found = pool.map(lambda p: _shard(request, p[0], p[1], shards, Path(scratch)), parts)
            results = [result for part in found for result in part]
    return sorted(results, key=lambda r: (r["kernel"], r["architecture"], r["triton"]))


def _shard(request: Request, toolchain: Toolchain, shard: int, shards: int, scratch: Path) -> list[dict]:
    """Do one share of the work of one version; start a new process behind a kernel that crashed one."""
    name = f"{toolchain.version}-{shard}"
    folder = (request.keep.resolve() if request.keep else scratch) / toolchain.version
    folder.mkdir(parents=True, exist_ok=True)
    job_file, results_file = scratch / f"{name}.json", scratch / f"{name}.results"
    # Its own disassembler first; an old one cannot read a new architecture, so then those of all other versions here.
    others = dict.fromkeys([toolchain, *reversed(request.toolchains), *fetched()])
    programs = [str(t.programs / "nvdisasm") for t in others if t.programs]
    results: list[dict] = []
    while True:
        results_file.write_text("")
        job = Job(
            [_absolute(s) for s in request.selectors],
            request.architectures,
            shard,
            shards,
            [r["key"] for r in results],
            str(folder),
            str(results_file),
            programs,
        )
        job_file.write_text(json.dumps(asdict(job)))
        code, said = _process(job_file, toolchain, scratch / f"cache-{name}")
        lines = [json.loads(line) for line in results_file.read_text().splitlines()]
        results += [line["result"] for line in lines if "result" in line]
        fatal = next((line["fatal"] for line in lines if "fatal" in line), None)
        if fatal or not lines:
            raise ToolchainError(f"triton {toolchain.version} could not be used: {fatal or said}")
        version = lines[0]["triton"]
        crashed = [line["begins"] for line in lines if "begins" in line][len(results) - len(job.skip) :]
        if not crashed:
            break
        results.append(crashed[0] | {"error": f"{said} (exit code {code})", "problems": ["crashes the compiler"]})
    return [result | {"triton": version} for result in results]


def _absolute(selector: str) -> str:
    return str(Path(selector).resolve()) if ".py:" in selector else selector


def _process(job_file: Path, toolchain: Toolchain, cache: Path) -> tuple[int, str]:
    """Run one process; return its exit code and the last line that it said."""
    source = Path(moeloom.__file__).parent.parent
    paths = [str(toolchain.folder)] if toolchain.folder else []
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    env["PYTHONPATH"] = os.pathsep.join([*paths, str(source), *filter(None, [env.get("PYTHONPATH")])])
    # Nothing of a user's cache may answer for the compiler. What ptxas says is wanted. 3.9 warns unless this is set;
    # each kernel says itself whether it wants contraction.
    env |= {"TRITON_CACHE_DIR": str(cache), "TRITON_ALWAYS_COMPILE": "1"}
    env |= {"TRITON_DUMP_PTXAS_LOG": "1", "TRITON_DEFAULT_FP_FUSION": "0"}
    command = [sys.executable, "-m", "moeloom.compile.build", str(job_file)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return -1, f"no end after {PATIENCE} s"
    said = [line for line in done.stderr.splitlines() if line.strip() and "leaked" not in line]
    return done.returncode, said[-1] if said else "it said nothing"
