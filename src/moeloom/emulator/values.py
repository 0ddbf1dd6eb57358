"""Scalars and tensors of a kernel: numpy arrays with a Gluon element type, and Gluon's rules for operators."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from moeloom.compat import gl
from moeloom.emulator.alarms import Fault, NotEmulated
from moeloom.emulator.dtypes import decode, encode, is_pointer, is_rounded, rounded, storage, value
from moeloom.emulator.state import machine

_POINTER = gl.pointer_type
_INT32, _INT64, _INT1, _F32 = gl.int32, gl.int64, gl.int1, gl.float32


class Value:
    """A scalar (0 axes) or a tensor.

    Attributes:
        a: the values, a numpy array or scalar.
        ty: Gluon element type.
    """

    __slots__ = ("a", "ty")
    __hash__ = None

    def __init__(self, a: np.ndarray, ty: object) -> None:
        self.a, self.ty = a, ty

    @property
    def dtype(self) -> object:
        """Element type."""
        return self.ty

    @property
    def shape(self) -> list[int]:
        """Extents."""
        return list(np.shape(self.a))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(np.size(self.a))

    @property
    def T(self) -> Value:
        """Transposed."""
        return Value(self.a.T, self.ty)

    def scalar(self) -> np.generic:
        """Return the one value of a scalar."""
        a = self.a
        if np.ndim(a):
            raise Fault(f"a tensor of shape {self.shape} is used as a scalar", "assertion")
        return a

    def __bool__(self) -> bool:
        return bool(self.scalar())

    def __int__(self) -> int:
        return int(self.scalar())

    def __index__(self) -> int:
        return int(self.scalar())

    def __float__(self) -> float:
        return float(self.scalar())

    def __repr__(self) -> str:
        if np.ndim(self.a):
            return f"{self.ty}{self.shape}"
        return f"{self.a}"

    def __getitem__(self, key: object) -> Value:
        for k in key if isinstance(key, tuple) else (key,):
            if not (k is None or k == slice(None)):
                raise Fault(f"tensors take only None and ':' as index, not {k}", "assertion")
        return Value(np.asarray(self.a)[key], self.ty)

    def to(self, dtype: object, bitcast: bool = False, fp_downcast_rounding: str | None = None) -> Value:
        """Convert elements."""
        ty = const(dtype)
        if bitcast:
            return Value(decode(encode(self.a, self.ty).view(storage(ty)), ty), ty)
        if is_pointer(ty) or is_pointer(self.ty):
            other = self.ty if is_pointer(ty) else ty
            if not is_pointer(other) and other.name not in ("int64", "uint64"):
                raise Fault(f"a cast between {self.ty} and {ty}", "assertion")
            return Value(np.asarray(self.a, np.int64)[()].astype(value(ty)), ty)
        a = self.a
        if self.ty.is_floating() and ty.is_int():
            a = np.trunc(a)
        return Value(rounded(a, ty)[()], ty)

    cast = to

    def reshape(self, *shape: object) -> Value:
        """Give the elements other extents."""
        return Value(np.reshape(self.a, dims(shape)), self.ty)

    def permute(self, *order: object) -> Value:
        """Reorder the axes."""
        return Value(np.transpose(self.a, dims(order)), self.ty)

    trans = permute

    def split(self) -> tuple[Value, Value]:
        """Split the last axis, of extent 2."""
        if self.shape[-1] != 2:
            raise Fault(f"split of a tensor of shape {self.shape}", "assertion")
        return Value(self.a[..., 0], self.ty), Value(self.a[..., 1], self.ty)

    def expand_dims(self, axis: int) -> Value:
        """Insert an axis of extent 1."""
        return Value(np.expand_dims(self.a, const(axis)), self.ty)

    def broadcast_to(self, *shape: object) -> Value:
        """Repeat along axes of extent 1."""
        return Value(np.broadcast_to(self.a, dims(shape)), self.ty)

    def sum(self, axis: int | None = None, keep_dims: bool = False) -> Value:
        """Sum along an axis."""
        return reduced(np.sum)(self, axis, keep_dims)

    def max(self, axis: int | None = None, keep_dims: bool = False) -> Value:
        """Largest along an axis."""
        return reduced(np.max)(self, axis, keep_dims)

    def min(self, axis: int | None = None, keep_dims: bool = False) -> Value:
        """Smallest along an axis."""
        return reduced(np.min)(self, axis, keep_dims)

    def abs(self) -> Value:
        """Magnitudes."""
        return unary(np.abs)(self)

    def logical_and(self, other: object) -> Value:
        """Both are true."""
        return Value(np.logical_and(self.a, as_value(other).a), _INT1)

    def logical_or(self, other: object) -> Value:
        """One of both is true."""
        return Value(np.logical_or(self.a, as_value(other).a), _INT1)


def const(x: object) -> object:
    """Unwrap a constexpr."""
    return x.value if isinstance(x, gl.constexpr) else x


def dims(shape: tuple) -> list[int]:
    """Extents given one by one or as a sequence."""
    if len(shape) == 1 and isinstance(const(shape[0]), (tuple, list)):
        shape = const(shape[0])
    return [int(const(s)) for s in shape]


def as_value(x: object, like: object = None) -> Value:
    """Wrap a Python number; ``like`` is the type of the other operand, which a number adapts to."""
    if isinstance(x, Value):
        return x
    x = const(x)
    if isinstance(x, (bool, np.bool_)):
        return Value(np.bool_(x), _INT1)
    if isinstance(x, (int, np.integer)):
        if like is not None and like.__class__ is not _POINTER and like.name != "int1":
            return Value(value(like).type(x), like)
        return Value(np.int32(x), _INT32) if -(2**31) <= x < 2**31 else Value(np.int64(x), _INT64)
    if isinstance(x, (float, np.floating)):
        ty = like if like is not None and like.__class__ is not _POINTER and like.is_floating() else _F32
        return Value(rounded(x, ty)[()], ty)
    raise NotEmulated(f"a value of type {type(x).__name__} in an expression")


def common(x: object, y: object) -> tuple[np.ndarray, np.ndarray, object]:
    """Bring two operands to one type, as the language does."""
    if x.__class__ is not Value and not isinstance(x, Value):
        x = as_value(x, y.ty if isinstance(y, Value) else None)
    if y.__class__ is not Value and not isinstance(y, Value):
        y = as_value(y, x.ty)
    s, t = x.ty, y.ty
    a, b = x.a, y.a
    if s is t:
        return a, b, s
    if np.ndim(a) and np.ndim(b) and np.ndim(a) != np.ndim(b):
        raise Fault(f"operands of shapes {x.shape} and {y.shape}", "assertion")
    if is_pointer(s) or is_pointer(t) or s == t:
        return a, b, s
    wide = s.primitive_bitwidth != t.primitive_bitwidth
    if s.is_floating() != t.is_floating():
        ty = s if s.is_floating() else t
    elif wide:
        ty = max(s, t, key=lambda u: u.primitive_bitwidth)
    elif s.is_floating():
        ty = _F32
    else:
        ty = s if s.name.startswith("u") else t
    return a.astype(value(ty)), b.astype(value(ty)), ty


def binary(
    fn: Callable, *, pointers: Callable | None = None, result: object = None, integers: bool = False
) -> Callable[[object, object], Value]:
    """Make an operator.

    Args:
        fn: numpy function of two arrays.
        pointers: what to call instead if an operand is a pointer.
        result: element type of the result, if it is not that of the operands.
        integers: floats are an error.
    """

    def function(x: object, y: object, **_: object) -> Value:
        if (
            x.__class__ is Value
            and x.ty is _INT32
            and (y.__class__ is int or (y.__class__ is Value and y.ty is _INT32))
        ):
            # What most of a kernel's scalar code is.
            a, b, ty = x.a, np.int32(y) if y.__class__ is int else y.a, _INT32
            return Value(fn(a, b), ty if result is None else result)
        if pointers is not None and any(isinstance(z, Value) and z.ty.__class__ is _POINTER for z in (x, y)):
            return pointers(x, y)
        a, b, ty = common(x, y)
        if integers and ty.is_floating():
            raise Fault("an integer operator on floats", "assertion")
        out = fn(a, b)
        if result is not None:
            return Value(out, result)
        if ty is _INT1 or ty == _INT1:
            return Value(out, _INT1 if out.dtype == np.bool_ else _INT32)
        return Value(rounded(out, ty)[()] if is_rounded(ty) else out, ty)

    return function


def _pointer_step(sign: int) -> Callable[[object, object], Value]:
    def step(x: object, y: object) -> Value:
        pointer, offset = (x, y) if isinstance(x, Value) and is_pointer(x.ty) else (y, x)
        offset = as_value(offset)
        if is_pointer(offset.ty):
            raise NotEmulated("the difference of two pointers")
        size = storage(pointer.ty.element_ty).itemsize
        return Value(pointer.a + np.asarray(offset.a).astype(np.int64)[()] * np.int64(sign * size), pointer.ty)

    return step


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not (b if b.ndim == 0 else np.all(b)):
        raise Fault("division by zero", "assertion")
    return np.fmod(a, b)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero as in C, unlike Python."""
    out = (a - _remainder(a, b)) // b
    return out


