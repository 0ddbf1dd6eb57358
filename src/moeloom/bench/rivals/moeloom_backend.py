"""Our own backends, through the function that users call."""

from __future__ import annotations

from torch import Tensor

from moeloom.bench.inputs import Problem
from moeloom.bench.rivals.base import Contender, Place, Rival, RivalOptions
from moeloom.config import BACKENDS, MoEConfig
from moeloom.functional import moe


class MoeloomContender(Contender):
    """:func:`moeloom.moe` with a named backend."""

    def __init__(self, problem: Problem, backend: str) -> None:
        super().__init__(problem)
        self._config = MoEConfig(backend=backend)

    def forward(self) -> Tensor:
        """Run the layer."""
        return moe(
            self.leaves["x"],
            self.problem.ids,
            self.leaves["topk_weights"],
            self.leaves["gate_up_proj"],
            self.leaves["down_proj"],
            shared=self.shared_leaves(),
            swiglu_limit=self.problem.point.shape.swiglu_limit,
            group=self.problem.process_group,
            config=self._config,
        )


class MoeloomBackend(Rival):
    """A backend of this library, by its name in ``MoEConfig``."""

    def __init__(self, name: str) -> None:
        self.name, self.backend = name, f"moeloom-{name}"

    def missing(self, place: Place) -> str | None:
        """A backend that this version does not have is missing."""
        if self.name in BACKENDS:
            return None
        return f"this version of moeloom has no backend '{self.name}'; it has {', '.join(BACKENDS[1:])}"

    def prepare(self, problem: Problem, options: RivalOptions) -> Contender:
        """Return the layer with this backend."""
        return MoeloomContender(problem, self.name)
