"""The usual way between GPUs: our torch backend, rows moved by NCCL's all-to-all."""

from __future__ import annotations

from moeloom.bench.inputs import Problem
from moeloom.bench.rivals.base import Contender, Place, Rival, RivalOptions, needs_gpu, needs_ranks
from moeloom.bench.rivals.moeloom_backend import MoeloomBackend, MoeloomContender


class NcclAllToAll(Rival):
    """The same code as ``torch``, under a name that says what moves the rows; refused where NCCL is not what does."""

    name = backend = "nccl-all-to-all"

    def missing(self, place: Place) -> str | None:
        """Needs our torch backend and several GPUs."""
        reasons = needs_gpu(place), needs_ranks(place), MoeloomBackend("torch").missing(place)
        return next((reason for reason in reasons if reason), None)

    def prepare(self, problem: Problem, options: RivalOptions) -> Contender:
        """Return our torch backend over the group."""
        contender = MoeloomContender(problem, "torch")
        contender.note = "our torch backend, NCCL all-to-all"
        return contender