def _true_division(x: object, y: object) -> Value:
    a, b, ty = common(x, y)
    if not ty.is_floating():
        a, b, ty = np.float32(a), np.float32(b), _F32
    return Value(rounded(a / b, ty)[()], ty)


add = binary(operator.add, pointers=_pointer_step(1))
sub = binary(operator.sub, pointers=_pointer_step(-1))
mul = binary(operator.mul)
floordiv = binary(_quotient, integers=True)
_OPERATORS = {
    "add": add,
    "sub": sub,
    "mul": mul,
    "truediv": _true_division,
    "floordiv": floordiv,
    "mod": binary(_remainder),
    "lshift": binary(operator.lshift, integers=True),
    "rshift": binary(operator.rshift, integers=True),
    "and": binary(operator.and_, integers=True),
    "or": binary(operator.or_, integers=True),
    "xor": binary(operator.xor, integers=True),
}
_COMPARISONS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_COMPARISONS |= {"eq": operator.eq, "ne": operator.ne}


def _install() -> None:
    for name, function in _OPERATORS.items():
        setattr(Value, f"__{name}__", function)
        setattr(Value, f"__r{name}__", lambda self, other, function=function: function(other, self))
    for name, fn in _COMPARISONS.items():
        setattr(Value, f"__{name}__", binary(fn, result=_INT1))
    Value.__neg__ = lambda self: Value(-self.a, self.ty)
    Value.__invert__ = lambda self: Value(~self.a, self.ty)


