"""``metrics.jsonl``: one JSON object a line, always valid JSON, also after a crash and a resume."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from moeloom.errors import DataError


class MetricsWriter:
    """Append rows to a metrics file, each complete on disk or not there at all.

    Args:
        path: the file; its folder is made if needed.
        resume_from: the step that training continues from. Rows of later steps, which the training is about to write
            again, and a cut-off last line are dropped, in one atomic replacement. None starts an empty file, in place
            of an existing one.

    Raises:
        DataError: the file cannot be written, or holds a damaged line before its end.
    """

    def __init__(self, path: str | os.PathLike, resume_from: int | None = None) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._rewrite(resume_from)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise self._cannot(error) from error

    def _rewrite(self, resume_from: int | None) -> None:
        rows = []
        if resume_from is not None and self.path.exists():
            rows = [row for row in read_metrics(self.path) if row.get("step", 0) <= resume_from]
        temporary = self.path.with_name(self.path.name + ".tmp")
        with open(temporary, "wb") as file:
            file.writelines(_line(row) for row in rows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def _cannot(self, error: OSError) -> DataError:
        return DataError(f"metrics file '{self.path}' cannot be written: {error}. Free some space, or change --out.")

    def write(self, row: dict) -> None:
        """Append one row; NaN and infinity become null and the row gets ``"non_finite": true``.

        Args:
            row: JSON values; NumPy and torch arrays become lists.

        Raises:
            DataError: the file cannot be written; a partly written line is taken back.
        """
        data = _line(row)
        start = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            # Otherwise the next row would continue this half line, and both would be lost.
            os.ftruncate(self._file, start)
            raise self._cannot(error) from error

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """Return the rows of a metrics file; a last line that is cut off is left out.

    Raises:
        DataError: the file cannot be read, or a line before the end is not a JSON object.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"metrics file '{path}' cannot be read: {error}. Check the path.") from error
    rows = []
    # What follows the last newline is either nothing or a line that was never finished.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"line {number} of '{path}' is not JSON: {error}. Remove that line.") from error
        if not isinstance(row, dict):
            raise DataError(f"line {number} of '{path}' must be a JSON object; got {line[:40]!r}. Remove that line.")
        rows.append(row)
    return rows


def _line(row: dict) -> bytes:
    finite, clean = _clean(row)
    if not finite:
        clean["non_finite"] = True
    return json.dumps(clean, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _clean(value: object) -> tuple[bool, object]:
    """Return (whether every number was finite, the value as plain JSON types with null for the others)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return False, None
    if isinstance(value, dict):
        items = {key: _clean(item) for key, item in value.items()}
        return all(ok for ok, _ in items.values()), {key: item for key, (_, item) in items.items()}
    if isinstance(value, (list, tuple)):
        parts = [_clean(item) for item in value]
        return all(ok for ok, _ in parts), [item for _, item in parts]
    return True, value
