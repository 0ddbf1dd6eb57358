"""Launching the forward pass: from a call's tensors to the arguments of three kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeloom.compat import TensorDescriptor, gl
from moeloom.config import ROW_BLOCK, ceil_div
from moeloom.kernels.forward.kernel import MATH_WARPS, forward, num_counters
from moeloom.kernels.forward.parts import COLUMNS, HALF, PART, ROWS
from moeloom.kernels.schedule import WARPS, count_routes, num_programs, padded_experts, place_routes, run_length
from moeloom.runtime.launch import Launch
from moeloom.runtime.tuning import ALL, Parts, Tuning
from moeloom.runtime.workspace import Workspace


@dataclass(frozen=True)
class Operands:
    """The tensors of one call on one rank.

    Attributes:
        x: bf16 [T, H], T >= 1.
        topk_ids: int64 [T, K]. all_ids: int64 [ranks, T, K], those of all ranks; for one rank the same memory.
        topk_weights: fp32 [T, K].
        gate_up_proj: bf16 [E, 2I, H]. down_proj: bf16 [E, H, I].
        out: bf16 [T, H], written.
        rows_per_expert: int64 [E], written.
        gate_up: bf16 [saved rows, 2I] with saved rows a multiple of 128, written; None for none.
        limit: clamp, or None.
        start: fp32 [T, H], what the sum of every token begins with; None for zero.
        rank: of this process in the EP group.
    """

    x: Tensor
    topk_ids: Tensor
    all_ids: Tensor
    topk_weights: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    out: Tensor
    rows_per_expert: Tensor
    gate_up: Tensor | None
    limit: float | None
    start: Tensor | None = None
    rank: int = 0


def _describe(tensor: Tensor, shape: list[int], box: list[int]) -> TensorDescriptor:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    return TensorDescriptor(tensor, shape, strides, box, layout)


def schedule_launches(given: Operands, workspace: Workspace) -> list[Launch]:
    """Return the launches that make the schedule tables of a call."""
    shape, (tokens, top_k) = workspace.shape, given.topk_ids.shape
    slots = tokens * top_k
    routes, experts = shape.ranks * slots, shape.local_experts
    programs = num_programs(routes, experts)
    blocks = shape.capacity_blocks(tokens)
    common = dict(
        ids=given.all_ids,
        counts=workspace.counts,
        num_routes=routes,
        run=run_length(routes, programs),
        first_expert=given.rank * experts,
        experts=experts,
        EXPERTS=padded_experts(experts),
    )
    tables = dict(
        row_rank=workspace.row_rank,
        row_slot=workspace.row_slot,
        block_expert=workspace.block_expert,
        block_rows=workspace.block_rows,
        rows_per_expert=given.rows_per_expert,
        facts=workspace.facts,
        counters=workspace.counters,
        pointers=workspace.pointers[0],
        x=given.x,
        slots=slots,
        capacity_blocks=blocks,
        num_counters=num_counters(blocks),
        rank=given.rank,
    )
    return [
        Launch(count_routes, programs, common, WARPS),
        Launch(place_routes, programs, common | tables, WARPS),
    ]


def forward_launch(
    given: Operands,
    workspace: Workspace,
    *,
    minibatch_rows: int,
    num_sms: int,
    deadline_s: float,
    tuning: Tuning,
    parts: Parts = ALL,
) -> Launch:
    """Return the launch of the layer's kernel, to follow :func:`schedule_launches` on the same stream.

    Args:
        given: tensors of the call.
        workspace: memory, for at least as many tokens.
        minibatch_rows: a multiple of 128; the workspace's ring holds at least two.
        num_sms: CTAs, at least 1.
        deadline_s: seconds that one wait may last; 0 for no end.
        tuning, parts: see there.
    """
    shape, ring_rows = workspace.shape, workspace.shape.ring_rows
    hidden, inner, experts = shape.hidden, shape.inner, shape.local_experts
    depth, half, columns, part = tuning.depth, HALF.value, COLUMNS.value, PART.value
    saved = 0 if given.gate_up is None else given.gate_up.shape[0]
    save_to, save_rows = (given.gate_up, saved) if saved else (workspace.hidden_ring, 1)
    tokens, top_k = given.topk_ids.shape
    rows = ROWS.value
    height, width = tuning.copy_box(hidden)
    args = dict(
        x_ring_desc=_describe(workspace.x_ring, [ring_rows, hidden], [rows, depth]),
        hidden_ring_desc=_describe(workspace.hidden_ring, [ring_rows, inner], [rows, depth]),
        hidden_out_desc=_describe(workspace.hidden_ring, [ring_rows, inner], [rows, part]),
        gate_up_proj=_describe(given.gate_up_proj, [2 * experts, inner, hidden], [1, half, depth]),
        down_proj=_describe(given.down_proj, [experts, hidden, inner], [1, columns, depth]),
        gate_up=_describe(save_to, [save_rows, 2, inner], [rows, 1, part]),
        x_ring=workspace.x_ring,
        x_pointers=workspace.pointers[0],
        slot_pointers=workspace.pointers[1],
        row_rank=workspace.row_rank,
        row_slot=workspace.row_slot,
        block_expert=workspace.block_expert,
        facts=workspace.facts,
        counters=workspace.counters,
        trouble=workspace.trouble,
        alarm=workspace.alarm_address,
        topk_ids=given.topk_ids,
        topk_weights=given.topk_weights,
        start=given.topk_weights if given.start is None else given.start,
        out=given.out,
        deadline_us=min(int(deadline_s * 1e6), 2**31 - 1),
        limit=0.0 if given.limit is None else float(given.limit),
        rank=given.rank,
        tokens=tokens,
        H=hidden,
        I=inner,
        experts=experts * shape.ranks,
        capacity=shape.capacity_blocks(tokens),
        minibatch=ceil_div(minibatch_rows, ROW_BLOCK),
        ring=ring_rows // ROW_BLOCK,
        saved=saved // ROW_BLOCK,
        has_start=int(given.start is not None),
    )
    fixed = dict(
        TOP_K=top_k,
        RANKS=shape.ranks,
        CLAMP=given.limit is not None,
        DEPTH=depth,
        STAGES=tuning.stages,
        SLOTS=tuning.slots,
        PIECE=tuning.piece,
        HEIGHT=height,
        WIDTH=width,
        STORE_WARPS=tuning.store_warps,
        DISPATCH_WARPS=tuning.dispatch_warps,
        REGISTERS=tuning.registers,
        DISPATCH=parts.dispatch,
        PUSH=parts.push,
        SUMS=parts.sums,
    )
    return Launch(forward, num_sms, args | fixed, MATH_WARPS, {"maxnreg": 168})
