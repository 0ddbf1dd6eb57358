"""Real text for a byte-level language model: reading, splitting and batching.

The vocabulary is the 256 byte values, so no tokenizer is needed and one token is one byte.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moeloom.errors import ArgumentError, DataError, complain

if TYPE_CHECKING:
    import torch

VOCABULARY = 256
IGNORE_INDEX = -100
NEWLINE = 10

MIN_LIBRARY_BYTES = 1_000_000
MIN_DATA_BYTES = 65_536
MAX_DATA_BYTES = 4 << 30

_LIBRARY_SKIP = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"},
)
_TEXT_SUFFIXES = frozenset(
    # fmt: off
    {
        ".bat",
        ".c",
        ".cc",
        ".cfg",
        ".cpp",
        ".cs",
        ".css",
        ".csv",
        ".cu",
        ".cuh",
        ".go",
        ".h",
        ".hpp",
        ".html",
        ".ini",
        ".java",
        ".js",
        ".json",
        ".jsonl",
        ".kt",
        ".lua",
        ".md",
        ".php",
        ".pl",
        ".py",
        ".pyi",
        ".r",
        ".rb",
        ".rs",
        ".rst",
        ".scala",
        ".sh",
        ".sql",
        ".swift",
        ".tex",
        ".toml",
        ".ts",
        ".tsv",
        ".tsx",
        ".txt",
        ".xml",
        ".yaml",
        ".yml",
    }
    # fmt: on
)
_VALID_ONE_IN = 20
_VALID_SHARE_LIMITS = (0.01, 0.25)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text that is split into a training and a validation part.

    Attributes:
        name: what was read, for people.
        files: number of documents that hold at least one byte.
        train: uint8 array [bytes], read-only.
        valid: uint8 array [bytes], read-only, disjoint from ``train``.
        sha256: hex digest over names, order, bytes and split; equal digests mean equal training and validation text.
        split: how the two parts were chosen, in words.
    """

    name: str
    files: int
    train: np.ndarray
    valid: np.ndarray
    sha256: str
    split: str

    def describe(self) -> str:
        """Return one line with the sizes, the split and the SHA-256."""
        return (
            f"{self.name}: {self.files} file{'' if self.files == 1 else 's'}, {self.train.size / 1e6:.2f} MB train + "
            f"{self.valid.size / 1e6:.2f} MB validation ({self.split}), SHA-256 {self.sha256}"
        )


def load_text(path: str | os.PathLike | None = None) -> Corpus:
    """Read and split the text to train on.

    Args:
        path: a file, or a folder whose text files are read in sorted order; None reads the ``.py`` files of the running
            interpreter's standard library. Symbolic links inside a folder are not followed. Hidden folders, files
            without a suffix known for text and files with a NUL byte are left out.

    Returns:
        The corpus. Of many files, those that a hash of their name picks (about 5 %) are the validation text; the choice
        depends on nothing but the relative names. A single file, or a folder where that choice would give less than
        1 % or more than 25 % of the bytes, has the last 5 % of each file as validation text.

    Raises:
        DataError: nothing there, no text, too little text (1 MB for the standard library, 64 KiB for ``path``), too
            much, or a file that cannot be read.
    """
    if path is None:
        return _load_library(Path(sysconfig.get_paths()["stdlib"]))
    root = Path(path)
    try:
        mode = root.stat().st_mode
    except (OSError, ValueError) as error:
        raise DataError(
            complain("--data", "name a readable file or folder", f"'{path}' ({error})", "Check the path.")
        ) from error
    if stat.S_ISDIR(mode):
        return _load_folder(root)
    if stat.S_ISREG(mode):
        return _load_file(root)
    raise DataError(
        complain("--data", "name a regular file or a folder", f"'{path}', which is neither", "Copy the text to a file.")
    )


def _load_library(root: Path) -> Corpus:
    documents, _ = _read_folder(root, skip=_LIBRARY_SKIP, suffixes=frozenset({".py"}))
    found = sum(len(text) for _, text in documents)
    if found < MIN_LIBRARY_BYTES:
        raise DataError(
            f"the standard library of this Python holds too little source text: {len(documents)} .py files with "
            f"{found / 1e6:.3f} MB in {root}, and at least {MIN_LIBRARY_BYTES / 1e6:.0f} MB is needed. "
            "Name a text file or a folder of text with --data PATH."
        )
    return _build("Python standard library", documents)


def _load_folder(root: Path) -> Corpus:
    documents, left_out = _read_folder(root, skip=frozenset({"__pycache__"}), suffixes=_TEXT_SUFFIXES)
    found = sum(len(text) for _, text in documents)
    got = f"{len(documents)} text files with {found} bytes in '{root}' ({left_out} other files left out)"
    _check_enough(found, got, f"Name more text; known suffixes are {' '.join(sorted(_TEXT_SUFFIXES))}.")
    return _build(root.resolve().name or str(root), documents)


