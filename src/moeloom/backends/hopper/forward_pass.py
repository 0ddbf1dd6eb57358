"""Forward of the hopper backend: shared experts, memory, launches."""

from __future__ import annotations

import contextlib
import functools
import threading

import torch
from torch import Tensor

from moeloom.backends.call import LayerCall
from moeloom.backends.hopper.saved import SavedCall, rows_to_keep
from moeloom.backends.torch.shared import shared_forward
from moeloom.config import ROW_BLOCK, ceil_div
from moeloom.kernels.forward.parts import HALF
from moeloom.runtime import trouble
from moeloom.runtime.forward import Operands
from moeloom.runtime.plan import CallKind, plan_for
from moeloom.runtime.tuning import Tuning
from moeloom.runtime.workspace import POOL, Shape

TUNING = Tuning()
#: Row blocks of a minibatch at least, see :func:`wave_rows`.
LEAST_MINIBATCH = 8


def run_forward(call: LayerCall, *, save: bool) -> tuple[Tensor, SavedCall | None]:
    """Run the layer.

    Args:
        call: arguments.
        save: keep what backward needs.

    Returns:
        out [T, H] in the operand dtype, and what backward needs or None.

    Raises:
        KernelTimeout: a wait of an earlier call lasted longer than its deadline.

    Determinism: the bits of ``out`` depend on the inputs and the weights alone.
    """
    keep = rows_to_keep(call) if save else 0
    start, shared_gate_up, ungated = shared_forward(call)
    out, rows_per_expert, gate_up = run(call, keep, start)
    return out, SavedCall(rows_per_expert, gate_up, shared_gate_up, ungated) if save else None


def run(call: LayerCall, keep: int, start: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the routed experts.

    Args:
        call: arguments.
        keep: rows that keep pre-activations.
        start: fp32 [T, H], what the sum of every token begins with; None for zero.

    Returns:
        out [T, H], live rows of each expert, and the pre-activations of the first ``keep`` rows or None.
    """
    x, experts = call.x, call.num_local_experts
    out = torch.empty_like(x)
    rows_per_expert = torch.empty(experts, dtype=torch.int64, device=x.device)
    tokens, hidden = x.shape
    if not tokens:
        return out, rows_per_expert.zero_(), None
    inner, config, sms = call.down_proj.shape[2], call.config, multiprocessors(x.device)
    kind = CallKind(
        tokens=tokens,
        minibatch_rows=config.minibatch_rows or wave_rows(inner, sms),
        num_sms=config.num_sms or sms,
        deadline_s=config.wait_seconds(entry=False),
        tuning=TUNING,
        saved_rows=keep,
        limit=call.swiglu_limit,
        has_start=start is not None,
    )
    ring_rows = config.ring_rows or 2 * kind.minibatch_rows
    shape = Shape(x.device, hidden, inner, experts, call.group.size, call.top_k, ring_rows)
    ids = _aligned(call.topk_ids)
    given = Operands(
        x=_aligned(x),
        topk_ids=ids,
        all_ids=ids,
        topk_weights=_aligned(call.topk_weights),
        gate_up_proj=_aligned(call.gate_up_proj),
        down_proj=_aligned(call.down_proj),
        out=out,
        rows_per_expert=rows_per_expert,
        gate_up=x.new_empty(keep, 2 * inner) if keep else None,
        limit=call.swiglu_limit,
        start=start,
    )
    with _ISSUE, _on(x.device):
        workspace = POOL.take(shape, tokens)
        trouble.check(workspace)
        plan_for(kind, given, workspace).run(given)
    return out, rows_per_expert, given.gate_up


#: Calls from several threads, as backward makes them, are issued one after the other: they share workspaces.
_ISSUE = threading.Lock()


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Make a device the current one for a while; costs nothing where it is already."""
    if torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _aligned(tensor: Tensor) -> Tensor:
    """Return a tensor at an address that bulk copies and 16-byte loads take. Views into a buffer may start anywhere."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def wave_rows(inner: int, sms: int) -> int:
    """Return rows of a minibatch whose gate/up tiles fill the device about once, at least 8 row blocks.

    Useful TFLOP/s on one H200 with minibatches of so many row blocks and a ring of two of them, one run:

    | model, I, tokens | 4 | 5 | 8 | 12 | 16 | 32 | rule |
    | --- | --- | --- | --- | --- | --- | --- | --- |
    | Kimi, 2048, 8192 | 557 | | 595, 596 | 536 | 563 | 580 | 8 |
    | Kimi, 2048, 2048 | 475 | | 527, 526 | 533 | 514 | 460 | 8 |
    | GLM, 2048, 8192 | 548 | | 579, 594 | 561 | 588 | 586 | 8 |
    | GLM, 2048, 2048 | 485 | | 531, 553 | 512 | 522 | 492 | 8 |
    | Qwen, 1024, 8192 | 397 | | 507 | 539 | 495, 612 | 475 | 16 |
    | Qwen, 1024, 2048 | 319 | | 462 | 483 | 445, 501 | 412 | 16 |
    | DeepSeek, 3072, 8192 | 578 | 560 | 588 | 567 | 580 | 552 | 8 |
    | DeepSeek, 3072, 2048 | 475 | 468 | 467 | 465 | 445 | 390 | 8 |

    Two numbers are two measurements, the second one first in its series, when the device was cool: they say how far
    to trust the others. One wave is 8, 8, 16 and 5 row blocks; 5 lose to 8. A ring of three minibatches of 8 gave
    595, 534, 580, 513, 515, 430, 570, 459 in the same order: nothing over two.
    """
    tiles = ceil_div(inner, HALF.value)
    return ROW_BLOCK * max(LEAST_MINIBATCH, sms // tiles)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
