"""Records: one JSON object a line, what every field means, where the machine's facts come from, and strict reading."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import torch

import moeloom
from moeloom.errors import DataError, complain

#: Said of every record that a CPU made.
CPU_STAMP = "scaled: not a GPU speed"

_NUMBER, _WHOLE, _NONE = (int, float), int, type(None)
#: Fields of a record, in order, with the types that they may have.
FIELDS: dict[str, tuple] = {
    "commit": (str, _NONE),
    "date": (str,),
    "device": (str,),
    "torch": (str,),
    "triton": (str, _NONE),
    "command": (str,),
    "model": (str,),
    "ep_size": (_WHOLE,),
    "virtual": (bool,),
    "ep_slice": (_WHOLE,),
    "tokens": (_WHOLE,),
    "routing": (str,),
    "shared": (bool,),
    "dtype": (str,),
    "wgrad_dtype": (str,),
    "pass": (str,),
    "backend": (str,),
    "run": (str,),
    "ms_median": (*_NUMBER, _NONE),
    "ms_min": (*_NUMBER, _NONE),
    "ms_max": (*_NUMBER, _NONE),
    "runs": (_WHOLE,),
    "useful_tflops": (*_NUMBER, _NONE),
    "floor_ms": (*_NUMBER, _NONE),
    "gemm_ceiling_tflops": (*_NUMBER, _NONE),
    "peak_bytes": (_WHOLE, _NONE),
    "host_us": (*_NUMBER, _NONE),
    "launches": (_WHOLE, _NONE),
    "rel_l2_error": (*_NUMBER, _NONE),
    # Beyond the common list.
    "kind": (str,),
    "is_layer": (bool,),
    "note": (str, _NONE),
    "error": (str, _NONE),
    "seed": (_WHOLE,),
    "l2": (str, _NONE),
    "host_us_p99": (*_NUMBER, _NONE),
    "host_samples": (_WHOLE, _NONE),
    "host_bound_tokens": (_WHOLE, _NONE),
    "floor_terms": (dict, _NONE),
    "floor_share": (*_NUMBER, _NONE),
    "copy_gb_per_s": (*_NUMBER, _NONE),
    "gemm_sizes": (dict, _NONE),
    "warmup_s": (*_NUMBER, _NONE),
    "sm_clock_mhz": (_WHOLE, _NONE),
    "driver": (str, _NONE),
    "errors": (dict, _NONE),
}
#: Kinds of records: a timing, and a line of the error table.
KINDS = ("layer", "errors")


def new_run() -> str:
    """Return an id for what is measured interleaved."""
    return uuid.uuid4().hex[:12]


def machine(device: torch.device, commit_given: str | None = None) -> dict[str, object]:
    """Return the fields that are the same for all records of a process.

    Args:
        device: where the benchmark runs.
        commit_given: what to record as commit where the source tree is a copy without history.
    """
    triton = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        triton = importlib.metadata.version("triton")
    return {
        "commit": commit_given or commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": triton,
        "command": command(),
        "driver": driver(device),
    }


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or that of a CPU with the stamp that its numbers carry."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {capability}, {CPU_STAMP}"


def command() -> str:
    """Return the command line without folders: records say what was run, not where."""
    # What stands before the last slash, after "=" or ":" where there is one.
    return shlex.join(["moeloom", *(re.sub(r"[^=:,]*/", "", word) for word in sys.argv[1:])])


def commit() -> str | None:
    """Return the commit of the source tree that is running, ``-dirty`` with changes; None outside one."""
    package = Path(moeloom.__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=package, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()

    try:
        # Some other project's repository may hold the folder that moeloom is installed in.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != package.parent.parent.resolve():
            return None
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None


def driver(device: torch.device) -> str | None:
    """Return the version of the GPU's driver, if it can be had."""
    if device.type != "cuda":
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        return None


def sm_clock_mhz(device: torch.device) -> int | None:
    """Return the clock of the GPU's multiprocessors as of the last second, if it can be had."""
    if device.type != "cuda":
        return None
    try:
        return int(torch.cuda.clock_rate(device))
    except Exception:  # It needs a package and a driver library that need not be there, with errors of their own.
        return None


def complete(values: dict[str, object]) -> dict[str, object]:
    """Return a record with all fields in order; what was not measured is None."""
    unknown = values.keys() - FIELDS.keys()
    assert not unknown, f"fields without a type: {sorted(unknown)}"
    return {name: values.get(name) for name in FIELDS}


def write(file: IO[str], record: dict[str, object]) -> None:
    """Append a record and make sure that it is there if the process dies next. NaN becomes null."""
    file.write(json.dumps(_finite(record)) + "\n")
    file.flush()


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return value


def read(paths: Iterable[str | os.PathLike]) -> list[dict[str, object]]:
    """Read records from files.

    Raises:
        DataError: a file that cannot be read, or a line that is no record; the message names file and line.
    """
    records = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(complain(str(path), "be a readable text file", error, "Check the path.")) from error
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                records.append(_parse(line, f"{path}:{number}"))
    if not records:
        raise DataError(complain("the files", "hold at least one record", "none", "Run moeloom bench layer --json."))
    return records


def _parse(line: str, place: str) -> dict[str, object]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(complain(place, "be a JSON object", error, "Remove the line.")) from error
    if not isinstance(record, dict):
        raise DataError(complain(place, "be a JSON object", type(record).__name__, "Remove the line."))
    missing = [name for name in FIELDS if name not in record]
    if missing:
        fix = "It was written by another version or by hand; measure again."
        raise DataError(complain(place, "have all fields of a record", f"no {', '.join(missing[:4])}", fix))
    for name, types in FIELDS.items():
        value = record[name]
        right = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        if not right:
            rule = f"have a {' or '.join(t.__name__ for t in types)} in field '{name}'"
            raise DataError(complain(place, rule, repr(value), "Measure again."))
    if record["kind"] not in KINDS:
        raise DataError(complain(place, f"be of kind {' or '.join(KINDS)}", repr(record["kind"]), "Measure again."))
    return record


def measured(records: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Return the timings among records, without those that failed or are missing."""
    return [r for r in records if r["kind"] == "layer" and r["ms_median"] is not None]
