"""From the arguments of a launch to values of a kernel."""

from __future__ import annotations

import numpy as np
import torch

from moeloom.compat import TensorDescriptor, gl
from moeloom.emulator.alarms import NotEmulated
from moeloom.emulator.dtypes import FROM_TORCH
from moeloom.emulator.values import Value, as_value, const


def bind(kernel: object, args: dict | tuple | list) -> dict:
    """Name the arguments of a launch.

    Raises:
        TypeError: one is missing or unknown.
    """
    params = kernel.params
    names = [p.name for p in params]
    if not isinstance(args, dict):
        if len(args) > len(names):
            raise TypeError(f"{kernel.__name__} takes {len(names)} arguments, {len(args)} were given")
        args = dict(zip(names, args, strict=False))
    unknown = [n for n in args if n not in names]
    if unknown:
        raise TypeError(f"{kernel.__name__} has no parameter {', '.join(unknown)}; it takes {', '.join(names)}")
    bound = {}
    for p in params:
        if p.name in args:
            bound[p.name] = args[p.name] if not p.is_constexpr else const(args[p.name])
        elif p.has_default:
            bound[p.name] = p.default
        else:
            raise TypeError(f"{kernel.__name__}: argument {p.name} is missing")
    return {p.name: _Constant(bound[p.name]) if p.is_constexpr else bound[p.name] for p in params}


class _Constant:
    """A constexpr argument: it stays the Python object that it is."""

    def __init__(self, value: object) -> None:
        self.value = value


def convert(machine: object, name: str, x: object) -> object:
    """Make one argument a value of a kernel; memory that it names is registered."""
    from moeloom.emulator.ops.tma import Descriptor

    x = const(x)
    if isinstance(x, _Constant):
        return x.value
    if isinstance(x, torch.Tensor):
        if x.dtype not in FROM_TORCH:
            raise NotEmulated(f"{name}: a tensor of {x.dtype}")
        machine.register(name, x)
        return Value(np.int64(x.data_ptr()), gl.pointer_type(FROM_TORCH[x.dtype]))
    if isinstance(x, TensorDescriptor):
        machine.register(name, x.base if x.base.is_contiguous() else _whole(name, x.base))
        return Descriptor.from_host(machine, name, x)
    if isinstance(x, (tuple, list)):
        return tuple(convert(machine, f"{name}[{i}]", item) for i, item in enumerate(x))
    if isinstance(x, (bool, int, float)):
        return as_value(x)
    if x is None or isinstance(x, str):
        return x
    raise NotEmulated(f"{name}: an argument of type {type(x).__name__}")


def _whole(name: str, base: torch.Tensor) -> torch.Tensor:
    """The flat memory that a strided tensor spans."""
    if any(s < 0 for s in base.stride()):
        raise NotEmulated(f"{name}: negative strides")
    span = 1 + sum((n - 1) * s for n, s in zip(base.shape, base.stride(), strict=True))
    return base.as_strided((span,), (1,))
