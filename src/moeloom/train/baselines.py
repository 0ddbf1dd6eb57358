"""What simpler methods reach on the same split, to print beside a trained model.

Measured on the standard library of CPython 3.11.7 (10.47 MB train, 0.59 MB validation), in bits per byte of validation
text: order 0 4.81, order 1 3.60, order 2 2.65, order 3 2.10, order 4 1.93, order 5 1.91, zlib 1.92, xz 1.55. Over the
20 ways to choose validation files by the same hash (each remainder), order 0 is 4.73 +- 0.17, order 3 is
2.06 +- 0.17 and xz is 1.60 +- 0.12 (mean and standard deviation), so only numbers of the same split can be compared.

The counting models learn from the training text; the compressors see the validation text alone, and learn while they
read it. An xz that has read the training text before (size of both together less size of the training text) needs 1.26:
it copies long matches, which neither a counting model nor a small network can.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moeloom.errors import ArgumentError, complain

if TYPE_CHECKING:
    from moeloom.train.data import Corpus

CACHE_NAME = "baselines.json"
_MAX_ORDER = 7


@dataclass(frozen=True)
class Baselines:
    """Bits per byte of the validation text; smaller is better.

    Attributes:
        order0: byte frequencies of the training text.
        order3: Witten-Bell model of the last three bytes, counted on the training text.
        zlib: the validation text alone through zlib level 6.
        xz: the validation text alone through xz preset 6.
    """

    order0: float
    order3: float
    zlib: float
    xz: float

    def named(self) -> dict[str, float]:
        """Return the values by names for people."""
        return {"order-0 counts": self.order0, "order-3 counts": self.order3, "zlib": self.zlib, "xz": self.xz}


def order_n_bits(train: np.ndarray, valid: np.ndarray, order: int) -> float:
    """Return the cross entropy of a counting model with Witten-Bell interpolation, in bits per byte.

    The model is counted on ``train`` and stays fixed on ``valid``:
    ``P_k(c | h) = (count(h c) + kinds(h) * P_{k-1}(c | h')) / (count(h) + kinds(h))``, where ``kinds`` is the number of
    different bytes seen after ``h``, ``h'`` drops the oldest byte, and ``P_{-1} = 1/256``. An unseen ``h`` takes
    ``P_{k-1}``. It is a proper distribution over the 256 bytes. The first bytes of ``valid`` use the context there is.

    Args:
        train: uint8 array [bytes], not empty.
        valid: uint8 array [bytes], not empty.
        order: number of bytes of context, 0..7.

    Raises:
        ArgumentError: an empty text or an order out of range.
    """
    if not 0 <= order <= _MAX_ORDER:
        raise ArgumentError(complain("order", f"lie in 0..{_MAX_ORDER}", order, "Use a shorter context."))
    if not train.size or not valid.size:
        raise ArgumentError(complain("train and valid", "not be empty", "an empty text", "Pass more text."))
    chance = np.full(valid.size, 1 / 256)
    for length in range(order + 1):
        if min(train.size, valid.size) > length:
            chance[length:] = _refine(chance[length:], _keys(train, length), _keys(valid, length))
    return float(-np.log2(chance).mean())


def _keys(text: np.ndarray, length: int) -> np.ndarray:
    """Return [bytes - length] integers: each byte with the ``length`` bytes before it in front."""
    kind = np.uint32 if length < 4 else np.uint64
    keys = np.zeros(text.size - length, dtype=kind)
    for shift in range(length + 1):
        keys = (keys << kind(8)) | text[shift : text.size - length + shift]
    return keys


def _refine(lower: np.ndarray, seen: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Return P_k of the keys ``asked``, given P_{k-1} and the keys of the training text."""
    pairs, pair_counts = np.unique(seen, return_counts=True)
    # Pairs are sorted, so the pairs of one context are neighbours.
    contexts, first, kinds = np.unique(pairs >> pairs.dtype.type(8), return_index=True, return_counts=True)
    totals = np.add.reduceat(pair_counts, first)
    count = _look_up(pairs, pair_counts, asked)
    context = asked >> asked.dtype.type(8)
    total, kind = _look_up(contexts, totals, context), _look_up(contexts, kinds, context)
    known = total > 0
    return np.where(known, (count + kind * lower) / np.where(known, total + kind, 1), lower)


def _look_up(keys: np.ndarray, values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, asked), keys.size - 1)
    return np.where(keys[place] == asked, values[place], 0)


def xz_bits(valid: np.ndarray) -> float:
    """Return ``8 * len(xz(valid)) / len(valid)`` at preset 6, with container bytes and without the training text."""
    return 8 * len(lzma.compress(valid.tobytes())) / valid.size


def zlib_bits(valid: np.ndarray) -> float:
    """Return ``8 * len(zlib(valid)) / len(valid)`` at level 6, with container bytes and without the training text."""
    return 8 * len(zlib.compress(valid.tobytes())) / valid.size


def compute_baselines(corpus: Corpus, folder: str | os.PathLike | None = None) -> Baselines:
    """Return the baselines of a corpus, from the cache where the corpus is the same.

    The compressors release the interpreter lock and run in threads beside the counting. A caller that wants to train
    meanwhile can call this in a thread of its own.

    Args:
        corpus: the split text.
        folder: where ``baselines.json`` is kept, or None for no cache. A cache that cannot be read is computed
            anew, and one that cannot be written is left out.
    """
    cache = None if folder is None else Path(folder) / CACHE_NAME
    stored = None if cache is None else _read_cache(cache, corpus.sha256)
    if stored is not None:
        return stored
    with ThreadPoolExecutor(max_workers=2) as pool:
        zlib_job, xz_job = pool.submit(zlib_bits, corpus.valid), pool.submit(xz_bits, corpus.valid)
        order0, order3 = (order_n_bits(corpus.train, corpus.valid, order) for order in (0, 3))
        result = Baselines(order0=order0, order3=order3, zlib=zlib_job.result(), xz=xz_job.result())
    if cache is not None:
        _write_cache(cache, corpus.sha256, result)
    return result


def _read_cache(path: Path, sha256: str) -> Baselines | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["sha256"] != sha256:
            return None
        return Baselines(**{field.name: float(stored["bits_per_byte"][field.name]) for field in fields(Baselines)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cache(path: Path, sha256: str, result: Baselines) -> None:
    text = json.dumps({"sha256": sha256, "bits_per_byte": asdict(result)}, indent=1)
    temporary = path.with_name(path.name + ".tmp")
    # The numbers take a second to compute again; not being able to keep them is no reason to stop a training.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
