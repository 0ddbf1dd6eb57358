"""Checks of a layer call before any work starts. Each error names the argument, the rule, what came, what to do.

They run in every call, so texts are put together only once a rule is broken.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from moeloom.config import MoEConfig
from moeloom.errors import ArgumentError, ArgumentTypeError, complain
from moeloom.numerics import accumulate_dtype

#: Operand dtypes and the number that stands for each when ranks compare their calls.
DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float64: 3}


def compute_dtype(x: object) -> torch.dtype:
    """Return the dtype of the operands: that of ``x``, or autocast's.

    Raises:
        ArgumentTypeError: ``x`` is no tensor, or of a dtype that the layer does not compute in.
    """
    _check_tensor("x", x)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if dtype not in DTYPES or not x.is_floating_point():
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        _refuse("x", f"be one of {names} (or be cast so by autocast)", dtype, "Convert it.", ArgumentTypeError)
    return dtype


def check_routed(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> None:
    """Check shapes, dtypes and devices of tokens, routes and routed experts.

    Raises:
        ArgumentError, ArgumentTypeError: the first rule that is broken.
    """
    given = {"topk_ids": ids, "topk_weights": weights, "gate_up_proj": gate_up, "down_proj": down}
    for name, tensor in given.items():
        _check_tensor(name, tensor, x)
    x_shape, ids_shape, up_shape, down_shape = x.shape, ids.shape, gate_up.shape, down.shape
    if not (x_shape and x_shape[-1] > 0):
        _refuse("x", "have shape [..., H] with H >= 1", list(x_shape), "Check its axes.")
    if ids.dtype not in (torch.int64, torch.int32):
        _refuse("topk_ids", "be int32 or int64", ids.dtype, "Use topk_ids.to(torch.int64).", ArgumentTypeError)
    if not (ids_shape and ids_shape[:-1] == x_shape[:-1] and ids_shape[-1] > 0):
        rule = f"have shape {[*x_shape[:-1], 'K']} with K >= 1"
        _refuse("topk_ids", rule, list(ids_shape), "One row of ids a token.")
    if weights.shape != ids_shape:
        rule = f"have the shape of topk_ids {list(ids_shape)}"
        _refuse("topk_weights", rule, list(weights.shape), "One weight a route.")
    wide = accumulate_dtype(dtype)
    if weights.dtype != wide:
        fix = "Router weights act in the accumulation dtype; use topk_weights.float()."
        _refuse("topk_weights", f"be {wide}", weights.dtype, fix, ArgumentTypeError)
    hidden = x_shape[-1]
    if not (len(up_shape) == 3 and up_shape[0] > 0 and _is_gate_up(up_shape[1:], hidden)):
        fix = "Gate rows come first, then as many up rows; transpose weights stored the other way."
        _refuse("gate_up_proj", f"have shape [E, 2I, {hidden}]", list(up_shape), fix)
    if down_shape != (up_shape[0], hidden, up_shape[1] // 2):
        fix = "It must fit gate_up_proj; transpose weights stored the other way."
        want = [up_shape[0], hidden, up_shape[1] // 2]
        _refuse("down_proj", f"have shape {want}", list(down_shape), fix)
    _check_weight("gate_up_proj", gate_up, x, dtype)
    _check_weight("down_proj", down, x, dtype)


def check_shared(gate_up: Tensor, down: Tensor, gate: Tensor | None, x: Tensor, dtype: torch.dtype) -> None:
    """Check the weights of shared experts.

    Raises:
        ArgumentError, ArgumentTypeError: the first rule that is broken.
    """
    hidden = x.shape[-1]
    given = {"gate_up_proj": gate_up, "down_proj": down} | ({} if gate is None else {"gate": gate})
    for name, weight in given.items():
        _check_tensor(f"shared.{name}", weight, x)
    fits = gate_up.dim() == 2 and _is_gate_up(gate_up.shape, hidden)
    rule = f"have shape [2S, {hidden}]"
    _require(fits, "shared.gate_up_proj", rule, list(gate_up.shape), "Gate rows, then as many up rows.")
    want = [hidden, gate_up.shape[0] // 2]
    fits = list(down.shape) == want
    _require(fits, "shared.down_proj", f"have shape {want}", list(down.shape), "It must fit gate_up_proj.")
    if gate is not None:
        fits = list(gate.shape) == [hidden]
        _require(fits, "shared.gate", f"have shape [{hidden}]", list(gate.shape), "One number a column of x.")
    for name, weight in given.items():
        _check_weight(f"shared.{name}", weight, x, dtype)


def check_options(limit: object, tokens: int, config: MoEConfig) -> None:
    """Check the clamp and the token limit.

    Raises:
        ArgumentError: the first rule that is broken.
    """
    if not (limit is None or (isinstance(limit, (int, float)) and 0 < limit < math.inf)):
        _refuse("swiglu_limit", "be a number > 0, or None", repr(limit), "Use None for no clamp.")
    most = config.max_tokens_per_rank
    if most is not None and tokens > most:
        fix = "Split the batch or raise config.max_tokens_per_rank."
        _refuse("x", f"have at most {most} tokens", tokens, fix)


def check_values(ids: Tensor, weights: Tensor, num_experts: int) -> None:
    """The checks of ``checked=True``, which read values: ids in range, router weights finite.

    Raises:
        ArgumentError: naming the first place that is wrong.
    """
    rules = (
        ("topk_ids", ids, (ids < -1) | (ids >= num_experts), f"lie in [-1, {num_experts})", "-1 means no route."),
        ("topk_weights", weights, ~torch.isfinite(weights), "be finite", "Look at the router's logits."),
    )
    for name, tensor, wrong, rule, fix in rules:
        places = wrong.nonzero()
        if places.numel():
            place = places[0].tolist()
            got = f"{tensor[tuple(place)].item()} at {place} ({places.shape[0]} in all)"
            raise ArgumentError(complain(name, rule, got, fix))


def _refuse(name: str, rule: str, got: object, fix: str, kind: type[Exception] = ArgumentError) -> NoReturn:
    raise kind(complain(name, rule, got, fix))


def _require(holds: bool, name: str, rule: str, got: object, fix: str, kind: type[Exception] = ArgumentError) -> None:
    if not holds:
        _refuse(name, rule, got, fix, kind)


def _check_tensor(name: str, value: object, like: Tensor | None = None) -> None:
    """Check that a value is a tensor, on the device of another."""
    if not isinstance(value, Tensor):
        _refuse(name, "be a torch.Tensor", type(value).__name__, "Pass a tensor.", ArgumentTypeError)
    if like is not None and value.device != like.device:
        _refuse(name, f"be on the device of x ({like.device})", value.device, "Move it there.")


def _is_gate_up(shape: torch.Size, hidden: int) -> bool:
    return shape[0] >= 2 and shape[0] % 2 == 0 and shape[1] == hidden


def _check_weight(name: str, weight: Tensor, x: Tensor, dtype: torch.dtype) -> None:
    """Check the dtype of one weight, and its ``main_grad`` if it has one."""
    if weight.dtype != dtype and not (torch.is_autocast_enabled(x.device.type) and weight.dtype in DTYPES):
        fix = "Convert it, or run under torch.autocast to keep fp32 weights with bf16 operands."
        _refuse(name, f"be {dtype} like the operands", weight.dtype, fix, ArgumentTypeError)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return
    _check_tensor(f"{name}.main_grad", main_grad)
    usable = main_grad.shape == weight.shape and main_grad.device == weight.device and main_grad.dtype in DTYPES
    rule = f"be an fp32, bf16 or fp64 tensor of shape {list(weight.shape)} on {weight.device}"
    got = f"{list(main_grad.shape)} {main_grad.dtype} on {main_grad.device}"
    _require(usable, f"{name}.main_grad", rule, got, "Allocate it like the weight.")