def _load_file(path: Path) -> Corpus:
    _check_not_too_much(path.stat().st_size, f"'{path}'")
    text = _read(path)
    if b"\0" in text:
        raise DataError(
            complain(
                "--data",
                "name text without NUL bytes",
                f"'{path}', which is binary (or UTF-16)",
                "Name a text file, for example in UTF-8.",
            )
        )
    _check_enough(len(text), f"{len(text)} bytes in '{path}'", "Name a longer file, or a folder.")
    return _build(path.name, [(path.name, text)])


def _check_enough(found: int, got: str, fix: str) -> None:
    if found < MIN_DATA_BYTES:
        raise DataError(complain("--data", f"hold at least {MIN_DATA_BYTES} bytes of text", got, fix))


def _check_not_too_much(size: int, where: str) -> None:
    if size > MAX_DATA_BYTES:
        raise DataError(
            complain(
                "--data",
                f"hold at most {MAX_DATA_BYTES >> 30} GiB, because it is kept in memory",
                f"more than that in {where}",
                "Name a part of it.",
            )
        )


def _read_folder(root: Path, skip: frozenset, suffixes: frozenset) -> tuple[list[tuple[str, bytes]], int]:
    """Return (sorted [(relative name, text)], number of files left out); empty files count as neither."""
    names, left_out = _list_folder(root, skip, suffixes)
    documents, size = [], 0
    for name in sorted(names):
        text = _read(root / name)
        size += len(text)
        _check_not_too_much(size, f"'{root}'")
        if b"\0" in text:
            left_out += 1
        elif text:
            documents.append((name, text))
    return documents, left_out


def _list_folder(root: Path, skip: frozenset, suffixes: frozenset) -> tuple[list[str], int]:
    names, left_out = [], 0

    def refuse(error: OSError) -> None:
        raise DataError(f"folder '{error.filename}' cannot be read: {error}. Change its permissions.") from error

    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=False):
        # Editing the list in place keeps os.walk out of those folders.
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            # lstat: a link could lead out of the folder, or make a text count twice.
            if path.suffix.lower() in suffixes and stat.S_ISREG(path.lstat().st_mode):
                names.append(path.relative_to(root).as_posix())
            else:
                left_out += 1
    return names, left_out


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"text file '{path}' cannot be read: {error}. Make it readable, or leave it out.") from error


def _build(name: str, documents: list[tuple[str, bytes]]) -> Corpus:
    # A newline at the end of each file keeps the last line of one from running into the first of the next.
    ended = [(key, text if text.endswith(b"\n") else text + b"\n") for key, text in documents]
    train, valid, split = _split_by_file(ended)
    share = len(valid) / (len(train) + len(valid))
    if len(ended) == 1 or not _VALID_SHARE_LIMITS[0] <= share <= _VALID_SHARE_LIMITS[1]:
        train, valid, split = _split_by_position(ended)
    digest = hashlib.sha256(split.encode())
    for key, text in ended:
        encoded = key.encode("utf-8", "surrogateescape")
        digest.update(b"%d:%b:%d:" % (len(encoded), encoded, len(text)))
        digest.update(text)
    return Corpus(
        name=name,
        files=len(ended),
        train=np.frombuffer(train, dtype=np.uint8),
        valid=np.frombuffer(valid, dtype=np.uint8),
        sha256=digest.hexdigest(),
        split=split,
    )


def _is_validation(name: str) -> bool:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest, "big") % _VALID_ONE_IN == 0


def _split_by_file(documents: list[tuple[str, bytes]]) -> tuple[bytes, bytes, str]:
    train = b"".join(text for name, text in documents if not _is_validation(name))
    valid = b"".join(text for name, text in documents if _is_validation(name))
    return train, valid, "split by file"


