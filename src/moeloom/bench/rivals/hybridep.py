"""HybridEP through Megatron-Core: its dispatch and combine with permutation, our backend for the experts.

Written from the public documentation of ``megatron.core.transformer.moe.fused_a2a`` and never run by us: no machine of
ours had the packages and several GPUs together. Like every rival it is checked against fp64 before it is timed, so a
mistake here shows as a refusal and not as a number.
"""

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
    needs_ranks,
    version,
)
from moeloom.config import MoEConfig
from moeloom.errors import MoeloomError
from moeloom.functional import moe


class HybridEPContender(Contender):
    """Dispatch into expert order, the experts of this rank, combine."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from megatron.core.transformer.moe import fused_a2a

        if fused_a2a.hybrid_ep_dispatch is None:
            raise MoeloomError("Megatron-Core found no HybridEP in deep_ep; build its hybrid-ep branch")
        if problem.has_empty_routes:
            raise MoeloomError("this adapter cannot hand over routes of id -1")
        self._dispatch, self._combine = fused_a2a.hybrid_ep_dispatch, fused_a2a.hybrid_ep_combine
        fused_a2a.reset_hybrid_ep_buffer()  # Sized for the tokens of the first call.
        self._config = MoEConfig(backend="torch")
        notes = [version("megatron-core"), "experts by moeloom-torch", "waits for the device to size its buffers"]
        notes += [SHARED_BESIDE] if problem.shared is not None else []
        self.note = "; ".join(notes)

    def forward(self) -> Tensor:
        """Run the three parts; the table of tokens by experts that it wants is made here, as Megatron does."""
        leaves, ids = self.leaves, self.problem.ids
        size = (ids.shape[0], self.problem.num_experts)
        chosen = torch.zeros(size, dtype=torch.bool, device=ids.device).scatter(1, ids, True)
        chance = torch.zeros(size, device=ids.device).scatter(1, ids, leaves["topk_weights"])
        rows, weights, _, counts, handle = self._dispatch(
            leaves["x"], chosen, chance, self.problem.process_group, self.problem.num_local_experts
        )
        experts = torch.arange(self.problem.num_local_experts, device=rows.device)
        expert = experts.repeat_interleave(counts.to(rows.device), output_size=rows.shape[0])
        y = moe(
            rows,
            expert[:, None],
            weights.reshape(-1, 1).float(),
            leaves["gate_up_proj"],
            leaves["down_proj"],
            swiglu_limit=self.problem.point.shape.swiglu_limit,
            config=self._config,
        )
        return self.add_shared(self._combine(y, handle, None, None))


class HybridEP(Rival):
    """NVIDIA's branch of DeepEP, as Megatron-Core uses it."""

    name = backend = "hybridep"

    def missing(self, place: Place) -> str | None:
        """Needs Megatron-Core, HybridEP, several CUDA devices and bf16."""
        absent = lacks_package("megatron", "megatron-core")
        built = None
        if absent is None and lacks_package("deep_ep", "deep-ep"):
            built = "HybridEP is not installed: build the hybrid-ep branch of github.com/deepseek-ai/DeepEP"
        reasons = needs_gpu(place), needs_ranks(place), needs_bf16(place), absent, built
        return next((reason for reason in reasons if reason), None)

    def prepare(self, problem: Problem, options: RivalOptions) -> Contender:
        """Take Megatron-Core's functions; all ranks together."""
        return HybridEPContender(problem)
