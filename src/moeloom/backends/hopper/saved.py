"""What forward keeps for backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moeloom.backends.call import LayerCall
from moeloom.config import capacity_rows


@dataclass(frozen=True)
class SavedCall:
    """What forward keeps for backward besides its arguments.

    Attributes:
        rows_per_expert: int64 [E], live rows.
        gate_up: bf16 [capacity rows, 2I], pre-activations of all rows, unwritten past the last row block; None: they
            are computed again.
        shared_gate_up: bf16 [T, 2S], pre-activations of the shared experts, or None.
        shared_out: fp32 [T, H], shared output before the gate; None without a gate.
        plan: None; other backends keep something here.
    """

    rows_per_expert: Tensor
    gate_up: Tensor | None
    shared_gate_up: Tensor | None = None
    shared_out: Tensor | None = None
    plan: object = None

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors as a flat list, the form in which autograd saves them."""
        return [self.rows_per_expert, self.gate_up, self.shared_gate_up, self.shared_out]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor | None], plan: object) -> SavedCall:
        """Undo :meth:`tensors`."""
        return cls(*tensors, plan=plan)


def rows_to_keep(call: LayerCall) -> int:
    """Return how many rows keep their pre-activations: those of any routing, or 0 if ``saved_rows`` is smaller.

    The backward of this version takes all of them or none.
    """
    routes = call.x.shape[0] * call.top_k
    capacity = capacity_rows(routes, call.num_local_experts)
    asked = call.config.resolved_saved_rows(routes, call.group.size, call.num_local_experts)
    return capacity if asked >= capacity else 0
