"""Liger-Kernel's fused MoE: grouped GEMMs in Triton with gather and SwiGLU fused in (linkedin/Liger-Kernel)."""

from __future__ import annotations

import torch
from torch import Tensor

from moeloom.bench.inputs import Problem
from moeloom.bench.rivals.base import (
    SHARED_BESIDE,
    Contender,
    Place,
    Rival,
    RivalOptions,
    lacks_package,
    needs_bf16,
    needs_gpu,
    needs_one_rank,
    version,
)
from moeloom.errors import MoeloomError


class LigerContender(Contender):
    """``LigerFusedMoEFunction``, which waits for the device once a call to size its grid."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from liger_kernel.ops import LigerFusedMoEFunction

        if problem.has_empty_routes:
            raise MoeloomError("this adapter cannot hand over routes of id -1")
        self._function = LigerFusedMoEFunction
        self._ids = problem.ids.to(torch.int32)
        notes = [version("liger-kernel"), "waits for the device once a forward"]
        notes += [SHARED_BESIDE] if problem.shared is not None else []
        notes += ["no clamp"] if problem.point.shape.swiglu_limit is not None else []
        self.note = "; ".join(notes)

    def forward(self) -> Tensor:
        """Run its layer."""
        leaves = self.leaves
        out = self._function.apply(
            leaves["x"], leaves["gate_up_proj"], leaves["down_proj"], self._ids, leaves["topk_weights"]
        )
        return self.add_shared(out)


class Liger(Rival):
    """Triton kernels that many fine-tuning stacks use."""

    name = backend = "liger"

    def missing(self, place: Place) -> str | None:
        """Needs its wheel, one CUDA device and bf16."""
        reasons = needs_gpu(place), needs_bf16(place), needs_one_rank(place)
        absent = lacks_package("liger_kernel", "liger-kernel")
        return next((reason for reason in (*reasons, absent) if reason), None)

    def prepare(self, problem: Problem, options: RivalOptions) -> Contender:
        """Return its function on our tensors; its first calls tune."""
        return LigerContender(problem)
