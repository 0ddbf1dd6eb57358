"""Element types: how they lie in memory (storage) and how the emulator computes with them (values).

bf16 and the fp8 types are computed in fp32 and rounded to their own precision after every operation, as the compiler
does.
"""

from __future__ import annotations

import numpy as np
import torch

from moeloom.compat import gl

_F32 = ("bf16", "fp32", "fp8e4nv", "fp8e5")
_VALUES = {
    "int1": np.bool_,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "fp16": np.float16,
    "fp64": np.float64,
} | dict.fromkeys(_F32, np.float32)
_STORAGE = _VALUES | {"int1": np.uint8, "bf16": np.uint16, "fp8e4nv": np.uint8, "fp8e5": np.uint8}
VALUE = {name: np.dtype(t) for name, t in _VALUES.items()}
STORAGE = {name: np.dtype(t) for name, t in _STORAGE.items()}
INT64 = np.dtype(np.int64)

#: torch dtype -> Gluon element type.
FROM_TORCH = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float64: gl.float64,
    torch.bool: gl.int1,
    torch.int8: gl.int8,
    torch.uint8: gl.uint8,
    torch.int16: gl.int16,
    torch.int32: gl.int32,
    torch.int64: gl.int64,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


class _Fp8:
    """Tables of one 8-bit float format."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.decode = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
        codes = np.arange(128, dtype=np.uint8)
        finite = np.isfinite(self.decode[:128])
        self.codes, self.points = codes[finite], self.decode[:128][finite].astype(np.float64)
        self.middles = (self.points[1:] + self.points[:-1]) / 2
        self.nan = np.uint8(0x7F)

    def encode(self, a: np.ndarray) -> np.ndarray:
        """Round to nearest even, saturating at the largest finite value as ``cvt.rn.satfinite`` does."""
        a = np.asarray(a, np.float32)
        size = np.abs(a).astype(np.float64)
        index = np.searchsorted(self.middles, size, "left")
        tie = (index < len(self.middles)) & (size == self.middles[np.minimum(index, len(self.middles) - 1)])
        index = index + (tie & (self.codes[np.minimum(index, len(self.codes) - 1)] & 1 == 1))
        code = self.codes[index] | (np.signbit(a).astype(np.uint8) << np.uint8(7))
        return np.where(np.isnan(a), self.nan, code).astype(np.uint8)


FP8 = {"fp8e4nv": _Fp8(torch.float8_e4m3fn), "fp8e5": _Fp8(torch.float8_e5m2)}
_ROUNDED = {"bf16", *FP8}


def is_pointer(ty: object) -> bool:
    """Whether a Gluon type is a pointer."""
    return isinstance(ty, gl.pointer_type)


def storage(ty: object) -> np.dtype:
    """Return the dtype of one element in memory."""
    return INT64 if is_pointer(ty) else STORAGE[ty.name]


def value(ty: object) -> np.dtype:
    """Return the dtype the emulator computes with."""
    return INT64 if is_pointer(ty) else VALUE[ty.name]


def is_rounded(ty: object) -> bool:
    """Whether values of the type need rounding after an operation in fp32."""
    return not is_pointer(ty) and ty.name in _ROUNDED


def encode(a: np.ndarray, ty: object) -> np.ndarray:
    """Values -> storage bits."""
    if is_pointer(ty):
        return np.asarray(a, np.int64)
    if ty.name == "bf16":
        bits = np.ascontiguousarray(a, np.float32).view(np.uint32).reshape(np.shape(a))
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        out = ((bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
        nan = np.isnan(a)
        return np.where(nan, np.uint16(0x7FC0), out) if np.any(nan) else out
    if ty.name in FP8:
        return FP8[ty.name].encode(a)
    return np.asarray(a).astype(STORAGE[ty.name])


def decode(bits: np.ndarray, ty: object) -> np.ndarray:
    """Storage bits -> values."""
    if is_pointer(ty):
        return bits.astype(np.int64)
    if ty.name == "bf16":
        return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if ty.name in FP8:
        return FP8[ty.name].decode[bits]
    return bits.astype(VALUE[ty.name])


def rounded(a: np.ndarray, ty: object) -> np.ndarray:
    """Bring computed values to the precision of the type."""
    a = np.asarray(a)
    if is_rounded(ty):
        return np.asarray(decode(encode(a.astype(np.float32), ty), ty))
    return a.astype(value(ty))
