"""The three launches of a forward pass, kept ready between calls of one kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeloom.runtime.forward import Operands, forward_launch, schedule_launches
from moeloom.runtime.launch import Bound, announce
from moeloom.runtime.tuning import Tuning
from moeloom.runtime.workspace import Workspace

#: Plans that a workspace keeps. Calls with ever new numbers of tokens make ever new plans.
MOST_PLANS = 16


@dataclass(frozen=True)
class CallKind:
    """What the arguments of the launches depend on, besides the workspace and the addresses of a call's tensors.

    Attributes:
        tokens: T.
        minibatch_rows, num_sms, deadline_s, tuning: as for :func:`~moeloom.runtime.forward.forward_launch`.
        saved_rows: rows that keep pre-activations.
        limit: clamp, or None.
        has_start: sums begin with a tensor.
    """

    tokens: int
    minibatch_rows: int
    num_sms: int
    deadline_s: float
    tuning: Tuning
    saved_rows: int
    limit: float | None
    has_start: bool


class ForwardPlan:
    """Schedule and layer, bound to a workspace.

    Args:
        kind: of the calls.
        given: tensors of the first of them; none is kept.
        workspace: memory; it owns the plan.

    Raises:
        ToolchainError: there is no working C compiler, and Triton needs one.
    """

    def __init__(self, kind: CallKind, given: Operands, workspace: Workspace) -> None:
        layer = forward_launch(
            given,
            workspace,
            minibatch_rows=kind.minibatch_rows,
            num_sms=kind.num_sms,
            deadline_s=kind.deadline_s,
            tuning=kind.tuning,
        )
        launches = [*schedule_launches(given, workspace), layer]
        announce(launches)
        self._count, self._place, self._layer = (Bound(launch) for launch in launches)

    def run(self, given: Operands) -> None:
        """Issue the three launches for a call of this kind on the current device and stream."""
        all_ids, x = given.all_ids.data_ptr(), given.x.data_ptr()
        own: dict[str, int] = {}
        if given.gate_up is not None:
            own["gate_up"] = given.gate_up.data_ptr()
        if given.start is not None:
            own["start"] = given.start.data_ptr()
        weights = given.topk_weights.data_ptr()
        self._count.run(ids=all_ids)
        self._place.run(ids=all_ids, x=x, rows_per_expert=given.rows_per_expert.data_ptr())
        self._layer.run(
            gate_up_proj=given.gate_up_proj.data_ptr(),
            down_proj=given.down_proj.data_ptr(),
            topk_ids=given.topk_ids.data_ptr(),
            topk_weights=weights,
            out=given.out.data_ptr(),
            **({"start": weights} | own),
        )


def plan_for(kind: CallKind, given: Operands, workspace: Workspace, make: Callable = ForwardPlan) -> ForwardPlan:
    """Return the workspace's plan for a kind of call; make it if there is none, and drop the one unused longest."""
    plans = workspace.plans
    found = plans.pop(kind, None)
    if found is None:
        found = make(kind, given, workspace)
        while len(plans) >= MOST_PLANS:
            plans.pop(next(iter(plans)))
    plans[kind] = found
    return found
