"""Forward of the hopper backend: memory, launches."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moeloom.backends.call import LayerCall
from moeloom.backends.hopper.saved import SavedCall, rows_to_keep
from moeloom.config import ROW_BLOCK, ceil_div
from moeloom.kernels.forward.parts import HALF
from moeloom.runtime import trouble
from moeloom.runtime.forward import Operands, forward_launch, schedule_launches
from moeloom.runtime.tuning import Tuning
from moeloom.runtime.workspace import POOL, Shape

TUNING = Tuning()


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
    out, rows_per_expert, gate_up = run(call, keep)
    return out, SavedCall(rows_per_expert, gate_up) if save else None


def run(call: LayerCall, keep: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out [T, H], live rows of each expert, and the pre-activations of the first ``keep`` rows or None."""
    x, experts = call.x, call.num_local_experts
    out = torch.empty_like(x)
    rows_per_expert = torch.empty(experts, dtype=torch.int64, device=x.device)
    if not x.shape[0]:
        return out, rows_per_expert.zero_(), None
    inner = call.down_proj.shape[2]
    sms = call.config.num_sms or multiprocessors(x.device)
    minibatch_rows = call.config.minibatch_rows or wave_rows(inner, multiprocessors(x.device))
    ring_rows = call.config.ring_rows or 2 * minibatch_rows
    shape = Shape(x.device, x.shape[1], inner, experts, call.group.size, call.top_k, ring_rows)
    workspace = POOL.take(shape, x.shape[0])
    trouble.check(workspace)
    gate_up = x.new_empty(keep, 2 * inner) if keep else None
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
        gate_up=gate_up,
        limit=call.swiglu_limit,
    )
    kernel = forward_launch(
        given,
        workspace,
        minibatch_rows=minibatch_rows,
        num_sms=sms,
        deadline_s=call.config.wait_seconds(entry=False),
        tuning=TUNING,
    )
    with torch.cuda.device(x.device):
        for launch in (*schedule_launches(given, workspace), kernel):
            launch.run()
    return out, rows_per_expert, gate_up


def _aligned(tensor: Tensor) -> Tensor:
    """Return a tensor at an address that bulk copies and 16-byte loads take. Views into a buffer may start anywhere."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def wave_rows(inner: int, sms: int) -> int:
    """Return rows of a minibatch whose gate/up tiles fill the device about once."""
    tiles = ceil_div(inner, HALF.value)
    return ROW_BLOCK * max(1, sms // tiles)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
