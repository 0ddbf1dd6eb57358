"""From a ``@gluon.jit`` function to a plain Python function over the emulated language.

The function's own code object runs; only the names it refers to are replaced. So what is tested is the source that the
compiler gets, line by line.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable

import numpy as np

from moeloom import compat
from moeloom.compat import gl
from moeloom.emulator import values
from moeloom.emulator.alarms import NotEmulated
from moeloom.emulator.ops import asm, atomics, cp_async, language, mbarrier, tma, wgmma
from moeloom.emulator.shared import allocate_shared_memory
from moeloom.emulator.state import KERNEL_FILES
from moeloom.emulator.values import Value, binary, const, full, reduced, unary, where

_LANGUAGE = {
    "add": values.add,
    "sub": values.sub,
    "mul": values.mul,
    "allocate_shared_memory": allocate_shared_memory,
    "arange": language.arange,
    "associative_scan": language.associative_scan,
    "assume": language.check,
    "atomic_add": atomics.atomic_add,
    "atomic_and": atomics.atomic_and,
    "atomic_cas": atomics.atomic_cas,
    "atomic_max": atomics.atomic_max,
    "atomic_min": atomics.atomic_min,
    "atomic_or": atomics.atomic_or,
    "atomic_xchg": atomics.atomic_xchg,
    "atomic_xor": atomics.atomic_xor,
    "barrier": language.thread_barrier,
    "broadcast": language.broadcast,
    "cast": Value.to,
    "cdiv": language.cdiv,
    "constexpr": const,
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "device_assert": language.check,
    "device_print": lambda *a, **k: None,
    "expand_dims": Value.expand_dims,
    "fma": language.fma,
    "full": full,
    "full_like": language.full_like,
    "gather": language.gather,
    "histogram": language.histogram,
    "inline_asm": asm.inline_asm,
    "inline_asm_elementwise": asm.inline_asm_elementwise,
    "join": language.join,
    "load": language.load,
    "max": reduced(np.max),
    "max_constancy": lambda x, v: x,
    "max_contiguous": lambda x, v: x,
    "maximum": binary(np.maximum),
    "min": reduced(np.min),
    "minimum": binary(np.minimum),
    "multiple_of": lambda x, v: x,
    "num_ctas": lambda: 1,
    "num_programs": language.num_programs,
    "num_warps": language.num_warps,
    "permute": language.permute,
    "program_id": language.program_id,
    "ravel": language.ravel,
    "reshape": language.reshape,
    "set_auto_layout": lambda x, layout: x,
    "split": Value.split,
    "static_assert": language.check,
    "static_print": lambda *a, **k: None,
    "static_range": lambda *a: range(*(int(const(x)) for x in a)),
    "store": language.store,
    "sum": reduced(np.sum),
    "thread_barrier": language.thread_barrier,
    "to_tensor": values.as_value,
    "warp_specialize": language.warp_specialize,
    "where": where,
    "xor_sum": reduced(np.bitwise_xor.reduce),
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype),
    "zeros_like": language.zeros_like,
    "abs": unary(np.abs),
    "ceil": unary(np.ceil),
    "cos": unary(np.cos),
    "div_rn": binary(np.divide),
    "exp": unary(np.exp),
    "exp2": unary(np.exp2),
    "fdiv": binary(np.divide),
    "floor": unary(np.floor),
    "log": unary(np.log),
    "log2": unary(np.log2),
    "rsqrt": unary(lambda a: 1 / np.sqrt(a)),
    "erf": unary(np.vectorize(math.erf, otypes=[np.float32])),
    "sin": unary(np.sin),
    "sqrt": unary(np.sqrt),
    "sqrt_rn": unary(np.sqrt),
}
_MBARRIER = {
    "init": mbarrier.init,
    "invalidate": mbarrier.invalidate,
    "expect": mbarrier.expect,
    "arrive": mbarrier.arrive,
    "wait": mbarrier.wait,
    "allocate_mbarrier": lambda batch=None, **_: allocate_shared_memory(gl.int64, [batch or 1, 1], None),
}
_TMA = {
    "async_copy_global_to_shared": tma.load,
    "async_copy_shared_to_global": tma.store,
    "async_load": tma.load,
    "async_store": tma.store,
    "store_wait": tma.store_wait,
    "make_tensor_descriptor": tma.make_tensor_descriptor,
}
_HOPPER = {
    "fence_async_shared": wgmma.fence_async_shared,
    "warpgroup_mma": wgmma.warpgroup_mma,
    "warpgroup_mma_init": wgmma.warpgroup_mma_init,
    "warpgroup_mma_wait": wgmma.warpgroup_mma_wait,
}
_ASYNC_COPY = {
    "async_copy_global_to_shared": cp_async.copy,
    "async_load": cp_async.copy,
    "commit_group": cp_async.commit_group,
    "mbarrier_arrive": cp_async.mbarrier_arrive,
    "wait_group": cp_async.wait_group,
}

_STANDS_FOR: dict[int, Callable] = {}
_BUILT: dict[int, object] = {}
_KEEP: list[object] = []


def _install(module: types.ModuleType, table: dict[str, Callable]) -> None:
    for name, function in table.items():
        real = getattr(module, name, None)
        if real is not None:
            _STANDS_FOR[id(real)] = function
            _KEEP.append(real)


_install(gl, _LANGUAGE)
_install(compat.hopper.mbarrier, _MBARRIER)
_install(compat.ampere.mbarrier, _MBARRIER)
_install(compat.hopper.tma, _TMA)
_install(compat.hopper, _HOPPER)
_install(compat.ampere.async_copy, _ASYNC_COPY)


class _Module:
    """A module of the language, or of a kernel's helpers, as a kernel sees it."""

    def __init__(self, real: types.ModuleType) -> None:
        self._real = real

    def __getattr__(self, name: str) -> object:
        found = self.__dict__[name] = translate(getattr(self._real, name), name)
        return found


