"""What forward keeps for backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moeloom.backends.call import LayerCall
from moeloom.backends.torch.exchange import LocalRows, RemoteRows
from moeloom.backends.torch.routing import Routes


@dataclass(frozen=True)
class SavedCall:
    """What forward keeps for backward besides its arguments. ``M`` = rows of this rank's experts.

    Attributes:
        routes: of this rank's tokens.
        gate_up: [M, 2I] operand dtype, pre-activations of all rows; None when backward computes them again.
        x_rows: [M, H] operand dtype, token rows in expert order; None when backward gathers or pulls them again.
        shared_gate_up: [T, 2S] operand dtype, or None.
        shared_out: [T, H] accumulation dtype, shared output before the gate; None without a gate.
        plan: how rows move between the ranks; no tensor of activations.
    """

    routes: Routes
    gate_up: Tensor | None
    x_rows: Tensor | None
    shared_gate_up: Tensor | None
    shared_out: Tensor | None
    plan: LocalRows | RemoteRows

    @property
    def rows_per_expert(self) -> Tensor:
        """int64 [experts of this rank], rows of each expert."""
        return self.plan.experts.rows_per_expert

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors as a flat list, the form in which autograd saves them."""
        routes = self.routes
        rest = [self.gate_up, self.x_rows, self.shared_gate_up, self.shared_out]
        return [routes.order, routes.place, routes.ends, *rest]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor | None], plan: LocalRows | RemoteRows) -> SavedCall:
        """Undo :meth:`tensors`."""
        return cls(Routes(*tensors[:3]), *tensors[3:], plan=plan)


def keeps_all(call: LayerCall) -> bool:
    """Tell whether forward keeps pre-activations: of all rows, or of none.

    The host does not know how many rows it will have; no rank has more than there are routes in the group.
    """
    asked = call.config.saved_rows
    return asked is None or asked >= sum(call.tokens_by_rank) * call.top_k
