"""DeepEP (deepseek-ai/DeepEP, version 2: ``ElasticBuffer``) for the transport, our backend for the experts.

Written from its public documentation and never run by us: no machine of ours had the package and several GPUs at the
same time. Like every rival it is checked against fp64 before it is timed, so a mistake here shows as a refusal and not
as a number.
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
from moeloom.functional import moe


class _Dispatch(torch.autograd.Function):
    """Send each token to the ranks that own its experts; backward adds up what comes back."""

    @staticmethod
    def forward(ctx, buffer, facts: dict, x: Tensor, ids: Tensor, weights: Tensor):
        got_x, got_ids, got_weights, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **facts)
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(got_ids)
        return got_x, got_ids, got_weights, handle

    @staticmethod
    def backward(ctx, d_x: Tensor, _ids, d_weights: Tensor, _handle):
        d_x, d_weights, _ = ctx.buffer.combine(d_x.contiguous(), ctx.handle, topk_weights=d_weights.contiguous())
        return None, None, d_x, None, d_weights


class _Combine(torch.autograd.Function):
    """Add up each token's results on its own rank; backward sends the gradient along the same ways."""

    @staticmethod
    def forward(ctx, buffer, facts: dict, handle, y: Tensor) -> Tensor:
        ctx.buffer, ctx.facts, ctx.handle = buffer, facts, handle
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx, d_out: Tensor):
        # It sizes its kernels by the number of experts, which it does not take from the handle.
        d_y = ctx.buffer.dispatch(d_out.contiguous(), handle=ctx.handle, **ctx.facts)[0]
        return None, None, None, d_y


class DeepEPContender(Contender):
    """Dispatch, the experts of this rank on what arrived, combine; all in the order of the current stream."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from deep_ep import ElasticBuffer

        tokens, hidden = problem.x.shape
        top_k = problem.ids.shape[1]
        self._buffer = ElasticBuffer(
            problem.process_group, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=top_k
        )
        self._facts = dict(num_experts=problem.num_experts)
        self._config = MoEConfig(backend="torch")
        notes = [version("deep-ep"), "experts by moeloom-torch", "waits for the device once a forward"]
        notes += [SHARED_BESIDE] if problem.shared is not None else []
        self.note = "; ".join(notes)

    def forward(self) -> Tensor:
        """Run the three parts."""
        leaves = self.leaves
        x, ids, weights, handle = _Dispatch.apply(
            self._buffer, self._facts, leaves["x"], self.problem.ids, leaves["topk_weights"]
        )
        # What arrives speaks of local experts; -1 marks routes to other ranks.
        y = moe(
            x,
            ids.to(torch.int64),
            weights,
            leaves["gate_up_proj"],
            leaves["down_proj"],
            swiglu_limit=self.problem.point.shape.swiglu_limit,
            config=self._config,
        )
        return self.add_shared(_Combine.apply(self._buffer, self._facts, handle, y))


class DeepEP(Rival):
    """The transport library of DeepSeek."""

    name = backend = "deepep"

    def missing(self, place: Place) -> str | None:
        """Needs its package, several CUDA devices and bf16."""
        reasons = needs_gpu(place), needs_ranks(place), needs_bf16(place), lacks_package("deep_ep", "deep-ep")
        found = next((reason for reason in reasons if reason), None)
        # The name on PyPI is a stub.
        return found and found.replace("pip install deep-ep", "build github.com/deepseek-ai/DeepEP")

    def prepare(self, problem: Problem, options: RivalOptions) -> Contender:
        """Allocate its buffers; all ranks together."""
        return DeepEPContender(problem)
