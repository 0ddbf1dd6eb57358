"""The experts module of Hugging Face transformers with its ``grouped_mm`` implementation."""

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
    needs_one_rank,
    version,
)

IMPLEMENTATION = "grouped_mm"


class ExpertsContender(Contender):
    """``Qwen3MoeExperts`` as its model calls it: router weights in the dtype of the activations."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        shape = problem.point.shape
        config = Qwen3MoeConfig(
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.inner,
            num_experts=problem.num_local_experts,
            num_experts_per_tok=shape.top_k,
            hidden_act="silu",
        )
        config._experts_implementation = IMPLEMENTATION
        with torch.device("meta"):
            self._experts = Qwen3MoeExperts(config)
        for name in ("gate_up_proj", "down_proj"):
            parameter = torch.nn.Parameter(self.leaves[name].detach())
            setattr(self._experts, name, parameter)
            self.leaves[name] = parameter
        # It takes ids beyond the last expert for "no route".
        self._ids = torch.where(problem.ids < 0, problem.num_local_experts, problem.ids)
        notes = [version("transformers"), f"Qwen3MoeExperts, {IMPLEMENTATION}"]
        notes += ["router weights in bf16"] if problem.x.dtype == torch.bfloat16 else []
        notes += [SHARED_BESIDE] if problem.shared is not None else []
        notes += ["no clamp"] if shape.swiglu_limit is not None else []
        self.note = "; ".join(notes)

    def forward(self) -> Tensor:
        """Run the module."""
        x = self.leaves["x"]
        return self.add_shared(self._experts(x, self._ids, self.leaves["topk_weights"].to(x.dtype)))


class TransformersExperts(Rival):
    """What a Hugging Face model runs by default."""

    name = "transformers"
    backend = f"transformers-{IMPLEMENTATION}"

    def missing(self, place: Place) -> str | None:
        """Needs transformers 5, and one rank."""
        absent = lacks_package("transformers", "transformers>=5")
        if absent or needs_one_rank(place):
            return absent or needs_one_rank(place)
        old = version("transformers").split()[-1].split(".")[0] < "5"
        return "needs transformers 5 or newer" if old else None

    def prepare(self, problem: Problem, options: RivalOptions) -> Contender:
        """Put our weights into its module."""
        return ExpertsContender(problem)