def translate(x: object, name: str = "") -> object:
    """What a kernel gets for a name of its module."""
    found = _STANDS_FOR.get(id(x))
    if found is not None:
        return found
    if isinstance(x, compat.JITFunction):
        return rebuild(x)
    if isinstance(x, types.ModuleType):
        return _Module(x)
    if isinstance(x, gl.constexpr):
        return x.value
    if getattr(x, "__triton_aggregate__", False):
        return _aggregate(x)
    if isinstance(x, compat.ConstexprFunction):
        return _host_function(x)
    if getattr(x, "__triton_builtin__", False):
        return _missing(x, name)
    return x


def _missing(x: object, name: str) -> Callable:
    def missing(*_: object, **__: object) -> None:
        raise NotEmulated(f"{getattr(x, '__module__', '?')}.{name or getattr(x, '__name__', x)}")

    return missing


def _host_function(x: object) -> Callable:
    """A function that the compiler runs on constants."""

    def function(*args: object, **kwargs: object) -> object:
        return const(x(*map(const, args), **{k: const(v) for k, v in kwargs.items()}))

    return function


def rebuild(jit: object) -> Callable:
    """Return the emulated form of a ``@gluon.jit`` function.

    Raises:
        NotEmulated: it is no such function, or one of the language's own library that has no stand-in.
    """
    if id(jit) in _BUILT:
        return _BUILT[id(jit)]
    if id(jit) in _STANDS_FOR:
        return _STANDS_FOR[id(jit)]
    if not isinstance(jit, compat.JITFunction):
        raise NotEmulated(f"{jit!r} is no @gluon.jit function")
    fn = jit.fn
    if fn.__module__.startswith("triton."):
        raise NotEmulated(f"the library function {fn.__module__}.{fn.__name__}")
    KERNEL_FILES.add(fn.__code__.co_filename)
    scope = {"range": language.device_range, "__builtins__": __builtins__, "__name__": fn.__module__}
    cells = tuple(types.CellType(translate(c.cell_contents)) for c in fn.__closure__ or ())
    defaults = tuple(const(d) for d in fn.__defaults__) if fn.__defaults__ else None
    new = types.FunctionType(fn.__code__, scope, fn.__name__, defaults, cells)
    if fn.__kwdefaults__:
        new.__kwdefaults__ = {k: const(v) for k, v in fn.__kwdefaults__.items()}
    _BUILT[id(jit)] = new
    _KEEP.append(jit)
    for name in _names(fn.__code__):
        if name in fn.__globals__:
            scope[name] = translate(fn.__globals__[name], name)
    return new


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _aggregate(cls: type) -> type:
    """An aggregate as a plain class: same fields, emulated methods."""
    if id(cls) in _BUILT:
        return _BUILT[id(cls)]
    init = cls.hash_attrs[0]
    new = type(cls.__name__, (_Aggregate,), {})
    _BUILT[id(cls)] = new
    _KEEP.append(cls)
    new.fields = getattr(cls, "__aggregate_fields__", ())
    new.defaults = getattr(cls, "__aggregate_defaults__", {})
    if init is not object.__init__ and not getattr(init, "__triton_builtin__", False):
        new.construct = _method(init)
    for name, member in inspect.getmembers(cls):
        if isinstance(member, compat.JITFunction):
            setattr(new, name, rebuild(member))
        elif isinstance(member, compat.ConstexprFunction):
            setattr(new, name, _host_function(member))
        elif inspect.isfunction(member) and not name.startswith("_"):
            setattr(new, name, _method(member))
    return new


class _Aggregate:
    """Base of emulated aggregates: fields by position or name where the kernel's class has no constructor."""

    fields: tuple[str, ...] = ()
    defaults: dict[str, object] = {}
    construct: Callable | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        object.__setattr__(self, "complete", False)
        if self.construct is not None:
            self.construct(*args, **kwargs)
        else:
            for name, x in (self.defaults | dict(zip(self.fields, args, strict=False)) | kwargs).items():
                setattr(self, name, const(x))
        object.__setattr__(self, "complete", True)

    def __setattr__(self, name: str, x: object) -> None:
        if self.complete:
            # Aggregates are values: a callee's assignment would not reach the caller, as it does in Python.
            raise NotEmulated(f"an assignment to {type(self).__name__}.{name} after its construction")
        object.__setattr__(self, name, const(x))


def _replace(instance: _Aggregate, **changes: object) -> _Aggregate:
    """A copy with other values in some fields."""
    new = object.__new__(type(instance))
    for name, x in (vars(instance) | {k: const(v) for k, v in changes.items()}).items():
        object.__setattr__(new, name, x)
    return new


_install(compat.gluon, {"aggregate_replace": _replace})
_install(gl, {"aggregate_replace": _replace})


def _method(member: object) -> Callable:
    if isinstance(member, compat.JITFunction):
        return rebuild(member)
    fn = getattr(member, "fn", member)
    KERNEL_FILES.add(fn.__code__.co_filename)
    scope = {"__builtins__": __builtins__, "__name__": fn.__module__, "range": language.device_range}
    for name in _names(fn.__code__):
        if name in fn.__globals__:
            scope[name] = translate(fn.__globals__[name], name)
    cells = tuple(types.CellType(translate(c.cell_contents)) for c in fn.__closure__ or ())
    return types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, cells)