_install()


def unary(fn: Callable) -> Callable[[object], Value]:
    """Make an elementwise function."""

    def function(x: object) -> Value:
        x = as_value(x)
        return Value(rounded(fn(x.a), x.ty)[()], x.ty)

    return function


def reduced(fn: Callable) -> Callable[..., Value]:
    """Make a reduction over one axis, or over all."""

    def reduction(x: Value, axis: int | None = None, keep_dims: bool = False, **_: object) -> Value:
        out = fn(x.a, axis=const(axis), keepdims=bool(const(keep_dims)))
        return Value(rounded(out, x.ty)[()], x.ty)

    return reduction


def full(shape: object, fill: object, dtype: object, layout: object = None) -> Value:
    """A tensor of one value."""
    ty = const(dtype)
    return Value(np.full(dims((shape,)), rounded(as_value(fill, ty).a, ty), value(ty)), ty)


def where(condition: object, x: object, y: object) -> Value:
    """Choose elementwise."""
    a, b, ty = common(x, y)
    return Value(np.where(as_value(condition).a, a, b)[()], ty)


class Accumulator(Value):
    """The result of an asynchronous wgmma: a value only once a wait has covered it."""

    __slots__ = ("extents", "result", "waited")

    def __init__(self, ty: object, extents: list[int]) -> None:
        self.ty, self.extents = ty, extents
        self.result, self.waited = None, False

    @property
    def shape(self) -> list[int]:
        """Extents."""
        return list(self.extents)

    @property
    def a(self) -> np.ndarray:
        """The values."""
        if not self.waited:
            text = "the accumulator of a wgmma is read before the warpgroup_mma_wait that covers it"
            raise Fault(f"{machine().whose()}: {text}", "before-wait")
        return self.result
