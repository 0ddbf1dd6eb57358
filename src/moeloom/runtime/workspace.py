"""Memory that calls of one shape share: schedule tables, counters, rings, slots.

A workspace is made once and grows when a call has more tokens than any before. Nothing in it is set up by the host
between calls, and nobody relies on what it holds: the schedule launch writes the tables and zeroes the counters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeloom.config import ROW_BLOCK, capacity_rows
from moeloom.kernels.forward.kernel import LINE, num_counters
from moeloom.kernels.schedule import MOST_PROGRAMS, padded_experts


@dataclass(frozen=True)
class Shape:
    """What a workspace is made for, besides the number of tokens.

    Attributes:
        device: where.
        hidden, inner: H and I, multiples of 64.
        local_experts: experts of this rank. ranks: of the EP group.
        top_k: routes of a token.
        ring_rows: rows of the ring, a multiple of 128.
    """

    device: torch.device
    hidden: int
    inner: int
    local_experts: int
    ranks: int
    top_k: int
    ring_rows: int

    def capacity_blocks(self, tokens: int) -> int:
        """Row blocks that any routing of ``tokens`` on every rank fits into."""
        return capacity_rows(self.ranks * tokens * self.top_k, self.local_experts) // ROW_BLOCK


@dataclass
class Workspace:
    """The memory itself, all uninitialised except for ``trouble`` and ``alarm``.

    Attributes:
        shape, max_tokens: what it is made for.
        counts: int32 [128 * padded experts].
        row_rank, row_slot: int32 [capacity rows]. block_expert, block_rows: int32 [capacity row blocks].
        facts: int32 [32]. counters: int32.
        pointers: int64 [2, ranks], addresses of the ranks' tokens and slots.
        x_ring: bf16 [ring rows, H]. hidden_ring: bf16 [ring rows, I]. slots: bf16 [max_tokens * K, H].
        trouble: int32 [16], see :mod:`moeloom.runtime.trouble`.
        alarm: int32 [1] of the host, which the device sets; alarm_address: int64 [1] of the device, where that is.
        captured: a CUDA graph refers to this memory, so it must live for ever.
        stream: where the last call was issued.
        plans: launches that are ready for this memory, see :mod:`moeloom.runtime.plan`.
    """

    shape: Shape
    max_tokens: int
    counts: Tensor
    row_rank: Tensor
    row_slot: Tensor
    block_expert: Tensor
    block_rows: Tensor
    facts: Tensor
    counters: Tensor
    pointers: Tensor
    x_ring: Tensor
    hidden_ring: Tensor
    slots: Tensor
    trouble: Tensor
    alarm: Tensor
    alarm_address: Tensor
    captured: bool = False
    stream: object = field(default=None, repr=False)
    plans: dict = field(default_factory=dict, repr=False)

    @property
    def bytes(self) -> int:
        """Bytes of device memory."""
        return sum(t.numel() * t.element_size() for t in vars(self).values() if isinstance(t, Tensor) and t.ndim)


def make_workspace(shape: Shape, max_tokens: int) -> Workspace:
    """Allocate a workspace. Waits for the device once, to copy two addresses there."""
    blocks = shape.capacity_blocks(max_tokens)
    device = shape.device
    max_slots = max(max_tokens * shape.top_k, 1)

    def int32(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    def rows(count: int, width: int) -> Tensor:
        return torch.empty(count, width, dtype=torch.bfloat16, device=device)

    slots = rows(max_slots, shape.hidden)
    alarm = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
    # Those of other ranks come with the EP group.
    addresses = [[0] * shape.ranks, [slots.data_ptr()] * shape.ranks]
    return Workspace(
        shape=shape,
        max_tokens=max_tokens,
        counts=int32(MOST_PROGRAMS * padded_experts(shape.local_experts)),
        row_rank=int32(blocks * ROW_BLOCK),
        row_slot=int32(blocks * ROW_BLOCK),
        block_expert=int32(blocks),
        block_rows=int32(blocks),
        facts=int32(LINE),
        counters=int32(num_counters(blocks)),
        pointers=torch.tensor(addresses, dtype=torch.int64).to(device),
        x_ring=rows(shape.ring_rows, shape.hidden),
        hidden_ring=rows(shape.ring_rows, shape.inner),
        slots=slots,
        trouble=torch.zeros(16, dtype=torch.int32, device=device),
        alarm=alarm,
        alarm_address=torch.tensor([alarm.data_ptr()], dtype=torch.int64).to(device),
    )


class WorkspacePool:
    """Workspaces by shape: one for each, as large as the largest call so far."""

    def __init__(self) -> None:
        self._by_shape: dict[Shape, Workspace] = {}
        self._captured: list[Workspace] = []

    def take(self, shape: Shape, tokens: int) -> Workspace:
        """Return a workspace for a call with so many tokens on the current stream.

        Calls that share one are put in the order in which the host issues them, whatever streams they are on.
        """
        found = self._by_shape.get(shape)
        if found is None or found.max_tokens < tokens:
            found = self._by_shape[shape] = make_workspace(shape, tokens)
        if shape.device.type == "cuda":
            self._order(found)
        return found

    def _order(self, workspace: Workspace) -> None:
        current = torch.cuda.current_stream(workspace.shape.device)
        if torch.cuda.is_current_stream_capturing():
            if not workspace.captured:
                # A graph refers to it from now on.
                workspace.captured = True
                self._captured.append(workspace)
            return
        if workspace.stream is not None and workspace.stream != current:
            current.wait_stream(workspace.stream)
        workspace.stream = current

    def clear(self) -> None:
        """Free all that no graph refers to."""
        self._by_shape.clear()


#: Of this process.
POOL = WorkspacePool()