def _split_by_position(documents: list[tuple[str, bytes]]) -> tuple[bytes, bytes, str]:
    cuts = [len(text) - len(text) // _VALID_ONE_IN for _, text in documents]
    train = b"".join(text[:cut] for (_, text), cut in zip(documents, cuts, strict=True))
    valid = b"".join(text[cut:] for (_, text), cut in zip(documents, cuts, strict=True))
    if not valid:
        raise DataError(
            f"no validation text: each of the {len(documents)} files is shorter than {_VALID_ONE_IN} bytes. "
            "Name a folder with longer files."
        )
    return train, valid, "last 5 % of each file"


class Batches:
    """Training batches as a pure function of the step: nothing to save, nothing to restore.

    The text is cut into windows of ``seq`` bytes. Each epoch shifts the cuts by its own random phase and visits every
    window once, in its own random order; a batch may end one epoch and begin the next. Sample ``i`` of step ``s`` is
    window number ``s * batch + i`` of that endless sequence, whatever the number of ranks that share the batch. Only
    raw PCG64 bits are used, which NumPy keeps stable between versions.

    Args:
        data: uint8 array [bytes].
        seq: bytes of a sample.
        batch: samples of the global batch, over all ranks.
        seed: not negative; the same seed gives the same batches.

    Raises:
        ArgumentError: a number out of range, or a text shorter than ``2 * seq``.
    """

    def __init__(self, data: np.ndarray, seq: int, batch: int, seed: int) -> None:
        for name, value, least in (("seq", seq, 1), ("batch", batch, 1), ("seed", seed, 0)):
            if value < least:
                raise ArgumentError(complain(name, f"be at least {least}", value, "Use a larger number."))
        if data.size < 2 * seq:
            raise ArgumentError(
                complain("seq", f"be at most half of the {data.size} bytes of text", seq, "Shorten it or add text.")
            )
        self.data, self.seq, self.batch, self.seed = data, seq, batch, seed
        # The last target of the last window fits even at the largest phase, seq - 1.
        self.windows = (data.size - seq) // seq
        self._starts: dict[int, np.ndarray] = {}

    def get(self, step: int, rank: int = 0, world: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples of one step that belong to one rank.

        Args:
            step: not negative.
            rank: which contiguous slice of the global batch.
            world: number of equal slices; divides ``batch``.

        Returns:
            (inputs, targets), both int64 [batch / world, seq]; targets are the inputs moved by one byte.

        Raises:
            ArgumentError: a number out of range, or ``world`` does not divide ``batch``.
        """
        import torch

        if world < 1 or self.batch % world:
            raise ArgumentError(
                complain("batch", f"be divisible by the {world} ranks", self.batch, "Change --batch or the world size.")
            )
        if not 0 <= rank < world:
            raise ArgumentError(complain("rank", f"lie in 0..{world - 1}", rank, "Pass the rank in the group."))
        if step < 0:
            raise ArgumentError(complain("step", "not be negative", step, "Count steps from 0."))
        local = self.batch // world
        first = step * self.batch + rank * local
        starts = np.array([self._start(number) for number in range(first, first + local)])
        samples = self.data[starts[:, None] + np.arange(self.seq + 1)].astype(np.int64)
        whole = torch.from_numpy(samples)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    def _start(self, number: int) -> int:
        epoch, index = divmod(number, self.windows)
        if epoch not in self._starts:
            # A batch touches few epochs; old ones are dropped so that memory stays that of a few orders.
            if len(self._starts) >= 4:
                self._starts.pop(next(iter(self._starts)))
            bits = np.random.PCG64([self.seed, epoch]).random_raw(self.windows + 1)
            phase = bits[-1] % np.uint64(self.seq)
            order = np.argsort(bits[:-1], kind="stable")
            self._starts[epoch] = order * self.seq + int(phase)
        return int(self._starts[epoch][index])


def validation_windows(
    data: np.ndarray, seq: int, batch: int, limit_bytes: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of non-overlapping windows in which every byte of the text is a target exactly once.

    The input in front of a window's first target is the byte before it in the text, and a newline in front of the very
    first one; earlier bytes are not seen, so the first targets of a window are predicted from little context.

    Args:
        data: uint8 array [bytes].
        seq: bytes of a window.
        batch: windows of a batch.
        limit_bytes: about how many bytes to use; the whole windows kept are spread evenly over the text. None: all.

    Returns:
        An iterator of (inputs, targets), both int64 [batch, seq]. Where the last batch is padded, inputs are newlines
        and targets are -100, so shapes never change.

    Raises:
        ArgumentError: an empty text, or a number below 1.
    """
    for name, value in (("seq", seq), ("batch", batch), ("limit_bytes", 1 if limit_bytes is None else limit_bytes)):
        if value < 1:
            raise ArgumentError(complain(name, "be at least 1", value, "Use a larger number."))
    if data.size == 0:
        raise ArgumentError(complain("data", "hold at least one byte", "an empty text", "Pass validation text."))
    windows = -(-data.size // seq)
    kept = windows if limit_bytes is None else min(windows, -(-limit_bytes // seq))
    return _windows(data, seq, batch, np.arange(kept) * windows // kept)


def _windows(data: np.ndarray, seq: int, batch: int, chosen: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    import torch

    for first in range(0, len(chosen), batch):
        inputs = np.full((batch, seq), NEWLINE, dtype=np.int64)
        targets = np.full((batch, seq), IGNORE_INDEX, dtype=np.int64)
        for row, window in enumerate(chosen[first : first + batch]):
            start = int(window) * seq
            text = data[start : start + seq]
            targets[row, : text.size] = text
            inputs[row, 1 : text.size] = text[:-1]
            if start:
                inputs[row, 0] = data[start - 1]
        yield torch.from_numpy(inputs), torch.from_numpy(targets)
