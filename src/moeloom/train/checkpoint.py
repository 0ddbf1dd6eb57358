"""Checkpoints without pickle: a folder of safetensors shards and one JSON manifest, written so that a kill is harmless.

Layout of ``<folder>/step-00000120/``::

    checkpoint.json                      the manifest: format, step, state, files with size and SHA-256, tensors
    shard-00000-of-00002.safetensors     what rank 0 wrote
    shard-00001-of-00002.safetensors     what rank 1 wrote

A checkpoint is written to ``.tmp-step-00000120``, every file and the folder are flushed to the disk, and one rename
puts it in place; a folder with a plain name is therefore complete. When a step is saved again, the folder that it
replaces waits as ``.old-step-00000120`` for the moment between two renames, and readers know that name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from moeloom.errors import ArgumentError, CheckpointError, complain

FORMAT = "moeloom-checkpoint"
VERSION = 1
MANIFEST = "checkpoint.json"
MAX_MANIFEST_BYTES = 64 << 20

_STEP_NAME = re.compile(r"(?:\.old-)?step-(\d{8,})")
_SHARD_NAME = re.compile(r"shard-\d{5}-of-\d{5}\.safetensors")
_PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"})
_CHUNK = 1 << 22
_SHOWN = 10

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Gather = Callable[[dict], list[dict]]


# ---------------------------------------------------------------------------------------------------------------- read


class Checkpoint:
    """One complete checkpoint, opened for reading. Use :meth:`open`.

    Attributes:
        path: its folder.
        step: the training step after which it was written.
        state: the JSON state given to :meth:`CheckpointStore.save`.
        world: number of ranks that wrote it.
        created: when it was written, in seconds since 1970.
    """

    def __init__(self, path: Path, manifest: dict) -> None:
        self.path = path
        self.step: int = manifest["step"]
        self.state: dict = manifest["state"]
        self.world: int = manifest["world"]
        self.created: float = manifest["created"]
        self._files: list[dict] = manifest["files"]
        self._tensors: dict[str, dict] = manifest["tensors"]

    @classmethod
    def open(cls, path: str | os.PathLike, *, verify: bool = True) -> Checkpoint:
        """Open a checkpoint folder; nothing in it is ever executed.

        Args:
            path: the folder ``step-...``.
            verify: read every shard and compare its SHA-256. False checks names, kinds, sizes and headers only, for
                example on ranks that open what rank 0 has just verified.

        Raises:
            CheckpointError: missing, damaged or unsafe; the message says which file and why.
        """
        folder = Path(path)
        try:
            manifest = _read_manifest(folder)
            _check_folder(folder, manifest)
            if verify:
                _check_sums(folder, manifest)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint '{folder}' cannot be read: {error}. Check the path, or use an older checkpoint."
            ) from error
        return cls(folder, manifest)

    def names(self) -> list[str]:
        """Return the sorted names of all tensors."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it.

        Raises:
            CheckpointError: no tensor has that name.
        """
        return tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor without reading it.

        Raises:
            CheckpointError: no tensor has that name.
        """
        return _DTYPES[self._entry(name)["dtype"]]

    def load(self, name: str) -> torch.Tensor:
        """Return one tensor, in CPU memory of its own.

        Raises:
            CheckpointError: no tensor has that name, or its shard cannot be read.
        """
        return self.load_many([name])[name]

    def load_many(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return tensors by name, in CPU memory of their own; each shard is opened once.

        Raises:
            CheckpointError: a name is not there, or a shard cannot be read.
        """
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._entry(name)["file"], []).append(name)
        loaded = {}
        for file, wanted in by_file.items():
            with _open_shard(self.path / file) as shard:
                # A copy, because the library maps the file, and the file may be removed or cut while training goes on.
                loaded.update((name, shard.get_tensor(name).clone()) for name in wanted)
        return loaded

    def check(self, expected: Mapping[str, tuple[Iterable[int], torch.dtype]]) -> None:
        """Raise unless the checkpoint holds exactly the tensors that a model expects.

        Args:
            expected: (shape, dtype) by name, for the whole model, not for one rank.

        Raises:
            CheckpointError: lists up to 10 names each of what is missing, unexpected, and of another shape or dtype.
        """
        missing = sorted(set(expected) - set(self._tensors))
        unexpected = sorted(set(self._tensors) - set(expected))
        wrong = []
        for name in sorted(set(expected) & set(self._tensors)):
            shape, dtype = expected[name]
            if (self.shape(name), self.dtype(name)) != (tuple(shape), dtype):
                wrong.append(
                    f"{name} (here {list(self.shape(name))} {self.dtype(name)}, expected {list(shape)} {dtype})"
                )
        kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape or dtype", wrong))
        found = [f"{len(names)} {kind}: {_shorten(names)}" for kind, names in kinds if names]
        if found:
            raise CheckpointError(
                f"checkpoint '{self.path}' is of another model. {'; '.join(found)}. "
                "Use the settings that it was trained with."
            )

    def _entry(self, name: str) -> dict:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"checkpoint '{self.path}' has no tensor '{name}'. Use one of names().") from None


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _refuse(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"'{path}' is refused: {reason}. Use another checkpoint; nothing was loaded from this one.")


def _parse_json(text: bytes | str, path: Path) -> object:
    """Return parsed JSON; duplicate keys and NaN, which JSON readers disagree about, are refused."""

    def pairs(items: list[tuple[str, object]]) -> dict:
        result = dict(items)
        if len(result) != len(items):
            raise ValueError("an object has the same key twice")
        return result

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise _refuse(path, f"it is not valid JSON ({error})") from error


def _read_manifest(folder: Path) -> dict:
    path = folder / MANIFEST
    size = _check_regular(path)
    if size > MAX_MANIFEST_BYTES:
        raise _refuse(path, f"it has {size} bytes, more than {MAX_MANIFEST_BYTES}")
    manifest = _parse_json(path.read_bytes(), path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _refuse(path, f"it is not a manifest of the format '{FORMAT}'")
    if manifest.get("version") != VERSION:
        raise _refuse(path, f"its format version is {manifest.get('version')!r}, and this moeloom reads {VERSION}")
    _check_fields(path, manifest)
    for entry in manifest["files"]:
        _check_file_entry(path, entry)
    names = [entry["name"] for entry in manifest["files"]]
    if len(set(names)) != len(names):
        raise _refuse(path, "it lists a file twice")
    for name, entry in manifest["tensors"].items():
        _check_tensor_entry(path, name, entry, set(names))
    return manifest


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_fields(path: Path, manifest: dict) -> None:
    kinds = {"state": dict, "files": list, "tensors": dict, "created": (int, float)}
    for key, kind in kinds.items():
        if not isinstance(manifest.get(key), kind):
            raise _refuse(path, f"'{key}' is missing or of the wrong type")
    for key in ("step", "world"):
        if not _is_count(manifest.get(key)):
            raise _refuse(path, f"'{key}' is missing or not a whole number")


def _check_file_entry(path: Path, entry: object) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise _refuse(path, "an entry of 'files' has no name")
    name = entry["name"]
    if not _SHARD_NAME.fullmatch(name):
        raise _refuse(path, f"file name {name!r} {_what_is_wrong(name)}")
    if not _is_count(entry.get("size")) or not re.fullmatch(r"[0-9a-f]{64}", str(entry.get("sha256"))):
        raise _refuse(path, f"the size or SHA-256 of '{name}' is missing or malformed")


def _what_is_wrong(name: str) -> str:
    if ".." in name:
        return "contains '..', which could lead out of the folder"
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
        return "is absolute"
    if "/" in name or "\\" in name:
        return "contains a path separator"
    return "is not that of a shard (shard-NNNNN-of-NNNNN.safetensors)"


def _check_tensor_entry(path: Path, name: str, entry: object, files: set[str]) -> None:
    if not isinstance(entry, dict) or entry.get("file") not in files:
        raise _refuse(path, f"tensor '{name}' is in no listed file")
    if entry.get("dtype") not in _DTYPES:
        raise _refuse(path, f"tensor '{name}' has the unknown dtype {entry.get('dtype')!r}")
    if not isinstance(entry.get("shape"), list) or not all(map(_is_count, entry["shape"])):
        raise _refuse(path, f"tensor '{name}' has no valid shape")


def _check_regular(path: Path) -> int:
    """Return the size of a file that is neither a link nor anything special."""
    # lstat: a link would let a checkpoint name any file of this machine.
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        raise _refuse(path, f"it is {kind}")
    return status.st_size


def _check_folder(folder: Path, manifest: dict) -> None:
    """Check kinds, sizes and headers of all files, and look for pickles beside them."""
    files = {entry["name"]: entry for entry in manifest["files"]}
    for path in sorted(folder.iterdir()):
        if path.name not in files and path.name != MANIFEST and _looks_like_pickle(path):
            raise _refuse(path, "it looks like a pickle, and a checkpoint holds only safetensors and JSON")
    for name, entry in files.items():
        path = folder / name
        size = _check_regular(path)
        if _looks_like_pickle(path):
            raise _refuse(path, "it is a pickle or zip file under a safetensors name")
        if size != entry["size"]:
            raise _refuse(path, f"it has {size} bytes, and the manifest says {entry['size']}")
        _check_header(path, {key: value for key, value in manifest["tensors"].items() if value["file"] == name})


def _looks_like_pickle(path: Path) -> bool:
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        return True
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    with open(path, "rb") as file:
        start = file.read(9)
    # A safetensors file starts with the length of its header, which may read 80 02 ... by chance, then with a brace.
    if path.suffix == ".safetensors" and start[8:9] == b"{":
        return False
    return start.startswith(b"PK\x03\x04") or (start[:1] == b"\x80" and start[1:2] in b"\x01\x02\x03\x04\x05")


@contextlib.contextmanager
def _open_shard(path: Path) -> Iterator[safetensors.safe_open]:
    try:
        with safetensors.safe_open(path, framework="pt") as shard:
            yield shard
    except (safetensors.SafetensorError, OSError) as error:
        raise _refuse(path, f"it cannot be read as safetensors ({error})") from error


def _check_header(path: Path, tensors: dict[str, dict]) -> None:
    with _open_shard(path) as shard:
        names = set(shard.keys())
        if names != set(tensors):
            different = sorted(names ^ set(tensors))
            raise _refuse(path, f"its header and the manifest differ in the tensors {_shorten(different)}")
        for name, entry in tensors.items():
            part = shard.get_slice(name)
            if (part.get_dtype(), part.get_shape()) != (entry["dtype"], entry["shape"]):
                raise _refuse(
                    path,
                    f"tensor '{name}' is {part.get_shape()} {part.get_dtype()} in the file and "
                    f"{entry['shape']} {entry['dtype']} in the manifest",
                )


def _check_sums(folder: Path, manifest: dict) -> None:
    for entry in manifest["files"]:
        if _sha256(folder / entry["name"]) != entry["sha256"]:
            raise _refuse(folder / entry["name"], "its SHA-256 differs from the manifest, so its content has changed")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------------------- write


class CheckpointStore:
    """The checkpoints of one training, of which the newest ``keep`` stay.

    Args:
        folder: where they are; made at the first save. Only one training may write there at a time.
        keep: how many to keep, at least 1.

    Attributes:
        warnings: texts about damaged checkpoints that were passed over and old ones that could not be removed.

    Raises:
        ArgumentError: ``keep`` is below 1.
    """

    def __init__(self, folder: str | os.PathLike, keep: int = 2) -> None:
        if keep < 1:
            raise ArgumentError(complain("keep", "be at least 1", keep, "Keep one checkpoint or more."))
        self.folder, self.keep = Path(folder), keep
        self.warnings: list[str] = []

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint whose checksums hold, or None where there is none at all.

        Nothing is changed on disk. Damaged ones are passed over, with a text in :attr:`warnings`.

        Raises:
            CheckpointError: there are checkpoints, and not one can be used; the message says why for each.
        """
        reasons = []
        for path in self._paths():
            try:
                return Checkpoint.open(path)
            except CheckpointError as error:
                reasons.append(f"{path.name}: {error}")
                self.warnings.append(f"checkpoint {path.name} is passed over: {error}")
        if reasons:
            raise CheckpointError(
                f"none of the {len(reasons)} checkpoints in '{self.folder}' can be used. " + " | ".join(reasons)
            )
        return None

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: dict,
        *,
        rank: int = 0,
        world: int = 1,
        gather: Gather | None = None,
    ) -> None:
        """Write a checkpoint together with the other ranks; afterwards it is on disk on every rank, or all raise.

        Args:
            step: not negative; a checkpoint of the same step is replaced.
            tensors: what this rank writes, by name; any device. No name may come from two ranks.
            state: what JSON can hold without NaN, for example configuration and counters; that of rank 0 is written.
            rank: of this process.
            world: number of ranks; all call ``save`` with the same ``step``.
            gather: takes a JSON-able object and returns those of all ranks in rank order, on every rank; it is called
                three times. Needed when ``world`` is above 1.

        Raises:
            ArgumentError: a number out of range, or no ``gather``; nothing was started.
            CheckpointError: on every rank, when any of them failed: a full disk, a name twice, other steps on other
                ranks. Earlier checkpoints are untouched.
        """
        if not 0 <= step <= 10**15:
            raise ArgumentError(complain("step", "lie in 0..10^15", step, "Pass the number of the step."))
        if not 0 <= rank < world <= 99_999:
            raise ArgumentError(complain("rank", "lie in 0..world-1", f"{rank} of {world}", "Pass both."))
        if world > 1 and gather is None:
            raise ArgumentError(complain("gather", f"be given for {world} ranks", None, "Pass an all-gather function."))
        gather = gather or (lambda message: [message])
        try:
            self._save(step, tensors, state, rank, world, gather)
        except BaseException:
            if rank == 0:
                # Best effort: what cannot be removed now goes at the next save.
                with contextlib.suppress(OSError):
                    self.clean()
            raise

    def clean(self) -> None:
        """Remove what a killed save left behind. Only for rank 0 of the training that writes here; save() calls it.

        Raises:
            OSError: something cannot be removed.
        """
        if not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith(".tmp-") and path.is_dir():
                shutil.rmtree(path)
            elif path.name.startswith(".old-step-"):
                plain = path.with_name(path.name.removeprefix(".old-"))
                if plain.exists():
                    shutil.rmtree(path)
                else:
                    # Killed between the two renames: the replaced checkpoint is still the one of that step.
                    os.rename(path, plain)
                    _sync_folder(self.folder)

    def _paths(self) -> list[Path]:
        """Return the checkpoint folders, newest step first and a plain name before ``.old-``."""
        if not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            match = _STEP_NAME.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                found.append((-int(match[1]), path.name.startswith("."), path))
        return [path for _, _, path in sorted(found)]

    def _save(self, step: int, tensors: Mapping, state: dict, rank: int, world: int, gather: Gather) -> None:
        name = f"step-{step:08d}"
        temporary = self.folder / f".tmp-{name}"
        shard = temporary / f"shard-{rank:05d}-of-{world:05d}.safetensors"

        def prepare() -> dict:
            header = _header(tensors)
            if rank == 0:
                _make_folder(self.folder)
                self.clean()
                os.mkdir(temporary)
            return {"step": step, "world": world, "tensors": header}

        headers = self._exchange(gather, rank, 0, prepare)
        needed = _agree(headers)
        files = self._exchange(gather, rank, needed, lambda: _write_shard(shard, tensors))

        def publish() -> None:
            if rank == 0:
                manifest = _manifest(step, world, state, headers, files)
                _write_file(temporary / MANIFEST, manifest)
                _sync_folder(temporary)
                self._rename(temporary, self.folder / name)
                self._prune(step)

        self._exchange(gather, rank, needed, publish)

    def _exchange(self, gather: Gather, rank: int, needed: int, work: Callable[[], object]) -> list:
        """Do this rank's part, then return the results of all ranks, or raise on all what any of them met."""
        mine = None
        try:
            message = {"value": work()}
        except Exception as error:
            # Not raised here: the other ranks wait in gather, and would wait for ever.
            mine = _as_os_error(error)
            message = {"error": f"rank {rank}: {self._explain(mine, needed)}"}
        messages = gather(message)
        errors = [item["error"] for item in messages if "error" in item]
        if errors:
            raise CheckpointError(
                f"no checkpoint was written to '{self.folder}'; earlier ones are untouched. " + " | ".join(errors)
            ) from mine
        return [item["value"] for item in messages]

    def _explain(self, error: Exception, needed: int) -> str:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            try:
                free = f"{shutil.disk_usage(self.folder).free} bytes are free"
            except OSError:
                free = "how much is free is unknown"
            text += f" (the checkpoint needs about {needed} bytes, {free}; free some space, or choose another folder)"
        return text

    def _rename(self, temporary: Path, final: Path) -> None:
        if final.exists():
            old = final.with_name(f".old-{final.name}")
            os.rename(final, old)
            os.rename(temporary, final)
            _sync_folder(self.folder)
            shutil.rmtree(old)
        else:
            os.rename(temporary, final)
            _sync_folder(self.folder)

    def _prune(self, step: int) -> None:
        """Remove all but the newest ``keep`` up to ``step``; what cannot be removed is left with a warning."""
        paths = [(int(_STEP_NAME.fullmatch(path.name)[1]), path) for path in self._paths()]
        excess = [path for number, path in paths if number <= step][self.keep :]
        # Later ones are damaged when training resumed before them. They must not take the place of a good one.
        excess += [path for number, path in paths if number > step and self._is_damaged(path)]
        for path in excess:
            try:
                # Renamed first, so that a kill while the files go cannot leave half a checkpoint under a plain name.
                doomed = path.with_name(f".tmp-{path.name}")
                os.rename(path, doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                self.warnings.append(f"the old checkpoint {path.name} could not be removed: {error}")

    def _is_damaged(self, path: Path) -> bool:
        try:
            Checkpoint.open(path)
        except CheckpointError:
            return True
        self.warnings.append(f"{path.name} is of a later step than the one just saved, and stays the newest")
        return False


def _header(tensors: Mapping[str, torch.Tensor]) -> dict[str, list]:
    """Return {name: [dtype, shape, bytes]}, after a check that safetensors can hold the tensors."""
    header = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise ArgumentError(complain("a tensor name", "be text, not '' or '__metadata__'", f"{name!r}", "Rename."))
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPE_NAMES:
            got = getattr(tensor, "dtype", type(tensor).__name__)
            raise ArgumentError(complain(f"'{name}'", "be a tensor of a dtype of safetensors", got, "Convert it."))
        header[name] = [_DTYPE_NAMES[tensor.dtype], list(tensor.shape), tensor.numel() * tensor.element_size()]
    return header


def _agree(headers: list[dict]) -> int:
    """Return the bytes of all tensors; every rank sees the same headers, so all raise or none does."""
    for key in ("step", "world"):
        values = [header[key] for header in headers]
        if len(set(values)) > 1 or (key == "world" and values[0] != len(headers)):
            raise CheckpointError(
                complain(f"{key} in save()", "be the same on all ranks", f"{values} by rank", "Save in step.")
            )
    owner: dict[str, int] = {}
    for rank, header in enumerate(headers):
        for name in header["tensors"]:
            if name in owner:
                raise CheckpointError(
                    f"tensor '{name}' came from rank {owner[name]} and from rank {rank}, and only one may write it. "
                    "Nothing was written."
                )
            owner[name] = rank
    return sum(size for header in headers for _, _, size in header["tensors"].values())


def _manifest(step: int, world: int, state: dict, headers: list[dict], files: list[dict]) -> bytes:
    tensors = {
        name: {"file": file["name"], "dtype": dtype, "shape": shape}
        for header, file in zip(headers, files, strict=True)
        for name, (dtype, shape, _) in header["tensors"].items()
    }
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "created": time.time(), "world": world}
    manifest |= {"state": state, "files": files, "tensors": tensors}
    data = json.dumps(manifest, allow_nan=False, indent=1).encode()
    # Whatever could not be read again must fail now, while the previous checkpoint is still there.
    _parse_json(data, Path(MANIFEST))
    if len(data) > MAX_MANIFEST_BYTES:
        raise ArgumentError(
            complain("state", f"fit into {MAX_MANIFEST_BYTES} bytes of JSON", f"{len(data)} bytes", "Use a tensor.")
        )
    return data


def _write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict:
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(plain, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return {"name": path.name, "size": path.stat().st_size, "sha256": _sha256(path)}


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the entries of a folder: a new or renamed file survives a power cut only after that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _as_os_error(error: Exception) -> Exception:
    """Return the OSError that safetensors has put into words, or the error itself."""
    match = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, safetensors.SafetensorError) else None
    if match is None:
        return error
    named = OSError(int(match[1]), os.strerror(int(match[1])))
    named.__cause__ = error
    return named
